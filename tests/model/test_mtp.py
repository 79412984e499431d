"""Multi-token prediction: shifts within documents, and states computed again with NumPy by hand."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.mtp import shift_within_documents
from erniekit.model.weights import named_weights, save_model_folder

from .moe.test_experts import MOE
from .tiny import pack, tiny_config, tiny_model

TWO = {**MOE, "moe_layer_start_index": 1, "num_nextn_predict_layers": 2}


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 3))
def test_ahead_stays_in_the_document(lengths, places, padding):
    ends = np.cumsum(lengths)
    size = int(ends[-1]) + padding
    values = np.arange(100, 100 + size)[None]
    document_ends = np.concatenate([np.repeat(ends, lengths), np.full(padding, ends[-1])])[None]
    own = shift_within_documents(values, document_ends, places, fill=-1)[0]
    for position in range(size):
        inside = position < ends[-1] and position + places < document_ends[0, position]
        assert own[position] == (100 + position + places if inside else -1)


def all_states(model, inputs, shifted):
    """After the final norm: the model's own, then those of each depth."""
    ids, positions, plan = inputs
    context = model.context(positions, plan)
    hidden = model.forward_layers(model.embed({"input_ids": ids}), context)
    further = model.forward_mtp(hidden, context, [{"input_ids": paddle.to_tensor(row)} for row in shifted])
    return [model.norm(states).numpy()[0] for states in (hidden, *further)]


def norm(x, weight, epsilon=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def test_states_by_hand():
    """Depth 1 reads the state before the final norm and the next token's embedding; depth 2 goes on from depth 1."""
    model = tiny_model(**TWO)
    model.eval()
    ids = np.arange(7, 19)
    inputs = pack(ids, [12])
    ends = np.full((1, 12), 12)
    shifted = [shift_within_documents(ids[None], ends, depth, fill=0) for depth in (1, 2)]
    own = all_states(model, inputs, shifted)

    weights = {name: tensor.numpy() for name, tensor in named_weights(model).items()}
    context = model.context(inputs[1], inputs[2])
    hidden = model.forward_layers(model.embed({"input_ids": inputs[0]}), context).numpy()[0]
    final = weights["model.norm.weight"]
    np.testing.assert_allclose(own[0], norm(hidden, final), atol=1e-4)
    np.testing.assert_array_equal(own[0], model(*inputs).numpy()[0])
    for depth in (0, 1):
        embedded = weights["model.embed_tokens.weight"][shifted[depth][0]]
        left = norm(embedded, weights[f"model.mtp_emb_norm.{depth}.weight"])
        right = norm(hidden, weights[f"model.mtp_hidden_norm.{depth}.weight"])
        joined = np.concatenate([left, right], -1) @ weights[f"model.mtp_linear_proj.{depth}.weight"]
        block = model.mtp[depth].block
        hidden = block(paddle.to_tensor(joined[None].astype(np.float32)), context).numpy()[0]
        np.testing.assert_allclose(own[depth + 1], norm(hidden, final), atol=1e-3)
    assert [type(prediction.block.mlp).__name__ for prediction in model.mtp] == ["MLP", "MoE"]


def test_packed_documents_are_predicted_as_if_alone():
    model = tiny_model(**TWO)
    first, second = np.arange(3, 14), np.arange(20, 39)

    def states(ids, ends):
        document_ends = np.repeat(ends, np.diff([0, *ends]))[None]
        shifted = [shift_within_documents(ids[None], document_ends, depth, fill=0) for depth in (1, 2)]
        return all_states(model, pack(ids, ends), shifted)

    packed = states(np.concatenate([first, second]), [11, 30])
    for depth, (own, alone, other) in enumerate(zip(packed, states(first, [11]), states(second, [19]), strict=True)):
        np.testing.assert_allclose(own[:11], alone, atol=1e-4, err_msg=str(depth))
        np.testing.assert_allclose(own[11:], other, atol=1e-4, err_msg=str(depth))


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_predictions_are_saved_loaded_and_left_out(tmp_path, kept):
    model = tiny_model(**TWO)
    save_model_folder(model, tmp_path)
    stored = ModelConfig.from_folder(tmp_path)
    assert stored.num_nextn_predict_layers == 2
    loaded = named_weights(build_model(tiny_config(**{**TWO, "num_nextn_predict_layers": kept}), tmp_path))
    assert sum(".mtp_linear_proj." in name for name in loaded) == kept
    for name, tensor in loaded.items():
        np.testing.assert_array_equal(tensor.numpy(), named_weights(model)[name].numpy(), err_msg=name)
