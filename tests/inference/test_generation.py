"""Cached generation equals a plain forward pass over the whole text, for single and batched prompts."""

from __future__ import annotations

import numpy as np
import pytest

from erniekit.errors import UserError
from erniekit.inference import sampling as sampling_module
from erniekit.inference.generation import generate, make_request, stream
from erniekit.inference.sampling import (
    Sampling,
    draw_by_temperature,
    random_stream,
    sample_token,
    token_logprobs,
    token_probabilities,
)
from erniekit.native import library
from tests.model.tiny import logits_of, tiny_model

PROMPTS = [[5, 9, 33, 2], [7], [40, 41, 42, 43, 44, 45, 46, 3, 1, 8, 12]]


@pytest.fixture(scope="module")
def decoder():
    return tiny_model()


def greedy_without_cache(decoder, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(decoder, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_equals_forward_passes_without_cache(decoder):
    expected = [greedy_without_cache(decoder, prompt, 12) for prompt in PROMPTS]
    assert len({token for answer in expected for token in answer}) > 5
    assert generate(decoder, PROMPTS, Sampling(max_new_tokens=12)) == expected
    assert list(stream(decoder, PROMPTS[0], Sampling(max_new_tokens=12))) == expected[0]


def test_biased_untied_model_too():
    decoder = tiny_model(seed=3, use_bias=True, tie_word_embeddings=False, num_key_value_heads=4)
    expected = [greedy_without_cache(decoder, prompt, 8) for prompt in PROMPTS]
    assert generate(decoder, PROMPTS, Sampling(max_new_tokens=8)) == expected


def test_an_answer_does_not_depend_on_the_other_prompts(decoder):
    sampling = Sampling(max_new_tokens=10, temperature=1.3, top_p=0.9, seed=4)
    assert generate(decoder, PROMPTS, sampling)[0] == generate(decoder, PROMPTS[:1], sampling)[0]


def test_a_sampled_answer_follows_the_number_of_its_stream(decoder):
    sampling = Sampling(max_new_tokens=10, temperature=1.3, seed=4)
    answers = generate(decoder, PROMPTS, sampling)
    assert generate(decoder, PROMPTS[::-1], sampling, streams=[2, 1, 0]) == answers[::-1]
    assert list(stream(decoder, PROMPTS[2], sampling, 2)) == answers[2]
    assert len({tuple(stream(decoder, PROMPTS[2], sampling, number)) for number in range(5)}) > 1


def test_every_row_has_its_own_room():
    decoder = tiny_model(max_position_embeddings=12)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    assert [len(answer) for answer in generate(decoder, prompts, Sampling(max_new_tokens=99))] == [9, 11, 7]
    limited = generate(decoder, prompts, Sampling(max_new_tokens=4, max_length=6))
    assert [len(answer) for answer in limited] == [3, 4, 1]
    assert limited == [generate(decoder, [prompt], Sampling(max_new_tokens=4, max_length=6))[0] for prompt in prompts]
    with pytest.raises(UserError, match=r"prompt 3 has 5 tokens.*max_model_len 5"):
        generate(decoder, prompts, Sampling(max_length=5))


def test_answers_end_before_a_stop_token(decoder):
    whole = greedy_without_cache(decoder, PROMPTS[0], 12)
    stop = whole[5]
    expected = whole[: whole.index(stop)]
    sampling = Sampling(max_new_tokens=12, stop_token_ids=(stop,))
    assert generate(decoder, PROMPTS, sampling)[0] == expected
    assert list(stream(decoder, PROMPTS[0], sampling)) == expected


def test_seeds_decide_and_training_mode_is_kept(decoder):
    def answer(seed):
        return generate(decoder, PROMPTS, Sampling(max_new_tokens=15, temperature=2.0, seed=seed))

    dropping = tiny_model(hidden_dropout=0.5, attention_dropout=0.5)
    dropping.train()
    assert generate(dropping, PROMPTS, Sampling(max_new_tokens=5)) == generate(
        decoder, PROMPTS, Sampling(max_new_tokens=5)
    )
    assert dropping.training
    assert answer(1) == answer(1) != answer(2)


def test_the_models_length_is_the_limit():
    decoder = tiny_model(max_position_embeddings=8)
    assert len(generate(decoder, [[1, 2, 3]], Sampling(max_new_tokens=99))[0]) == 5
    for prompt in ([], [1] * 8):
        with pytest.raises(UserError, match="prompt 2 has"):
            generate(decoder, [[1], prompt], Sampling())


def test_a_request_without_room_is_refused_when_it_is_made():
    decoder = tiny_model(max_position_embeddings=8)
    assert make_request(decoder, [1] * 7, Sampling(), 3).room == 1
    for prompt in ([], [1] * 8):
        with pytest.raises(UserError, match="prompt 4 has"):
            make_request(decoder, prompt, Sampling(), 3)


def test_a_token_that_the_model_does_not_have_is_told(decoder):
    assert len(generate(decoder, [[1, 52]], Sampling(max_new_tokens=2))[0]) == 2
    with pytest.raises(UserError, match="has the token 53, and the model's vocabulary has 53"):
        generate(decoder, [[1, 2], [1, 53]], Sampling())
    with pytest.raises(UserError, match="tokenizer beside it is of another model"):
        list(stream(decoder, [53], Sampling()))


@pytest.mark.parametrize("kernels", ["auto", "paddle"])
def test_a_model_whose_numbers_overflow_is_told(kernels):
    library.use(kernels)
    decoder = tiny_model()
    decoder.norm.weight.set_value(np.full(16, 1e38, np.float32))
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        with pytest.raises(UserError, match=r"cannot answer prompt [12]: its logits are not finite"):
            generate(decoder, PROMPTS[:2], sampling)
        with pytest.raises(UserError, match=r"cannot answer prompt [48]: "):  # as where they are some of many
            generate(decoder, PROMPTS[:2], sampling, streams=[7, 3])
        with pytest.raises(UserError, match="cannot answer prompt 1: "):
            list(stream(decoder, PROMPTS[1], sampling))


def test_temperature_top_k_and_top_p():
    probabilities = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
    logits = np.log(probabilities)
    np.testing.assert_allclose(token_probabilities(logits, Sampling(temperature=1.0)), probabilities)
    np.testing.assert_allclose(
        token_probabilities(logits, Sampling(temperature=0.5)), probabilities**2 / (probabilities**2).sum()
    )
    np.testing.assert_allclose(
        token_probabilities(logits, Sampling(temperature=1.0, top_k=2)), [0, 4 / 7, 0, 3 / 7, 0], atol=1e-12
    )
    # 0.4 + 0.3 reach 0.6, 0.4 alone does not
    np.testing.assert_allclose(
        token_probabilities(logits, Sampling(temperature=1.0, top_p=0.6)), [0, 4 / 7, 0, 3 / 7, 0], atol=1e-12
    )
    np.testing.assert_allclose(
        token_probabilities(logits, Sampling(temperature=1.0, top_p=0.01)), [0, 1, 0, 0, 0], atol=1e-12
    )


def test_draws_follow_the_probabilities():
    logits = np.log(np.array([0.2, 0.5, 0.3]))
    generator = np.random.default_rng(0)
    draws = [sample_token(logits, [], Sampling(temperature=1.0), generator) for _ in range(3000)]
    np.testing.assert_allclose(np.bincount(draws) / 3000, [0.2, 0.5, 0.3], atol=0.03)


def test_repetition_penalty_acts_on_seen_tokens_of_either_sign():
    logits = np.array([3.0, 2.0, -1.0, -1.5])
    generator = np.random.default_rng(0)
    assert sample_token(logits, [0, 0], Sampling(repetition_penalty=2.0), generator) == 1
    assert sample_token(logits[2:], [0], Sampling(repetition_penalty=2.0), generator) == 1


def test_min_p_keeps_what_is_near_the_likeliest_token():
    probabilities = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
    logits = np.log(probabilities)
    kept = token_probabilities(logits, Sampling(temperature=1.0, min_p=0.5))
    np.testing.assert_allclose(kept, [0, 4 / 7, 0, 3 / 7, 0], atol=1e-12)
    warmer = token_probabilities(logits, Sampling(temperature=2.0, min_p=0.5))  # of what the temperature leaves
    assert (warmer > 0).tolist() == [True, True, False, True, True]
    np.testing.assert_allclose(token_probabilities(logits, Sampling(temperature=1.0, min_p=1.0)), [0, 1, 0, 0, 0])


def test_penalties_of_what_the_answer_has_and_biases_move_logits():
    logits = np.array([3.0, 2.9, 0.0])
    generator = np.random.default_rng(0)

    def taken(seen, answered, **settings):
        return sample_token(logits, seen, Sampling(**settings), generator, answered)

    assert taken([0], 0, presence_penalty=1.0) == 0  # of the prompt
    assert taken([0], 1, presence_penalty=1.0) == 1
    assert taken([0, 1, 0], 3, presence_penalty=1.0) == 0  # both have it
    assert taken([0, 1, 0], 3, frequency_penalty=1.0) == 1  # 0 stands there twice
    assert taken([], 0, logit_bias=((2, 100.0),)) == 2
    assert logits.tolist() == [3.0, 2.9, 0.0]


def test_logprobs_are_those_of_a_softmax():
    logits = np.array([1.0, 3.0, 2.0], np.float32)
    expected = np.log(np.exp(logits) / np.exp(logits).sum())
    found = token_logprobs(logits, 0, 2)
    assert found.chosen == pytest.approx(expected[0], abs=1e-6)
    assert [token for token, _ in found.top] == [1, 2]
    np.testing.assert_allclose([value for _, value in found.top], expected[[1, 2]], atol=1e-6)
    assert token_logprobs(logits, 1, 0).top == () and len(token_logprobs(logits, 1, 9).top) == 3


@pytest.mark.parametrize("at_once", [1, 1 << 20])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("tempered", [False, True])
@pytest.mark.parametrize("kernels", ["paddle", "auto"])
def test_rows_that_are_drawn_together_are_what_each_is_alone(
    monkeypatch: pytest.MonkeyPatch, at_once: int, logprobs: int | None, tempered: bool, kernels: str
) -> None:
    monkeypatch.setattr(sampling_module, "_AT_ONCE", at_once)
    monkeypatch.setattr(library, "_wanted", kernels)
    library.kernels()
    logits = np.random.default_rng(0).normal(scale=4.0, size=(5, 301)).astype(np.float32)
    settings = [
        Sampling(temperature=0.5 + row / 3, seed=row, logprobs=logprobs, tempered_logprobs=tempered) for row in range(5)
    ]
    generators, others = ([random_stream(each, 7) for each in settings] for _ in range(2))
    for _ in range(20):
        for row, found in enumerate(draw_by_temperature(logits, settings, generators)):
            token = sample_token(logits[row], [], settings[row], others[row])
            shown = logits[row] / np.float32(settings[row].temperature) if tempered else logits[row]
            assert found[0] == token
            if logprobs is None:
                assert found[1] is None
            else:
                expected = token_logprobs(shown, token, logprobs)
                assert found[1].chosen == pytest.approx(expected.chosen, abs=1e-12) and found[1].top == expected.top


def test_what_draws_by_its_temperature_alone() -> None:
    assert Sampling(temperature=0.7).draws_by_temperature
    others = [
        {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"logit_bias": ((1, 2.0),)},
    ]  # fmt: skip
    for values in others:
        assert not Sampling(**{"temperature": 0.7, **values}).draws_by_temperature, values
