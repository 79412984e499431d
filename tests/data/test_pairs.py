"""A prompt packed once with two answers: where everything lies, who sees whom, and what becomes of long pairs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from erniekit.data.collate import collate
from erniekit.data.conversation import ASSISTANT, USER, Conversation, Preference, Turn
from erniekit.data.loader import prefetch
from erniekit.data.open_dataset import open_dataset
from erniekit.data.pairs import EncodedAnswer, encode_pair, first_answers, join_pair
from erniekit.data.sampler import StepPlan
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample, chat_template, encode_prompt, encode_sample
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import DataError
from erniekit.runners.preview import READ, REJECTED, RESET, TRAINED, render_batch

from .conftest import CONTROL_TOKENS, write_tokenizer
from .test_jinja_template import TEMPLATES

PAD = 0


def answer(tokens):
    return EncodedAnswer(tokens, tokens)


def pair(prompt=(1, 2, 3), chosen=(4, 5), rejected=(6, 7, 8), difference=None, window=None):
    return join_pair(list(prompt), answer(list(chosen)), answer(list(rejected)), difference, window)


def test_the_layout():
    sample = pair()
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 3, 6, 7]
    assert sample.labels.tolist() == [-100, -100, 4, 5, 6, 7, 8]
    assert sample.pair[:2] == (2, 4) and math.isnan(sample.pair.score_difference)
    batch = collate([[sample], [pair((9,), (1,), (2,), 3.0), pair()]], [[7], [8, 9]], PAD, pairs=True)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 3, 4, 0, 0], [0, 0, 0, 1, 2, 3, 2, 3, 4]]
    assert batch.document_ends.tolist() == [[7, 7, 4, 4, 7, 7, 7, 7, 7], [1, 2, 9, 9, 6, 6, 9, 9, 9]]
    assert batch.pairs.answers.tolist() == [[-1, -1, 0, 0, 1, 1, 1, -1, -1], [2, 3, -1, -1, 4, 4, 5, 5, 5]]
    assert batch.pairs.count == 3
    np.testing.assert_array_equal(batch.pairs.score_differences, np.array([np.nan, 3.0, np.nan], np.float32))
    assert (batch.token_count, batch.target_count) == (16, 12)


def test_the_layout_where_attention_has_a_window():
    """A pair of more positions than it has its prompt twice, and each answer stands where it does alone."""
    sample = pair(window=6)
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 1, 2, 3, 6, 7]
    assert sample.labels.tolist() == [-100, -100, 4, 5, -100, -100, 6, 7, 8]
    assert sample.pair[:2] == (2, 6) and sample.documents == (4,)
    shared = pair(window=7)
    assert shared.documents == () and shared.input_ids.tolist() == pair().input_ids.tolist()
    batch = collate([[shared, sample]], [[3, 4]], PAD, pairs=True)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3, 4]]
    assert batch.document_ends.tolist() == [[7, 7, 4, 4, 7, 7, 7, 11, 11, 11, 11, 16, 16, 16, 16, 16]]
    assert batch.pairs.answers.tolist() == [[-1, -1, 0, 0, 1, 1, 1, -1, -1, 2, 2, -1, -1, 3, 3, 3]]


def test_a_batch_of_padding_has_no_pairs():
    batch = collate([[]], [[]], PAD, pairs=True)
    assert batch.pairs.count == 0 and (batch.pairs.answers == -1).all()
    assert collate([[]], [[]], PAD).pairs is None


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("multiple_of", [1, 4])
def test_first_answers_alone_are_documents(multiple_of, window):
    later = join_pair([1], EncodedAnswer([2, 3, 4], [IGNORE_INDEX, 3, 4]), answer([5]))  # begins without a target
    rows = [[pair(window=window), pair((9,), (1,), (2,), 3.0)], [later], []]
    indices = [[7, 8], [9], []]
    whole = collate(rows, indices, PAD, pairs=True).padded(4, 20)
    ends = [[(*each.documents, each.pair.rejected)[0] for each in row] for row in rows]
    alone = [[Sample(each.input_ids[:end], each.labels[:end]) for each, end in zip(row, own, strict=True)]
             for row, own in zip(rows, ends, strict=True)]  # fmt: skip
    expected = collate(alone, indices, PAD).padded(4, 5 + -5 % multiple_of)
    found = first_answers(whole, multiple_of)
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=name)
    assert found.pairs.answers[:2, :5].tolist() == [[-1, -1, 0, 0, 2], [-1, 4, 4, -1, -1]]
    np.testing.assert_array_equal(found.pairs.score_differences, whole.pairs.score_differences)
    assert found.samples == whole.samples
    assert (found.token_count, found.target_count) == (expected.token_count, expected.target_count) == (8, 5)


def test_turns_of_the_user_in_an_answer_are_no_targets():
    sample = join_pair([1], EncodedAnswer([2, 3, 4], [2, IGNORE_INDEX, 4]), answer([5]))
    batch = collate([[sample]], [[0]], PAD, pairs=True)
    assert batch.labels.tolist() == [[2, -100, 4, 5]]
    assert batch.pairs.answers.tolist() == [[0, -1, 0, 1]]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)), max_size=3),
        min_size=1,
        max_size=2,
    )
)
def test_each_answer_sees_its_prompt_and_itself_alone(rows):
    """The mask by its definition, from who belongs to whom, against the indices; and the tokens along each branch."""
    samples, number = [], 10
    for row in rows:
        samples.append([])
        for lengths in row:
            parts = []
            for length in lengths:
                parts.append(list(range(number, number + length)))
                number += length
            samples[-1].append((parts, pair(*parts)))
    batch = collate(
        [[sample for _, sample in row] for row in samples], [range(len(row)) for row in samples], PAD, pairs=True
    )
    for number, row in enumerate(samples):
        owner = []  # (pair, branch) of every position: branch 0 is the prompt's
        for index, (parts, _) in enumerate(row):
            prompt, chosen, rejected = (len(part) for part in parts)
            owner += [(index, 0)] * (prompt - 1) + [(index, 1)] * chosen + [(index, 2)] * rejected
        size = batch.input_ids.shape[1]
        starts = batch.startend_row_indices[number, 0, :, 0]
        for query in range(size):
            seen = [key for key in range(query + 1) if query < starts[key]]
            if query >= len(owner):
                assert not seen
                continue
            mine, branch = owner[query]
            expected = [key for key in range(query + 1) if owner[key][0] == mine and owner[key][1] in (0, branch)]
            assert seen == expected
            # along a branch the model reads the dialogue that it stands for, position by position
            parts = row[mine][0]
            dialogue = parts[0] + (parts[branch] if branch else [])
            assert batch.input_ids[number, seen].tolist() == dialogue[: len(seen)]
            assert batch.position_ids[number, seen].tolist() == list(range(len(seen)))
            if batch.labels[number, query] != IGNORE_INDEX:
                assert batch.labels[number, query] == dialogue[len(seen)]
    assert (batch.pairs.answers >= 0).sum() == batch.target_count


def preference(prompt=("q",), chosen=("good",), rejected=("bad",), system=""):
    def turns(texts, first):
        roles = (USER, ASSISTANT) if first == USER else (ASSISTANT, USER)
        return tuple(
            Turn(roles[i % 2], text, first == ASSISTANT and roles[i % 2] == ASSISTANT) for i, text in enumerate(texts)
        )

    return Preference(Conversation(turns(prompt, USER), system), turns(chosen, ASSISTANT), turns(rejected, ASSISTANT))


RECORDS = [
    preference(),
    preference(("How many?", "six apples", "And when?"), ("On Friday.",), ("No.",), "Be brief."),
    preference(("q",), ("one", "go on", "two"), ("three",)),
    # an answer whose last turns are only read ends with the last that is trained
    replace(
        preference(chosen=("one", "go on", "two")),
        chosen=(Turn(ASSISTANT, "one", True), Turn(USER, "go on"), Turn(ASSISTANT, "two")),
    ),
]


@pytest.fixture(scope="module", params=["ernie", *TEMPLATES])
def own_template(request, tmp_path_factory):
    """A tokenizer and its template: ERNIE-4.5's, or a jinja one."""
    folder = write_tokenizer(
        tmp_path_factory.mktemp("tokenizer"), (*CONTROL_TOKENS, "<|im_start|>", "<|im_end|>", "<|eot|>")
    )
    if request.param != "ernie":
        (folder / "chat_template.jinja").write_text(TEMPLATES[request.param])
    tokenizer = load_tokenizer(folder)
    return tokenizer, chat_template(tokenizer)


@pytest.mark.parametrize("record", RECORDS)
def test_branches_are_the_tokens_of_the_dialogues(own_template, record):
    """What is read and predicted along a branch is what supervised training has of the same dialogue."""
    tokenizer, template = own_template
    sample = encode_pair(template, tokenizer, record)
    chosen_start, rejected_start, _ = sample.pair
    dialogue = Conversation(record.prompt.turns, record.prompt.system)
    assert sample.input_ids[: chosen_start + 1].tolist() == encode_prompt(template, tokenizer, dialogue)
    assert sample.input_ids[rejected_start] == sample.input_ids[chosen_start]
    for turns, branch in (
        (record.chosen, slice(chosen_start, rejected_start)),
        (record.rejected, slice(rejected_start, None)),
    ):
        prompt = tuple(Turn(turn.role, turn.content) for turn in record.prompt.turns)
        document = encode_sample(template, tokenizer, Conversation(prompt + turns, record.prompt.system))
        shared = slice(0, chosen_start)
        read = np.concatenate([sample.input_ids[shared], sample.input_ids[branch]])
        labels = np.concatenate([sample.labels[shared], sample.labels[branch]])
        np.testing.assert_array_equal(read, document.input_ids)
        np.testing.assert_array_equal(labels, document.labels)


RECORD = {"src": ["Count from one to ten."], "tgt": [], "response": [["one two"], ["ten"]], "sort": [1, 0]}
LONG = {
    "src": ["The river runs past the old mill and under the bridge."] * 3,
    "tgt": ["Winter days are short."] * 2,
    "response": [["six apples"], ["days"]],
    "sort": [1, 0],
}


@pytest.fixture
def open_pairs(make_source, tokenizer, template, tmp_path):
    def open_(records, kind="erniekit", **options):
        source = make_source(records, f"{kind} preferences")
        return open_dataset(
            [source], tokenizer, template, cache_dir=tmp_path / "cache", **{"max_seq_len": 512, **options}
        )

    return open_


@pytest.fixture
def write_tokenizer_with(tmp_path):
    def write(normalizer):
        folder = write_tokenizer(tmp_path / "tokenizer")
        values = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        (folder / "tokenizer.json").write_text(json.dumps({**values, "normalizer": normalizer}), encoding="utf-8")
        return load_tokenizer(folder)

    return write


def test_a_dataset_of_pairs_comes_back_from_its_cache(open_pairs, monkeypatch):
    first = open_pairs([RECORD, {**LONG, "sort": [0, 4]}])
    monkeypatch.setattr("erniekit.data.open_dataset.tokenise", None)  # the second time nothing is tokenised
    again = open_pairs([RECORD, {**LONG, "sort": [0, 4]}])
    assert again.pairs and len(again) == 2 and again.fingerprint == first.fingerprint
    for number in range(2):
        one, other = first.sample(number), again.sample(number)
        np.testing.assert_array_equal(one.input_ids, other.input_ids)
        assert one.pair == other.pair
    assert again.sample(1).pair.score_difference == 4.0
    assert again.lengths.tolist() == [len(again.sample(number).input_ids) for number in range(2)]
    assert again.report.sources[0].targets == sum(int((again.sample(i).labels != IGNORE_INDEX).sum()) for i in range(2))


def test_other_prompt_limits_are_other_data(open_pairs):
    prints = {open_pairs([RECORD, LONG], max_prompt_len=length).fingerprint for length in (None, 100, 200)}
    assert len(prints) == 3


def test_pairs_beyond_the_window_have_their_prompt_twice_and_must_fit_so(open_pairs):
    whole = open_pairs([RECORD, LONG])
    short, long = (len(whole.sample(number).input_ids) for number in range(2))
    assert short < long and "twice" not in str(whole.report)
    prompt = whole.sample(1).pair.chosen
    twice = open_pairs([RECORD, LONG], pair_window=long - 1)
    assert twice.fingerprint != whole.fingerprint
    assert twice.lengths.tolist() == [short, long + prompt] and twice.report.sources[0].repeated_prompts == 1
    assert "1 with their prompt twice (longer than a window of the model's attention)" in str(twice.report)
    again = twice.sample(1)
    assert again.documents == (whole.sample(1).pair.rejected,) and again.pair.rejected == again.documents[0] + prompt
    np.testing.assert_array_equal(again.input_ids[again.documents[0] :][:prompt], again.input_ids[:prompt])
    limits = {"max_seq_len": long + prompt - 1, "pair_window": long - 1}
    assert open_pairs([RECORD, LONG], **limits).report.sources[0].dropped == 1
    with pytest.raises(DataError, match=rf"data.jsonl:2: .* the prompt twice .*, got {long + prompt}\b"):
        open_pairs([RECORD, LONG], **limits, over_length="error")
    shorter = open_pairs([RECORD, LONG], **limits, over_length="truncate_turns")
    assert shorter.report.sources[0].truncated == 1 and shorter.report.sources[0].repeated_prompts == 0
    assert len(shorter.sample(1).input_ids) < long and shorter.sample(1).documents == ()


def test_long_prompts_lose_their_oldest_turns(open_pairs):
    whole = open_pairs([LONG])
    prompt = whole.sample(0).pair.chosen + 1
    shorter = open_pairs([LONG], max_prompt_len=prompt - 1)
    assert shorter.report.sources[0].truncated == 1 and shorter.report.sources[0].dropped == 0
    assert "shortened by dropping their oldest turns" in str(shorter.report)
    removed = len(whole.sample(0).input_ids) - len(shorter.sample(0).input_ids)
    assert 0 < removed < prompt
    kept = shorter.sample(0).pair.chosen + 1
    one = open_pairs([LONG], max_prompt_len=kept - 1)  # down to the last question
    assert one.sample(0).pair.chosen < kept - 1
    answers = [sample.labels[sample.labels != IGNORE_INDEX].tolist() for sample in (whole.sample(0), one.sample(0))]
    assert answers[0] == answers[1]
    last = one.sample(0).pair.chosen + 1
    with pytest.raises(DataError, match=r"none of its 1 records fits max_prompt_len .*; raise max_prompt_len"):
        open_pairs([LONG], max_prompt_len=last - 1)
    dropped = open_pairs([LONG, RECORD], max_prompt_len=last - 1)
    report = dropped.report.sources[0]
    assert (report.dropped, report.long_prompts, report.kept, len(dropped)) == (1, 1, 1, 1)
    assert "1 kept, 1 dropped (their last question is longer than max_prompt_len)" in str(dropped.report)
    with pytest.raises(DataError, match=rf"data.jsonl:1: prompt: .* \(max_prompt_len\) .*, got {last}\b"):
        open_pairs([LONG, RECORD], max_prompt_len=last - 1, over_length="error")


def test_long_pairs_follow_the_policy(open_pairs):
    length = len(open_pairs([LONG]).sample(0).input_ids)
    dropped = open_pairs([LONG, RECORD], max_seq_len=length - 1)
    assert (dropped.report.sources[0].dropped, dropped.report.sources[0].long_prompts) == (1, 0)
    assert "1 dropped (longer than max_seq_len)" in str(dropped.report) and "1 pairs" in str(dropped.report)
    shorter = open_pairs([LONG, RECORD], max_seq_len=length - 1, over_length="truncate_turns")
    assert shorter.report.sources[0].truncated == 1 and len(shorter) == 2
    assert shorter.lengths.max() < length
    with pytest.raises(DataError, match=r"data.jsonl:1: length: expected at most .* in prompt and both answers"):
        open_pairs([LONG, RECORD], max_seq_len=length - 1, over_length="error")


def test_scores_are_asked_for_where_the_loss_needs_them(open_pairs):
    records = [{"question": "q", "chosen": "a", "rejected": "b", **more} for more in (
        {"score_chosen": 2, "score_rejected": 1}, {}, {"score_chosen": 1, "score_rejected": 1},
    )]  # fmt: skip
    assert len(open_pairs(records, "alpaca")) == 3
    with pytest.raises(DataError) as raised:
        open_pairs(records, "alpaca", needs_scores=True)
    text = str(raised.value)
    assert "data.jsonl:2: score_chosen" in text and "got none" in text
    assert "data.jsonl:3: score_chosen" in text and "a difference of 0" in text


def test_differences_that_float32_rounds_to_nothing_are_none(open_pairs):
    tiny = {"question": "q", "chosen": "a", "rejected": "b", "score_chosen": 1e-50, "score_rejected": 0}
    with pytest.raises(DataError, match="a difference of 1e-50"):
        open_pairs([tiny], "alpaca", needs_scores=True)


def test_all_problems_of_a_file_are_told_in_one_pass(open_pairs):
    """Of reading, of texts and of encoding."""
    records = [RECORD, {**RECORD, "sort": [1]}, {**RECORD, "src": [""]}, {**RECORD, "response": ["a"]}]
    with pytest.raises(DataError) as raised:
        open_pairs([*records, LONG], max_seq_len=60, over_length="error")
    text = str(raised.value)
    for location in (
        "data.jsonl:2: sort",
        "data.jsonl:3: src[0]",
        "data.jsonl:4: response",
        "data.jsonl:5: length",
    ):
        assert location in text
    assert "4 problems" in text


def test_answers_that_tokenise_alike_are_skipped(write_tokenizer_with, make_source, tmp_path):
    """The lower-casing normalizer of a tokenizer leaves no difference to prefer."""
    lowering = write_tokenizer_with({"type": "Lowercase"})
    source = make_source([RECORD, {**RECORD, "response": [["Ten"], ["ten"]]}], "erniekit preferences")
    pairs = open_dataset([source], lowering, chat_template(lowering), max_seq_len=512, cache_dir=tmp_path / "cache")
    assert len(pairs) == 1
    assert "data.jsonl:2: rejected: expected another answer than chosen" in str(pairs.report)


def test_a_template_that_begins_a_pair_in_two_ways_is_reported(tokenizer, template, make_source, tmp_path):
    class Clock:
        """As one that writes the time of rendering."""

        stop_token_ids, end_of_turn_target, fingerprint = template.stop_token_ids, None, "clock"
        seconds = 0

        def render(self, conversation):
            self.seconds += conversation.turns[0].content == "now"
            return template.render(replace(conversation, system=f"{self.seconds} s"))

        def render_many(self, conversations):
            return [self.render(conversation) for conversation in conversations]

    source = make_source([{**RECORD, "src": "q"}, {**RECORD, "src": "now"}], "erniekit preferences")
    with pytest.raises(DataError, match=r"data.jsonl:2: record: .* in two ways"):
        open_dataset([source], tokenizer, Clock(), max_seq_len=512, cache_dir=tmp_path / "cache")


def test_a_short_prompt_does_not_hide_a_long_answer(open_pairs):
    """What is told is what is too long once the prompt has lost its oldest turns."""
    answers = {**LONG, "response": [["days " * 200], ["six"]]}
    last = open_pairs([{**LONG, "src": LONG["src"][:1], "tgt": []}]).sample(0).pair.chosen + 1
    with pytest.raises(DataError, match=r"data.jsonl:1: length: expected at most 150 tokens .*max_seq_len"):
        open_pairs([answers], max_prompt_len=last, max_seq_len=150, over_length="error")
    dropped = open_pairs([answers, RECORD], max_prompt_len=last, max_seq_len=150).report.sources[0]
    assert (dropped.dropped, dropped.long_prompts, dropped.truncated) == (1, 0, 0)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    questions=st.lists(st.sampled_from(["one", "two words", "three of the words"]), min_size=1, max_size=4),
    max_prompt_len=st.integers(20, 90),
    max_seq_len=st.integers(30, 120),
    policy=st.sampled_from(["drop", "truncate_turns"]),
)
def test_as_few_turns_go_as_the_limits_ask(
    questions, max_prompt_len, max_seq_len, policy, open_pairs, tokenizer, template
):
    """Against trying every number of removed exchanges in turn."""
    record = {"src": questions, "tgt": questions[1:], "response": ["yes", "no, not at all"], "sort": [1, 0]}
    candidates = []
    for gone in range(len(questions)):
        turns = [Turn(USER, questions[gone])]
        for number in range(gone + 1, len(questions)):
            turns += [Turn(ASSISTANT, questions[number]), Turn(USER, questions[number])]
        pair = Preference(
            Conversation(tuple(turns)), (Turn(ASSISTANT, "yes", True),), (Turn(ASSISTANT, "no, not at all", True),)
        )
        candidates.append(encode_pair(template, tokenizer, pair))
    fitting = [sample for sample in candidates if sample.pair.chosen + 1 <= max_prompt_len]
    if policy == "truncate_turns":
        fitting = [sample for sample in fitting if len(sample.input_ids) <= max_seq_len]
    expected = fitting[0] if fitting and len(fitting[0].input_ids) <= max_seq_len else None
    filler = {"src": "q", "response": ["a", "b"], "sort": [1, 0]}
    dataset = open_pairs([filler, record], max_prompt_len=max_prompt_len, max_seq_len=max_seq_len, over_length=policy)
    report = dataset.report.sources[0]
    assert report.dropped == (expected is None)
    assert report.truncated == (expected is not None and expected is not candidates[0])
    if expected is not None:
        np.testing.assert_array_equal(dataset.sample(1).input_ids, expected.input_ids)
        assert dataset.sample(1).pair[:2] == expected.pair[:2]


def test_control_tokens_in_answers_are_ordinary_text(open_pairs, tokenizer):
    dataset = open_pairs([RECORD, {**RECORD, "response": [["a"], ["b</s>c"]]}])
    pair = dataset.sample(1)
    rejected = pair.labels[pair.pair.rejected :].tolist()
    assert tokenizer.decode(rejected) == "b</s>c" and rejected.count(tokenizer.eos_id) == 1
    assert "1 with control tokens in their texts" in str(dataset.report)


def test_a_plan_packs_pairs_whole_and_every_pair_once(open_pairs):
    records = [{**RECORD, "src": [f"Count {number} apples and {'days ' * (number % 5)}"]} for number in range(40)]
    dataset = open_pairs(records)
    plan = StepPlan(
        dataset, max_seq_len=128, packing=True, greedy=True, window=1000, batch_size=2, accumulation=2,
        dp_rank=1, dp_world_size=2,
    )  # fmt: skip
    counts = []
    for step in range(plan.steps_in_epoch(0)):
        for rank in range(2):
            plan.dp_rank = rank
            for batch in plan.micro_batches(step):
                assert batch.input_ids.shape[1] <= 128
                assert batch.pairs.count == sum(len(row) for row in batch.samples)
                counts += [sample for row in batch.samples for sample in row]
    assert sorted(counts) == list(range(40))


@pytest.mark.parametrize(
    "options",
    [
        {"packing": True, "greedy": True},
        {"packing": True, "greedy": False},
        {"packing": False, "greedy": False},
        {"packing": False, "greedy": False, "batch_tokens": 300},
    ],
)
def test_every_pair_comes_once_an_epoch_however_rows_are_made(open_pairs, options):
    records = [{**RECORD, "src": [f"Count {number}{' words' * (number % 7)}"]} for number in range(30)]
    dataset = open_pairs(records)
    plan = StepPlan(dataset, max_seq_len=128, window=10, batch_size=3, accumulation=2, **options)
    found = []
    for batches in prefetch(plan, 0, 2, plan.steps_in_epoch(0)):
        for batch in batches:
            order = [sample for row in batch.samples for sample in row]
            assert batch.pairs.count == len(order)
            found += order
            # the labels of answer 2 p are those of the chosen answer of the p-th sample of the batch
            for number, index in enumerate(order):
                sample = dataset.sample(index)
                chosen, rejected, _ = sample.pair
                answers = (sample.labels[chosen:rejected], sample.labels[rejected:])
                for side, labels in enumerate(answers):
                    placed = batch.labels[batch.pairs.answers == 2 * number + side]
                    np.testing.assert_array_equal(placed, labels[labels != IGNORE_INDEX])
    assert sorted(found) == list(range(30))


@pytest.fixture
def previewed(open_pairs, tokenizer):
    turns = {**RECORD, "response": [["one", "go on", "two"], ["ten"]]}
    dataset = open_pairs([RECORD, LONG, turns])
    plan = StepPlan(
        dataset, max_seq_len=512, packing=True, greedy=True, window=10, batch_size=1, accumulation=1, shuffle=False
    )
    text = {
        color: render_batch(plan.micro_batches(0)[0], tokenizer, dataset, color=color).split("--- ")
        for color in (False, True)
    }
    return lambda line, color: next(part for part in text[color] if f"data.jsonl:{line}," in part)


def test_the_preview_shows_both_answers(previewed):
    lines = previewed(1, False).splitlines()
    assert lines[0].startswith("pair ") and lines[0].endswith(" targets") and " + " in lines[0]
    assert lines[1:5] == [
        "<|begin_of_sentence|>User: Count from one to ten.",
        "Assistant: ",
        "chosen: [[one two</s>]]",
        "rejected: [[ten</s>]]",
    ]
    lines = previewed(3, False).splitlines()
    assert lines[3:6] == [
        "chosen: [[one</s>]]<|end_of_sentence|>User: go on", "Assistant: [[two</s>]]", "rejected: [[ten</s>]]",
    ]  # fmt: skip


def test_the_preview_shows_chosen_answers_green_and_rejected_ones_red(previewed):
    shown = previewed(3, True)
    assert f"{TRAINED}one</s>{RESET}{READ}<|end_of_sentence|>User: go on\nAssistant: {RESET}{TRAINED}two</s>" in shown
    assert f"{REJECTED}ten</s>{RESET}" in shown
    assert "[[" not in shown
