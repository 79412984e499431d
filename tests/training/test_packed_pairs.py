"""Token by token a pair packed with its prompt once gives what its two dialogues give apart, at any length."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.data.collate import collate
from erniekit.data.pairs import EncodedAnswer, join_pair
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample
from erniekit.model.attention import AttentionPlan
from erniekit.model.head import token_log_probabilities
from erniekit.model.weights import named_weights

from ..model.tiny import EXPERTS, tiny_model

SHAPES = {
    "dense": {},
    "experts": EXPERTS,
    "interleaved": {"model_type": "llama", "rope_theta": 10000.0},
}
# tokens of prompt, chosen and rejected: long prompts, long answers, one token, and lengths beside powers of two
ROWS = [[(310, 70, 129), (1, 1, 300)], [(5, 260, 3), (64, 1, 1), (257, 33, 31)], []]


def pairs_of(lengths, rng):
    """Random tokens; a third of each longer answer is only read, as turns of the user in it are."""
    prompt, *answers = (rng.integers(1, 53, length).tolist() for length in lengths)
    marked = []
    for tokens in answers:
        read = slice(len(tokens) // 3, 2 * len(tokens) // 3)
        targets = list(tokens)
        targets[read] = [IGNORE_INDEX] * len(targets[read])
        marked.append(EncodedAnswer(tokens, targets))
    return prompt, *marked


def log_probabilities(decoder, batch, heads):
    plan = AttentionPlan.build(batch.startend_row_indices, causal=True)
    hidden = decoder(paddle.to_tensor(batch.input_ids), paddle.to_tensor(batch.position_ids), plan)
    return token_log_probabilities(decoder, hidden, paddle.to_tensor(batch.labels), **heads)


def gradients(decoder):
    return {
        name: weight.grad.numpy().copy() for name, weight in named_weights(decoder).items() if weight.grad is not None
    }


@pytest.mark.parametrize("heads", [{}, {"fused": True, "sparse": True}])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_token_of_a_packed_pair_is_as_likely_as_in_its_own_dialogue(shape, heads):
    rng = np.random.default_rng(1)
    decoder = tiny_model(max_position_embeddings=1024, **SHAPES[shape])
    rows = [[pairs_of(lengths, rng) for lengths in row] for row in ROWS]

    alone, weights = [], []
    for prompt, *answers in (pair for row in rows for pair in row):
        for answer in answers:
            labels = [IGNORE_INDEX] * (len(prompt) - 1) + list(answer.targets)
            tokens = [*prompt, *answer.tokens][:-1]
            batch = collate([[Sample(np.array(tokens, np.int32), np.array(labels, np.int32))]], [[0]], 0)
            values = log_probabilities(decoder, batch, heads).values
            alone.append(values.numpy())
            weights.append(rng.standard_normal(values.shape).astype(np.float32))
            (values * paddle.to_tensor(weights[-1])).sum().backward()
    expected_gradients = gradients(decoder)

    decoder.clear_gradients()
    packed = collate(
        [[join_pair(*pair) for pair in row] for row in rows], [range(len(row)) for row in rows], 0, pairs=True
    )
    found = log_probabilities(decoder, packed, heads)
    expected = np.concatenate(alone)
    np.testing.assert_allclose(found.values.numpy(), expected, rtol=0, atol=1e-5)
    answers = packed.pairs.answers.flatten()[found.positions.numpy()]
    for number, values in enumerate(alone):
        own = found.values.numpy()[answers == number].astype(np.float64)
        assert own.sum() == pytest.approx(values.astype(np.float64).sum(), rel=1e-6)
    (found.values * paddle.to_tensor(np.concatenate(weights))).sum().backward()
    found_gradients = gradients(decoder)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in found_gradients.items():
        difference = np.linalg.norm(gradient - expected_gradients[name])
        assert difference <= 1e-4 * np.linalg.norm(expected_gradients[name]), name


def test_an_answer_does_not_hear_of_the_other():
    """Bit for bit: changing every token of the rejected answers leaves the chosen ones' log-probabilities."""
    rng = np.random.default_rng(2)
    decoder = tiny_model(max_position_embeddings=1024)
    lengths = (40, 30, 50)
    prompt, chosen, rejected = pairs_of(lengths, rng)
    other = pairs_of(lengths, rng)[2]
    results = []
    for answer in (rejected, other):
        batch = collate(
            [[join_pair(prompt, chosen, answer), join_pair(prompt, answer, chosen)]], [[0, 1]], 0, pairs=True
        )
        values = log_probabilities(decoder, batch, {})
        results.append((batch.pairs.answers.flatten()[values.positions.numpy()], values.values.numpy()))
    (answers, one), (_, two) = results
    for number in (0, 3):  # chosen of the first pair, rejected of the second
        np.testing.assert_array_equal(one[answers == number], two[answers == number])
    assert not np.array_equal(one[answers == 1], two[answers == 1])
