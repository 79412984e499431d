"""The plain, sparse and fused heads give one loss and the same gradients."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.model import head as head_module
from erniekit.model import native
from erniekit.model.head import token_log_probabilities, token_loss
from erniekit.model.weights import named_weights

from .tiny import pack, tiny_model

IDS = np.random.default_rng(0).integers(0, 53, 40)
LABELS = np.where(np.random.default_rng(1).random(40) < 0.4, -100, np.roll(IDS, -1))
VARIANTS = [{}, {"sparse": True}, {"fused": True}, {"fused": True, "sparse": True}]


def run(decoder, labels, **variant):
    decoder.clear_gradients()
    hidden = decoder(*pack(IDS, [15, 40]))
    result = token_loss(decoder, hidden, paddle.to_tensor(labels[None]), **variant)
    (result.loss_sum * 0.125).backward()
    return result, {name: weight.grad.numpy() for name, weight in named_weights(decoder).items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "sparse", "fused", "both"])
@pytest.mark.parametrize("chunk_logits", [53 * 7, 10**9, 1])
def test_loss_counts_and_gradients(tied, variant, chunk_logits, monkeypatch):
    monkeypatch.setattr(head_module, "CHUNK_LOGITS", chunk_logits)
    decoder = tiny_model(tie_word_embeddings=tied)
    result, gradients = run(decoder, LABELS, **variant)
    logits = decoder.head(decoder(*pack(IDS, [15, 40]))).numpy()[0].astype(np.float64)
    targets = np.nonzero(LABELS != -100)[0]
    chosen = logits[targets]
    losses = np.log(np.exp(chosen).sum(-1)) - chosen[np.arange(len(targets)), LABELS[targets]]
    assert float(result.loss_sum) == pytest.approx(losses.sum(), rel=1e-5)
    assert int(result.target_count) == len(targets)
    assert int(result.correct_count) == (chosen.argmax(-1) == LABELS[targets]).sum()
    _, expected = run(decoder, LABELS)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[name], atol=2e-5 * np.abs(expected[name]).max(), err_msg=name)


@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "sparse", "fused", "both"])
def test_a_batch_without_targets_has_no_loss_and_no_gradient(variant):
    result, gradients = run(tiny_model(), np.full(40, -100), **variant)
    assert float(result.loss_sum) == 0 and int(result.target_count) == 0 and int(result.correct_count) == 0
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "sparse", "fused", "both"])
def test_kernels_give_the_loss_and_gradients_of_paddle(variant, monkeypatch, native_kernels):
    monkeypatch.setattr(head_module, "CHUNK_LOGITS", 53 * 7)
    decoder = tiny_model()

    def compute():
        result, gradients = run(decoder, LABELS, **variant)
        decoder.clear_gradients()
        chosen = token_log_probabilities(
            decoder, decoder(*pack(IDS, [15, 40])), paddle.to_tensor(LABELS[None]), **variant
        )
        weights = paddle.to_tensor(np.random.default_rng(2).standard_normal(chosen.values.shape[0]), "float32")
        (chosen.values * weights).sum().backward()
        more = {f"log_{name}": weight.grad.numpy() for name, weight in named_weights(decoder).items()}
        values = {"loss": result.loss_sum.numpy(), "log": chosen.values.detach().numpy()}
        counts = [int(result.correct_count), *chosen.is_correct.numpy().tolist()]
        return counts, values | gradients | more

    counts, ours = compute()
    monkeypatch.setattr(native, "kernel", lambda *_: None)
    expected_counts, expected = compute()
    assert counts == expected_counts
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, atol=1e-5 * np.abs(value).max(), err_msg=name)


def test_extreme_logits_stay_finite():
    decoder = tiny_model()
    hidden = paddle.full([1, 40, 16], 3000.0)
    logits = decoder.head(hidden).numpy()[0].astype(np.float64)
    targets = np.nonzero(LABELS != -100)[0]
    peak = logits.max(-1)
    losses = (peak + np.log(np.exp(logits - peak[:, None]).sum(-1)))[targets] - logits[targets, LABELS[targets]]
    assert losses.max() > 200
    for variant in VARIANTS:
        result = token_loss(decoder, hidden, paddle.to_tensor(LABELS[None]), **variant)
        assert float(result.loss_sum) == pytest.approx(losses.sum(), rel=1e-5)


def test_without_gradients_no_gradient_is_computed(monkeypatch):
    decoder = tiny_model()
    hidden = decoder(*pack(IDS, [40])).detach()
    made = []
    monkeypatch.setattr(paddle, "zeros_like", lambda *args: made.append(args))
    with paddle.no_grad():
        assert float(token_loss(decoder, hidden, paddle.to_tensor(LABELS[None]), fused=True).loss_sum) > 0
    assert not made


def test_a_frozen_head_still_passes_the_gradient_on():
    decoder = tiny_model(tie_word_embeddings=False)
    _, expected = run(decoder, LABELS)
    decoder.clear_gradients(set_to_zero=False)
    decoder.head.weight.stop_gradient = True
    hidden = decoder(*pack(IDS, [15, 40]))
    (token_loss(decoder, hidden, paddle.to_tensor(LABELS[None]), fused=True).loss_sum * 0.125).backward()
    assert decoder.head.weight.grad is None
    name = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_allclose(named_weights(decoder)[name].grad.numpy(), expected[name], atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "sparse", "fused", "both"])
@pytest.mark.parametrize("chunk_logits", [53 * 7, 10**9])
def test_log_probabilities_and_their_gradients(tied, variant, chunk_logits, monkeypatch):
    """Against a softmax in float64; each token counts differently in the gradient."""
    monkeypatch.setattr(head_module, "CHUNK_LOGITS", chunk_logits)
    decoder = tiny_model(tie_word_embeddings=tied)
    weights = np.random.default_rng(3).standard_normal(int((LABELS != -100).sum())).astype(np.float32)

    def gradients(loss):
        decoder.clear_gradients()
        loss.backward()
        return {name: weight.grad.numpy() for name, weight in named_weights(decoder).items()}

    hidden = decoder(*pack(IDS, [15, 40]))
    result = token_log_probabilities(decoder, hidden, paddle.to_tensor(LABELS[None]), **variant)
    logits = decoder.head(decoder(*pack(IDS, [15, 40])))
    targets = np.nonzero(LABELS != -100)[0]
    exact = logits.numpy()[0, targets].astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_array_equal(result.positions.numpy(), targets)
    np.testing.assert_allclose(result.values.numpy(), exact[np.arange(len(targets)), LABELS[targets]], rtol=1e-5)
    np.testing.assert_array_equal(result.is_correct.numpy(), exact.argmax(-1) == LABELS[targets])

    own = gradients((result.values * paddle.to_tensor(weights)).sum())
    plain = paddle.nn.functional.log_softmax(logits[0][paddle.to_tensor(targets)])
    picked = paddle.take_along_axis(plain, paddle.to_tensor(LABELS[targets][:, None]), 1)[:, 0]
    expected = gradients((picked * paddle.to_tensor(weights)).sum())
    for name, gradient in own.items():
        np.testing.assert_allclose(gradient, expected[name], atol=2e-5 * np.abs(expected[name]).max(), err_msg=name)


@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "sparse", "fused", "both"])
def test_log_probabilities_far_below_zero_are_exact(variant):
    """Paddle's own cross entropy stops at -64 on a CPU."""
    decoder = tiny_model()
    hidden = paddle.full([1, 40, 16], 3000.0)
    logits = decoder.head(hidden).numpy()[0].astype(np.float64)
    values = token_log_probabilities(decoder, hidden, paddle.to_tensor(LABELS[None]), **variant).values.numpy()
    targets = np.nonzero(LABELS != -100)[0]
    peak = logits.max(-1)
    expected = logits[targets, LABELS[targets]] - (peak + np.log(np.exp(logits - peak[:, None]).sum(-1)))[targets]
    assert expected.min() < -1000
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_log_probabilities_beside_frozen_parts(frozen):
    """Paddle wants no gradient from a PyLayer for what is constant."""
    decoder = tiny_model(tie_word_embeddings=False)
    hidden = decoder(*pack(IDS, [15, 40])).detach()
    hidden.stop_gradient = frozen == "hidden"
    decoder.head.projection.stop_gradient = frozen == "head"
    grads = []
    for variant in VARIANTS:
        hidden.clear_gradient()
        decoder.clear_gradients()
        result = token_log_probabilities(decoder, hidden, paddle.to_tensor(LABELS[None]), **variant)
        result.values.sum().backward()
        grads.append((decoder.head.projection if frozen == "hidden" else hidden).grad.numpy())
    for grad in grads[1:]:
        np.testing.assert_allclose(grad, grads[0], atol=1e-5 * np.abs(grads[0]).max())


@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "sparse", "fused", "both"])
def test_a_batch_without_labels_has_no_log_probabilities(variant):
    decoder = tiny_model()
    hidden = decoder(*pack(IDS, [15, 40]))
    result = token_log_probabilities(decoder, hidden, paddle.full([1, 40], -100, "int64"), **variant)
    assert result.values.shape == [0] and result.positions.shape == [0]


def test_the_fused_head_takes_no_more_memory_for_a_longer_pack(monkeypatch):
    """Forward and backward of log-probabilities, besides what grows with the hidden states."""
    vocabulary, hidden_size = 5000, 16
    monkeypatch.setattr(head_module, "CHUNK_LOGITS", 32 * vocabulary)
    decoder = tiny_model(vocab_size=vocabulary)
    rng = np.random.default_rng(0)

    def peak(tokens, **variant):
        hidden = paddle.to_tensor(rng.standard_normal((1, tokens, hidden_size), np.float32), stop_gradient=False)
        labels = paddle.to_tensor(rng.integers(0, vocabulary, (1, tokens)))
        decoder.clear_gradients(set_to_zero=False)
        paddle.base.core.host_memory_stat_reset_peak_value("Allocated", 0)
        before = paddle.base.core.host_memory_stat_current_value("Allocated", 0)
        values = token_log_probabilities(decoder, hidden, labels, **variant).values
        (values * paddle.to_tensor(rng.standard_normal(tokens, np.float32))).sum().backward()
        return paddle.base.core.host_memory_stat_peak_value("Allocated", 0) - before

    short, long = peak(256, fused=True), peak(2048, fused=True)
    of_positions = (2048 - 256) * (hidden_size + 8) * 4 * 3  # hidden states, their gradient, and numbers for each token
    assert long < short + of_positions
    assert long < 2048 * vocabulary * 4 / 5  # a fifth of the logits
    assert peak(2048, sparse=True) > 2048 * vocabulary * 4  # which whole would show here
