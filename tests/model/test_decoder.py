"""Properties of the whole decoder that need no other implementation."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.model.attention import AttentionPlan
from erniekit.model.head import token_loss
from erniekit.model.weights import named_weights

from .tiny import logits_of, pack, tiny_model

IDS = np.random.default_rng(0).integers(0, 53, 300)


@pytest.fixture(scope="module")
def decoder():
    return tiny_model()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 90), min_size=2, max_size=6), st.data())
def test_a_document_does_not_feel_the_others(lengths, data):
    decoder = tiny_model()
    ends = np.cumsum(lengths).tolist()
    ids = IDS[np.arange(ends[-1]) % len(IDS)]
    changed = data.draw(st.integers(0, len(lengths) - 1))
    inside = np.repeat(np.arange(len(lengths)), lengths) == changed
    before = logits_of(decoder, ids, ends)
    after = logits_of(decoder, np.where(inside, (ids + 17) % 53, ids), ends)
    np.testing.assert_array_equal(before[~inside], after[~inside])  # bit for bit
    assert (before[inside] != after[inside]).any()


def test_gradients_of_a_document_do_not_depend_on_the_others(decoder):
    """With labels in the first document only, the second one's tokens change no gradient."""
    labels = np.where(np.arange(200) < 80, np.roll(IDS[:200], -1), -100)
    gradients = []
    for ids in (IDS[:200], np.concatenate([IDS[:80], (IDS[80:200] + 5) % 53])):
        decoder.clear_gradients()
        hidden = decoder(*pack(ids, [80, 200]))
        token_loss(decoder, hidden, paddle.to_tensor(labels[None]), sparse=True).loss_sum.backward()
        gradients.append({name: weight.grad.numpy() for name, weight in named_weights(decoder).items()})
    for name, first in gradients[0].items():
        np.testing.assert_allclose(first, gradients[1][name], atol=1e-5 * np.abs(first).max(), err_msg=name)


def test_later_tokens_do_not_change_earlier_logits(decoder):
    ids = IDS[:100]
    changed = ids.copy()
    changed[60:] = (changed[60:] + 3) % 53
    np.testing.assert_array_equal(logits_of(decoder, ids)[:60], logits_of(decoder, changed)[:60])


def test_packed_equals_separate_and_batched(decoder):
    packed = logits_of(decoder, IDS[:120], [50, 120])
    np.testing.assert_allclose(packed[:50], logits_of(decoder, IDS[:50]), atol=1e-5)
    np.testing.assert_allclose(packed[50:], logits_of(decoder, IDS[50:120]), atol=1e-5)
    ids = np.stack([IDS[:60], IDS[60:120]])
    positions = np.broadcast_to(np.arange(60), (2, 60))
    indices = np.full((2, 1, 60, 1), 60, np.int32)
    batched = decoder.head(
        decoder(paddle.to_tensor(ids), paddle.to_tensor(positions), AttentionPlan.build(indices))
    ).numpy()
    np.testing.assert_allclose(batched[1], logits_of(decoder, IDS[60:120]), atol=1e-5)


def test_the_dense_mask_gives_the_same_logits_and_gradients(decoder):
    ids, positions, plan = pack(IDS, [90, 91, 300])
    ends = np.repeat([90, 91, 300], [90, 1, 209]).astype(np.int32).reshape(1, 1, 300, 1)
    results = []
    for each in (plan, AttentionPlan.build(ends, dense=True)):
        decoder.clear_gradients()
        hidden = decoder(ids, positions, each)
        token_loss(decoder, hidden, paddle.to_tensor(np.roll(IDS, -1)[None])).loss_sum.backward()
        results.append([hidden.numpy(), *(weight.grad.numpy() for weight in named_weights(decoder).values())])
    for blocks, dense in zip(*results, strict=True):
        np.testing.assert_allclose(blocks, dense, atol=2e-5 * max(1.0, np.abs(dense).max()))


def dropped(decoder, **changes):
    decoder.train()
    decoder.randomness.set(**{"step": 3, "micro_batch": 1, **changes})
    hidden = decoder(*pack(IDS[:64], [30, 64]))
    decoder.clear_gradients()
    hidden.square().sum().backward()
    return hidden.numpy(), decoder.layers[0].self_attn.q_proj.weight.grad.numpy()


@pytest.mark.parametrize("where", [{"hidden_dropout": 0.3}, {"attention_dropout": 0.3}])
def test_dropout_depends_on_the_place_in_the_run_and_on_nothing_else(where):
    decoder = tiny_model(**where)
    hidden, gradient = dropped(decoder)
    paddle.rand([7])
    dropped(decoder, step=8)
    for ours, again in zip((hidden, gradient), dropped(decoder), strict=True):
        np.testing.assert_array_equal(ours, again)
    for changes in ({"step": 4}, {"micro_batch": 0}):
        assert (dropped(decoder, **changes)[0] != hidden).mean() > 0.5
    assert (dropped(decoder, dropout_scale=0.5)[0] != hidden).mean() > 0.5
    plain = tiny_model()
    np.testing.assert_array_equal(dropped(decoder, dropout_scale=0.0)[0], dropped(plain)[0])
    decoder.eval()
    np.testing.assert_array_equal(decoder(*pack(IDS[:64], [30, 64])).numpy(), dropped(plain)[0])


def test_seeds_drop_differently():
    decoder = tiny_model(hidden_dropout=0.3)
    hidden, _ = dropped(decoder)
    decoder.randomness.seed = 99
    assert (dropped(decoder)[0] != hidden).mean() > 0.5
