"""Which steps the scheduler asks for, with a model whose next token is known; requests arrive and leave at any time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.errors import UserError
from erniekit.inference.decoding.scheduler import Event, Request, Scheduler
from erniekit.inference.decoding.step import BLOCK_TOKENS
from erniekit.inference.sampling import Sampling

VOCABULARY = 97
STOP = 96


def next_token(tokens):
    """What the model says after some tokens: it depends on each of them and on its place."""
    return (sum((place + 1) * token for place, token in enumerate(tokens)) * 31 + len(tokens)) % (VOCABULARY - 1)


def expected_answer(prompt, room, stop=None):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + room:
        token = next_token(tokens)
        if token == stop:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


class BlockModel:
    """A step whose cache holds the tokens themselves, so that a wrong block or place gives another answer."""

    def __init__(self, blocks):
        self.slots = np.full((blocks, BLOCK_TOKENS), -1)
        self.batches = []

    def logits(self, batch):
        self.batches.append(batch)
        rows = np.zeros((len(batch.token_ids), VOCABULARY), np.float32)
        for number, table in enumerate(batch.block_tables):
            cached = batch.cached[number]
            for token in range(batch.starts[number], batch.starts[number + 1]):
                place = batch.positions[token]
                assert place == cached + token - batch.starts[number]
                self.slots[table[place // BLOCK_TOKENS], place % BLOCK_TOKENS] = batch.token_ids[token]
                seen = self.slots[table[: place // BLOCK_TOKENS + 1]].reshape(-1)[: place + 1]
                assert (seen >= 0).all()
                rows[token, next_token(seen.tolist())] = 1.0
        return rows[batch.wanted]


def make(blocks=40, **settings):
    model = BlockModel(blocks)
    return Scheduler(model, blocks, **settings), model


def request(prompt, room=5, stop=None, **more):
    return Request(prompt, Sampling(stop_token_ids=() if stop is None else (stop,)), room, **more)


def collect(scheduler, answers=None, steps=10_000):
    answers = {} if answers is None else answers
    while scheduler.unfinished and steps:
        steps -= 1
        for event in scheduler.step():
            answers.setdefault(event.request, [])
            if event.token is not None:
                answers[event.request].append(event.token)
    return answers


def prompts_of(*lengths):
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCABULARY - 1, length).tolist() for length in lengths]


def test_every_request_gets_its_own_answer():
    prompts = prompts_of(1, 16, 17, 3, 70, 15, 40, 2)
    rooms = [9, 1, 20, 33, 5, 2, 17, 16]
    scheduler, model = make(max_running=3, step_tokens=24)
    ids = [scheduler.submit(request(prompt, room)) for prompt, room in zip(prompts, rooms, strict=True)]
    assert ids == list(range(8)) and scheduler.unfinished == 8
    answers = collect(scheduler)
    assert [answers[number] for number in ids] == [
        expected_answer(prompt, room) for prompt, room in zip(prompts, rooms, strict=True)
    ]
    assert max(len(batch.cached) for batch in model.batches) == 3
    assert max(len(batch.token_ids) for batch in model.batches) <= 24
    assert scheduler.step() == []


def test_events_say_how_an_answer_ends():
    (prompt,) = prompts_of(6)
    whole = expected_answer(prompt, 8)
    scheduler, _ = make()
    scheduler.submit(request(prompt, 2))
    stopped = scheduler.submit(request(prompt, 8, stop=whole[3]))
    events = [event for _ in range(4) for event in scheduler.step()]
    assert [event for event in events if event.request == 0] == [
        Event(0, whole[0], None),
        Event(0, whole[1], "length"),
    ]
    end = whole.index(whole[3])
    assert [event for event in events if event.request == stopped] == [
        *(Event(stopped, token, None) for token in whole[:end]),
        Event(stopped, None, "stop", ending=(whole[3], None)),
    ]
    assert scheduler.unfinished == 0


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_only_their_own_request(wrong, temperature):
    prompts = prompts_of(6, 5, 7)
    scheduler, model = make()
    correct = model.logits

    def logits(batch):
        rows = 100 * correct(batch)
        if len(model.batches) == 3:
            rows[1, 20] = wrong
        return rows

    model.logits = logits
    sampling = Sampling(temperature=temperature)
    for prompt in prompts:
        scheduler.submit(Request(prompt, sampling, 6))
    events = [event for _ in range(6) for event in scheduler.step()]
    expected = [expected_answer(prompt, 6) for prompt in prompts]
    assert [event.token for event in events if event.request == 0] == expected[0]
    assert [event.token for event in events if event.request == 2] == expected[2]
    own = [event for event in events if event.request == 1]
    assert own == [*(Event(1, token, None) for token in expected[1][:2]), Event(1, None, "failed")]
    assert scheduler.unfinished == 0 and scheduler._blocks.free == scheduler._blocks.count


def test_answers_grow_while_a_long_prompt_is_read():
    short, long = prompts_of(3, 100)
    scheduler, model = make(step_tokens=20, max_running=4)
    scheduler.submit(request(short, 12))
    scheduler.step()
    scheduler.submit(request(long, 4))
    answers = collect(scheduler)
    assert answers == {0: expected_answer(short, 12)[1:], 1: expected_answer(long, 4)}
    shared = [batch for batch in model.batches if len(batch.cached) == 2]
    assert [np.diff(batch.starts).tolist() for batch in shared[:6]] == [[1, 19]] * 5 + [[1, 5]]
    assert [len(batch.wanted) for batch in shared[:6]] == [1] * 5 + [2]


def test_requests_arrive_and_leave_between_steps():
    prompts = prompts_of(5, 30, 8, 12)
    scheduler, _ = make(max_running=2, step_tokens=16)
    answers = {}
    for prompt in prompts[:3]:
        scheduler.submit(request(prompt, 10))
    for _ in range(4):
        collect(scheduler, answers, steps=1)
    scheduler.cancel(1)  # under way
    scheduler.cancel(2)  # waiting
    scheduler.cancel(17)  # unknown
    assert scheduler.unfinished == 1
    begun = list(answers.get(1, []))
    late = scheduler.submit(request(prompts[3], 10))
    collect(scheduler, answers)
    scheduler.cancel(0)  # has ended
    assert answers[0] == expected_answer(prompts[0], 10)
    assert answers[late] == expected_answer(prompts[3], 10)
    assert answers.get(1, []) == begun and 2 not in answers
    assert scheduler._blocks.free == scheduler._blocks.count


def test_where_blocks_run_out_the_latest_request_is_computed_again():
    prompts = prompts_of(16, 16, 16)
    scheduler, model = make(blocks=8)
    for prompt in prompts:
        scheduler.submit(request(prompt, 60))
    answers = collect(scheduler)
    assert [answers[number] for number in range(3)] == [expected_answer(prompt, 60) for prompt in prompts]
    again = [batch for batch in model.batches[1:] if (batch.cached == 0).any()]
    assert again, "three answers of 76 tokens need 15 blocks"
    assert len(again) < 6, "a request does not begin where it would be stopped at once"


def test_sampled_answers_do_not_depend_on_a_second_computation():
    prompts = prompts_of(16, 16, 16)
    sampling = Sampling(temperature=8.0, seed=5)
    found = []
    for blocks in (8, 40):
        scheduler, _ = make(blocks=blocks)
        for number, prompt in enumerate(prompts):
            scheduler.submit(Request(prompt, sampling, 60, stream=number))
        found.append(collect(scheduler))
    assert found[0] == found[1]
    assert found[0][0] != expected_answer(prompts[0], 60)


def test_what_prompts_have_in_common_is_computed_once():
    (common, one, other) = prompts_of(75, 9, 30)
    prompts = [common, common + one, common[:40], common + other, common, other, common[:64]]
    scheduler, model = make(max_running=7, step_tokens=48)
    for prompt in prompts:
        scheduler.submit(request(prompt, 20))
    assert collect(scheduler) == {number: expected_answer(prompt, 20) for number, prompt in enumerate(prompts)}
    computed = sum(len(batch.token_ids) for batch in model.batches) - 7 * 19
    # the beginning, and what lies behind the last full block that a token follows: of all that begin alike, and alone
    assert computed == 75 + (84 - 64) + (40 - 32) + (105 - 64) + (75 - 64) + 30 + (64 - 48)
    assert scheduler.blocks_in_use == 0


def test_equal_prompts_with_other_adapters_or_inputs_share_nothing():
    (prompt,) = prompts_of(40)
    scheduler, model = make()
    for more in ({}, {"adapters": "a"}, {"rotary": list(range(41))}, {"inputs": dict}):
        scheduler.submit(request(prompt, 3, **more))
    answers = collect(scheduler)
    assert list(answers.values()) == [expected_answer(prompt, 3)] * 4
    assert sum(len(batch.token_ids) for batch in model.batches) == 4 * (40 + 2)


def test_a_request_that_waits_for_another_goes_on_when_that_one_leaves():
    (prompt,) = prompts_of(60)
    scheduler, _ = make(step_tokens=20, max_running=3)
    ids = [scheduler.submit(request(prompt, 3)) for _ in range(3)]
    scheduler.step()
    scheduler.cancel(ids[0])
    assert collect(scheduler) == dict.fromkeys(ids[1:], expected_answer(prompt, 3))


@settings(deadline=None)
@given(st.data())
def test_shared_blocks_change_no_answer(data):
    """Whatever prompts have in common, where blocks run out, and while requests leave."""
    blocks, step_tokens = data.draw(st.integers(12, 30)), data.draw(st.integers(5, 60))
    scheduler, _ = make(blocks=blocks, max_running=5, step_tokens=step_tokens)
    expected, answers = {}, {}
    for _ in range(data.draw(st.integers(1, 12))):
        length, changed, room = (data.draw(st.integers(1, most)) for most in (90, 120, 30))
        prompt = [(place * 7) % 90 + (place >= changed) for place in range(length)]
        expected[scheduler.submit(request(prompt, room))] = expected_answer(prompt, room)
        for event in scheduler.step() if data.draw(st.booleans()) else []:
            answers.setdefault(event.request, []).append(event.token)
        if data.draw(st.integers(0, 5)) == 0:
            left = data.draw(st.sampled_from(sorted(expected)))
            scheduler.cancel(left)
            expected.pop(left), answers.pop(left, None)
    assert collect(scheduler, answers) == expected
    assert scheduler.blocks_in_use == 0


def test_a_request_that_never_fits_is_refused():
    scheduler, _ = make(blocks=2)
    with pytest.raises(UserError, match=r"a prompt of 20 tokens with an answer of up to 14 .* the 32 tokens"):
        scheduler.submit(request(prompts_of(20)[0], 14))
    scheduler.submit(request(prompts_of(20)[0], 13))
    assert len(collect(scheduler)[0]) == 13
    with pytest.raises(ValueError, match="max_running is 9"):
        make(max_running=9, step_tokens=8)


def test_further_inputs_are_read_when_their_prompt_is_computed_alone_and_whole():
    prompts = prompts_of(5, 40, 7)
    read = []

    def inputs():
        read.append(len(model.batches))
        return {"states": np.arange(40)}

    scheduler, model = make(blocks=7, step_tokens=16, max_running=2)
    scheduler.submit(request(prompts[0], 70))
    scheduler.submit(request(prompts[1], 40, inputs=inputs))
    scheduler.submit(request(prompts[2], 4))
    answers = collect(scheduler)
    assert [answers[number] for number in range(3)] == [
        expected_answer(prompt, room) for prompt, room in zip(prompts, (70, 40, 4), strict=True)
    ]
    with_inputs = [number for number, batch in enumerate(model.batches) if batch.inputs]
    assert with_inputs == read and len(read) == 2, "it was computed again, too"
    for number in with_inputs:
        assert np.diff(model.batches[number].starts).tolist() == [40]


def test_a_step_that_fails_leaves_requests_as_they_were():
    prompts = prompts_of(5, 6)
    scheduler, _ = make()
    scheduler.submit(request(prompts[0], 4))
    collect(scheduler, steps=1)

    def unreadable():
        raise UserError("no sound")

    broken = scheduler.submit(request(prompts[1], 4, inputs=unreadable))
    for _ in range(2):
        with pytest.raises(UserError, match="no sound"):
            scheduler.step()
    scheduler.cancel(broken)
    assert collect(scheduler)[0] == expected_answer(prompts[0], 4)[1:]


def test_positions_of_rotation_are_those_of_the_request() -> None:
    """A prompt in chunks, an answer that counts on, and a request beside it that counts its places."""
    scheduler, model = make(max_running=2, step_tokens=3)
    scheduler.submit(request([1, 2, 3, 4], room=3, rotary=(0, 1, 0, 1, 7)))
    scheduler.submit(request([5, 6], room=2))
    while scheduler.unfinished:
        scheduler.step()
    turned: dict[int, list[int]] = {}
    for batch in model.batches:
        rotary = batch.positions if batch.rotary is None else batch.rotary
        for number, table in enumerate(batch.block_tables):
            own = slice(batch.starts[number], batch.starts[number + 1])
            turned.setdefault(int(table[0]), []).extend(rotary[own].tolist())
    assert sorted(turned.values()) == [[0, 1, 0, 1, 7, 8], [0, 1, 2]]


def test_sets_of_adapters_take_turns_and_never_share_a_step():
    prompts = prompts_of(5, 20, 3, 9)
    names = ["", "a", "a", "b"]
    scheduler, model = make(step_tokens=16, max_running=8)
    ids = [scheduler.submit(request(prompt, 6, adapters=name)) for prompt, name in zip(prompts, names, strict=True)]
    answers = collect(scheduler)
    assert [answers[number] for number in ids] == [expected_answer(prompt, 6) for prompt in prompts]
    seen = [batch.adapters for batch in model.batches]
    assert set(seen) == set(names) and all(set(seen[start : start + 3]) == {"", "a", "b"} for start in range(0, 9, 3))


def test_a_constraint_says_which_tokens_follow():
    class Even:
        accepted: list[int]

        def __init__(self):
            self.accepted = []

        def allowed(self):
            allowed = np.arange(VOCABULARY) % 2 == 0
            allowed[STOP] = len(self.accepted) >= 4
            return allowed

        def accept(self, token):
            self.accepted.append(token)

    (prompt,) = prompts_of(6)
    even = Even()
    scheduler, _ = make()
    sampling = Sampling(temperature=1.0, seed=3, stop_token_ids=(STOP,))
    scheduler.submit(Request(prompt, sampling, 20, constraint=even))
    free = scheduler.submit(request(prompt, 20))
    answers = collect(scheduler)
    assert answers[0] == even.accepted and len(answers[0]) >= 4 and all(token % 2 == 0 for token in answers[0])
    assert answers[free] == expected_answer(prompt, 20)


def test_probabilities_are_told_where_they_are_asked_for():
    (prompt,) = prompts_of(6)
    scheduler, _ = make()
    scheduler.submit(Request(prompt, Sampling(logprobs=2), 3))
    scheduler.submit(request(prompt, 3))
    events = [event for _ in range(3) for event in scheduler.step()]
    total = np.log(np.e + VOCABULARY - 1)
    for event in events:
        if event.request == 1:
            assert event.logprobs is None
        else:
            assert event.logprobs.chosen == pytest.approx(1 - total)
            assert event.logprobs.top[0][0] == event.token
            assert [value for _, value in event.logprobs.top] == pytest.approx([1 - total, -total])


def test_what_is_in_use_is_told():
    (prompt,) = prompts_of(BLOCK_TOKENS * 10 - 2)
    scheduler, _ = make(blocks=40)
    scheduler.submit(request(prompt, 2))
    assert scheduler.running == 0 and scheduler.blocks_in_use == 0
    scheduler.step()
    assert scheduler.running == 1 and scheduler.blocks_in_use == 0.25
