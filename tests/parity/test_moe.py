"""Mixture of experts and multi-token prediction against transformers and torch."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
import transformers

from erniekit.data.batch import Batch
from erniekit.model.architectures.ernie4_5 import ERNIE4_5_MOE
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.moe.router import balance_loss
from erniekit.model.weights import named_weights, save_model_folder
from erniekit.training.objectives.objective import supervised

from .families import VOCABULARY, random_model
from .test_decoder import our_hidden, ours_from

pytestmark = pytest.mark.parity
SHAPE = {
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_intermediate_size": 12,
    "moe_layer_start_index": 0,
    "num_hidden_layers": 3,
}


def test_every_token_goes_to_the_same_experts(tmp_path):
    theirs = random_model("ernie4_5_moe", **SHAPE)
    ours = ours_from(theirs, tmp_path)
    ours.eval()
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (1, 200))
    chosen = {"theirs": [], "ours": []}
    for layer in theirs.model.layers:
        layer.mlp.moe_statics.register_forward_hook(
            lambda own, inputs, scores: chosen["theirs"].append(torch.topk(scores, 2)[1].numpy())
        )
    for layer in ours.layers:
        router = layer.mlp.router

        def noted(x, router=router):
            routes, logits = type(router).__call__(router, x)
            chosen["ours"].append(routes.experts.numpy())
            return routes, logits

        layer.mlp.router = noted
    with torch.no_grad():
        theirs(input_ids=torch.tensor(ids))
    our_hidden(ours, ids[0], [200])
    assert len(chosen["ours"]) == 3
    assert len(np.unique(chosen["ours"][0])) == 6
    for own, expected in zip(chosen["ours"], chosen["theirs"], strict=True):
        np.testing.assert_array_equal(own, expected)


def test_the_balance_loss_is_that_of_transformers():
    """Theirs sums over the k choices as well, and leaves padding out."""
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import load_balancing_loss_func

    logits = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
    mask = (np.arange(40) % 7 != 0).astype(np.int64)
    expected = load_balancing_loss_func((torch.tensor(logits),), 8, 3, torch.tensor(mask[None]))
    probabilities = paddle.nn.functional.softmax(paddle.to_tensor(logits))
    own = balance_loss(probabilities, 3, paddle.to_tensor((mask / mask.sum()).astype(np.float32)))
    assert float(own) == pytest.approx(float(expected), rel=1e-5)


def mtp_batch():
    """Two documents and a padded tail; the first three positions of each document have no label."""
    rng = np.random.default_rng(3)
    lengths, size = [9, 14], 26
    ids, labels = rng.integers(1, VOCABULARY, size), np.full(size, -100)
    ends, positions, start = np.full(size, 23), np.zeros(size, np.int64), 0
    for length in lengths:
        stop = start + length
        labels[start + 3 : stop - 1], labels[stop - 1] = ids[start + 4 : stop], rng.integers(1, VOCABULARY)
        ends[start:stop], positions[start:stop] = stop, np.arange(length)
        start = stop
    arrays = {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "labels": labels[None],
        "startend_row_indices": ends.astype(np.int32)[None, None, :, None],
    }
    return Batch(arrays, ((0, 1),), 23, int((labels != -100).sum()))


@pytest.mark.parametrize(("fused", "sparse"), [(False, False), (True, False), (False, True)])
def test_multi_token_prediction_against_transformers_layers(tmp_path, fused, sparse):
    """Value and gradient of the whole loss, built from transformers' own layers and hand-made shifts, document by
    document."""
    shape = {**SHAPE, "num_nextn_predict_layers": 2, "moe_layer_start_index": 1}
    theirs = random_model("ernie4_5_moe", **shape)
    ours = build_with_predictions(theirs, tmp_path)
    ours.train()
    batch = mtp_batch()
    result = supervised(fused_head=fused, sparse_head=sparse, multi_token_pred_lambda=0.7).loss(ours, batch)
    result.loss_sum.backward()

    weights = named_weights(ours)
    copies = {}
    for name, weight in weights.items():
        if ".mtp_" in name:
            values = weight.numpy().T if ERNIE4_5_MOE.is_linear(name) else weight.numpy()
            copies[name] = torch.tensor(values, requires_grad=True)
    main, further = torch.zeros(()), torch.zeros(())
    for start, stop in ((0, 9), (9, 23)):
        ids = torch.tensor(batch.input_ids[:, start:stop])
        labels = torch.tensor(batch.labels[0, start:stop])
        positions = torch.arange(stop - start)[None]
        before_norm = []
        hook = theirs.model.norm.register_forward_pre_hook(lambda own, inputs, kept=before_norm: kept.append(inputs[0]))
        logits = theirs(input_ids=ids).logits[0]
        hook.remove()
        main = main + cross_entropy(logits, labels)
        state, rotation = before_norm[0], theirs.model.rotary_emb(before_norm[0], positions)
        for depth in (1, 2):
            prefix, number = "model.mtp_", depth - 1
            embedded = torch.nn.functional.pad(theirs.model.embed_tokens(ids)[:, depth:], (0, 0, 0, depth))
            both = torch.cat(
                [
                    rms_norm(embedded, copies[f"{prefix}emb_norm.{number}.weight"]),
                    rms_norm(state, copies[f"{prefix}hidden_norm.{number}.weight"]),
                ],
                dim=-1,
            )
            joined = both @ copies[f"{prefix}linear_proj.{number}.weight"].T
            block = decoder_layer(theirs, number, copies)
            causal = torch.full((1, 1, stop - start, stop - start), -torch.inf).triu(1)
            out = block(joined, attention_mask=causal, position_ids=positions, position_embeddings=rotation)
            state = out[0] if isinstance(out, tuple) else out
            shifted = torch.cat([labels[depth:], torch.full((depth,), -100)])
            # Positions whose next tokens end the document read zeros, and nothing is asked of them.
            further = further + cross_entropy(theirs.lm_head(theirs.model.norm(state))[0], shifted) / 2
    (main + 0.7 * further).backward()
    assert float(result.loss_sum) == pytest.approx(float(main.detach()), rel=1e-5)
    assert float(result.metric_sums["mtp_loss"]) == pytest.approx(float(further.detach()), rel=1e-5)
    their_weights = dict(theirs.named_parameters())
    compared = 0
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"):
        assert_close(weights[name], their_weights[name].grad, name)
    for name, copy in copies.items():
        if copy.grad is not None and copy.grad.abs().max() > 0:
            assert_close(weights[name], copy.grad, name)
            compared += 1
    assert compared > 20


def assert_close(own, expected, name):
    gradient = own.grad.numpy().T if ERNIE4_5_MOE.is_linear(name) else own.grad.numpy()
    assert np.abs(gradient - expected.numpy()).max() < 1e-3 * np.abs(expected.numpy()).max(), name


def cross_entropy(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)


def rms_norm(x, weight):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def decoder_layer(theirs, number, copies):
    """transformers' own layer number `number`, computing with our prediction block's weights."""
    layer = type(theirs.model.layers[0])(theirs.config, number)
    prefix = f"model.mtp_block.{number}."

    def call(*arguments, **named):
        own = {name.removeprefix(prefix): copy for name, copy in copies.items() if name.startswith(prefix)}
        return torch.func.functional_call(layer, own, arguments, named)

    return call


def build_with_predictions(theirs, folder):
    """Our model with their weights; those of its prediction layers are random."""
    theirs.save_pretrained(folder)
    config = ModelConfig.from_folder(folder)
    random = build_model(config, None, seed=1)
    weights = named_weights(random)
    rng = np.random.default_rng(5)
    for name, weight in weights.items():
        if ".mtp_" in name:
            values = rng.uniform(0.4, 1.8, weight.shape) if "norm" in name else rng.normal(0.0, 0.25, weight.shape)
            weight.set_value((values * (0.1 if "correction" in name else 1)).astype(np.float32))
    stored = dict(theirs.state_dict())
    for name, weight in weights.items():
        if ".mtp_" not in name:
            values = stored[name].numpy()
            weight.set_value(np.ascontiguousarray(values.T if ERNIE4_5_MOE.is_linear(name) else values))
    return random


def test_transformers_loads_what_we_save_and_ignores_the_predictions(tmp_path):
    shape = {**SHAPE, "num_nextn_predict_layers": 1}
    ours = build_with_predictions(random_model("ernie4_5_moe", **shape), tmp_path / "theirs")
    save_model_folder(ours, tmp_path / "ours")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    ids = np.random.default_rng(4).integers(0, VOCABULARY, (1, 40))
    with torch.no_grad():
        expected = loaded(input_ids=torch.tensor(ids)).logits.numpy()
    ours.eval()
    np.testing.assert_allclose(ours.head(our_hidden(ours, ids[0], [40])).numpy(), expected, atol=1e-4)
    again = named_weights(build_model(ModelConfig.from_folder(tmp_path / "ours"), tmp_path / "ours"))
    for name, weight in named_weights(ours).items():
        np.testing.assert_array_equal(again[name].numpy(), weight.numpy(), err_msg=name)
