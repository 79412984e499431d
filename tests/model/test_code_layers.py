"""Tables and heads of codes compute what their definition says, and every head gets its gradient."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.model import bf16
from erniekit.model import head as head_module
from erniekit.model.architectures.speaking import code_layout
from erniekit.model.attention import AttentionPlan
from erniekit.model.code_layers import code_logits, level_losses
from erniekit.model.weights import named_weights

from .tiny_speech import CODES, LEVELS, drawn_row, hidden_of, omnivoice_config, speaking_model, vall_e_config

CONFIGS = {
    "omnivoice": omnivoice_config(),
    "vall_e": vall_e_config(),
    "vall_e with biases": vall_e_config(classifiers_bias=True),
}


@pytest.fixture(params=CONFIGS)
def decoder(request):
    return speaking_model(CONFIGS[request.param])


def weights_of(decoder):
    return {name: weight.numpy().astype(np.float64) for name, weight in named_weights(decoder).items()}


def table_rows(decoder):
    """The rows of all tables, by their numbers."""
    weights = weights_of(decoder)
    return np.concatenate([weights[name] for name, _ in code_layout(decoder.config).tables])


def head_of(decoder, level):
    """W and the bias of a level, from the weights as files have them."""
    layout, weights = code_layout(decoder.config), weights_of(decoder)
    name, logits = layout.heads[level]
    first = level * logits if layout.kind == "omnivoice" else 0
    return weights[name][first : first + logits], weights.get(name.replace("weight", "bias"), np.zeros(logits))


def labels_of(decoder, row):
    """Labels of all heads; those of texts stand behind the levels."""
    if code_layout(decoder.config).kind == "omnivoice":
        return row["labels"]
    text = np.full((*row["labels"].shape[:2], 1), -100)
    text[0, 1:3] = 7
    return np.concatenate([row["labels"], text], -1)


def test_rows_and_logits_are_numbered_as_the_layout_says():
    omnivoice, vall_e = code_layout(CONFIGS["omnivoice"]), code_layout(CONFIGS["vall_e"])
    assert (omnivoice.mask_id, omnivoice.stop, omnivoice.rows) == (CODES, None, LEVELS * (CODES + 1))
    assert omnivoice.whole == (0, 17, 34, 51)
    assert (vall_e.prompts, vall_e.written, vall_e.whole) == ((0, 16, 32, 48), 64, (81, 97, 113))
    assert (vall_e.mask_id, vall_e.stop, vall_e.rows) == (None, CODES, 64 + 17 + 48)
    assert [logits for _, logits in vall_e.heads] == [17, 16, 16, 16, 56]


def test_a_position_reads_the_sum_of_its_rows_or_its_token(decoder):
    row = drawn_row(decoder.config)
    inputs = {name: paddle.to_tensor(row[name]) for name in ("input_ids", "codes")}
    found = decoder.embed(inputs).numpy()[0]
    rows, name = table_rows(decoder), decoder.config.architecture.file_name("model.embed_tokens.weight")
    embedding = weights_of(decoder)[name]
    for position, codes in enumerate(row["codes"][0]):
        own = codes[codes >= 0]
        expected = rows[own].sum(0) if len(own) else embedding[row["input_ids"][0, position]]
        np.testing.assert_allclose(found[position], expected, rtol=1e-5, atol=1e-6)
    assert (row["codes"][0] >= 0).any(-1).sum() == 17


def test_a_batch_without_codes_is_a_text(decoder):
    ids = paddle.to_tensor([[3, 5, 8]])
    name = decoder.config.architecture.file_name("model.embed_tokens.weight")
    np.testing.assert_allclose(decoder.embed({"input_ids": ids}).numpy()[0], weights_of(decoder)[name][[3, 5, 8]])


@pytest.mark.parametrize("with_codes", [True, False])
def test_ids_behind_the_vocabulary_are_codes_of_level_0(with_codes):
    decoder = speaking_model(CONFIGS["vall_e"])
    layout, size = code_layout(decoder.config), decoder.config.vocab_size
    ids = paddle.to_tensor([[3, size + 5, 8, size + CODES]])
    codes = paddle.to_tensor([[[-1, -1], [-1, -1], [2, 17], [-1, -1]]])
    found = decoder.embed({"input_ids": ids} | ({"codes": codes} if with_codes else {})).numpy()[0]
    rows, embedding = table_rows(decoder), weights_of(decoder)["model.embed_tokens.weight"]
    third = rows[2] + rows[17] if with_codes else embedding[8]
    expected = [embedding[3], rows[layout.written + 5], third, rows[layout.written + CODES]]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_losses_and_counts_of_each_head(decoder, fused, monkeypatch):
    monkeypatch.setattr(head_module, "CHUNK_LOGITS", 17 * 3)
    row = drawn_row(decoder.config)
    labels, hidden = labels_of(decoder, row), hidden_of(decoder, row)
    states = hidden.numpy()[0].astype(np.float64)
    losses = level_losses(decoder, hidden, labels, fused=fused)
    assert len(losses) == labels.shape[-1]
    for level, loss in enumerate(losses):
        weight, bias = head_of(decoder, level)
        chosen = np.flatnonzero(labels[0, :, level] != -100)
        targets, logits = labels[0, chosen, level], states[chosen] @ weight.T + bias
        expected = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(chosen)), targets]
        assert float(loss.loss_sum) == pytest.approx(expected.sum(), rel=1e-5)
        assert int(loss.target_count) == len(chosen) > 0
        assert int(loss.correct_count) == (logits.argmax(-1) == targets).sum()
        np.testing.assert_allclose(code_logits(decoder, hidden[0], level).numpy(), states @ weight.T + bias, atol=1e-4)


def gradients_of(decoder, row, labels, factors, **variant):
    decoder.clear_gradients()
    losses = level_losses(decoder, hidden_of(decoder, row), labels, **variant)
    sum(loss.loss_sum * factor for loss, factor in zip(losses, factors, strict=True)).backward()
    return {name: weight.grad.numpy() for name, weight in named_weights(decoder).items()}


def test_the_fused_heads_have_the_gradients_of_the_plain_ones(decoder):
    row = drawn_row(decoder.config)
    labels = labels_of(decoder, row)
    factors = [0.5, 2.0, 1.0, 0.25, 3.0][: labels.shape[-1]]
    expected = gradients_of(decoder, row, labels, factors)
    found = gradients_of(decoder, row, labels, factors, fused=True)
    assert list(found) == list(decoder.config.weight_shapes())
    for name, gradient in expected.items():
        assert gradient.any(), name
        np.testing.assert_allclose(found[name], gradient, atol=2e-5 * np.abs(gradient).max(), err_msg=name)


@pytest.mark.parametrize("fused", [False, True])
def test_heads_without_labels_have_no_loss_and_a_gradient_of_zeros(decoder, fused):
    row = drawn_row(decoder.config)
    labels = np.full_like(labels_of(decoder, row), -100)
    assert all(
        float(loss.loss_sum) == 0 for loss in level_losses(decoder, hidden_of(decoder, row), labels, fused=fused)
    )
    gradients = gradients_of(decoder, row, labels, [1.0] * labels.shape[-1], fused=fused)
    assert not any(gradient.any() for gradient in gradients.values())


def test_documents_of_a_row_do_not_see_each_other_and_see_themselves_both_ways(decoder):
    row = drawn_row(decoder.config, (14, 11))
    before = hidden_of(decoder, row).numpy()[0]
    row["codes"][0, 20] = row["codes"][0, 21]
    row["codes"][0, 21, 0] = (row["codes"][0, 21, 0] + 1) % CODES + code_layout(decoder.config).whole[0]
    after = hidden_of(decoder, row).numpy()[0]
    np.testing.assert_array_equal(after[:14], before[:14])
    assert (np.abs(after[14:] - before[14:]).max(-1) > 1e-6).all()


def test_a_code_is_decoded_like_a_token():
    """The logits of a step of decoding stand in the space of ids: tokens are impossible, then come the codes."""
    decoder = speaking_model(CONFIGS["vall_e"])
    hidden = paddle.to_tensor(np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32))
    logits, size = decoder.head(hidden).numpy(), decoder.config.vocab_size
    assert logits.shape == (3, size + CODES + 1)
    assert (logits[:, :size] == -np.inf).all()
    np.testing.assert_allclose(logits[:, size:], code_logits(decoder, hidden, 0).numpy())


def test_causal_documents_read_written_codes():
    decoder = speaking_model(CONFIGS["vall_e"])
    size = decoder.config.vocab_size
    ids = np.array([[3, 4, size + 1, size + 2, size + 3]])
    context = decoder.context(
        paddle.arange(5).unsqueeze(0), AttentionPlan.build(np.full((1, 1, 5, 1), 5, np.int32), causal=True)
    )
    hidden = decoder.forward_layers(decoder.embed({"input_ids": paddle.to_tensor(ids)}), context).numpy()[0]
    ids[0, 4] = size + 4
    other = decoder.forward_layers(decoder.embed({"input_ids": paddle.to_tensor(ids)}), context).numpy()[0]
    np.testing.assert_array_equal(other[:4], hidden[:4])
    assert np.abs(other[4] - hidden[4]).max() > 1e-6


@pytest.mark.parametrize("fused", [False, True])
def test_products_in_bfloat16_give_nearly_the_same_losses_and_gradients(decoder, fused):
    row = drawn_row(decoder.config)
    labels = labels_of(decoder, row)
    factors = [1.0] * labels.shape[-1]
    expected = gradients_of(decoder, row, labels, factors, fused=fused)
    with bf16.products(frozenset({bf16.HEAD})):
        found = gradients_of(decoder, row, labels, factors, fused=fused)
    differs = False
    for name, gradient in expected.items():
        assert np.linalg.norm(found[name] - gradient) <= 0.02 * np.linalg.norm(gradient), name
        differs |= bool((found[name] != gradient).any())
    assert differs
