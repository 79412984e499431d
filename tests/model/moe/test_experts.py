"""A layer of experts against a plain loop over tokens; what routers report and how their biases move."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from erniekit.config.sections.moe import MoeParameters
from erniekit.model.head import token_loss
from erniekit.model.mlp import MLP
from erniekit.model.moe.dispatch import LOCAL_DISPATCHER, AllToAllDispatcher, LocalDispatcher
from erniekit.model.moe.experts import MoE
from erniekit.model.moe.router import NO_BALANCE_LOSSES, ExpertBalance, only_in_best_groups
from erniekit.model.recompute import Recompute
from erniekit.model.weights import named_weights

from ..tiny import EXPERTS, logits_of, pack, tiny_config, tiny_model

MOE = {**EXPERTS, "moe_num_experts": 5, "moe_layer_start_index": 0}
NO_LOSSES = NO_BALANCE_LOSSES
SETTINGS = MoeParameters(0.3, 0.2, 0.1)


def experts_layer(settings=NO_LOSSES, bias=(0.0,) * 5, dispatcher=LOCAL_DISPATCHER, **changes):
    layer = MoE(tiny_config(**{**MOE, **changes}), 0, ExpertBalance(settings), dispatcher=dispatcher)
    rng = np.random.default_rng(1)
    for parameter in layer.parameters():
        parameter.set_value(rng.standard_normal(parameter.shape).astype(np.float32) * 0.5)
    layer.moe_statics.e_score_correction_bias.set_value(np.array([bias], np.float32))
    return layer


def by_hand(layer, rows, k=2, norm_min=1e-12):
    """Token by token, as ERNIE-4.5's report and transformers have it."""
    outputs, bias = [], layer.moe_statics.e_score_correction_bias.numpy()[0]
    for row in rows:
        powers = np.exp(row.astype(np.float64) @ layer.gate.weight.numpy().T)
        probabilities = powers / powers.sum()
        chosen = np.argsort(-(probabilities + bias))[:k]
        total = max(probabilities[chosen].sum(), norm_min)
        x = paddle.to_tensor(row[None])
        out = sum(probabilities[e] / total * layer.experts[int(e)](x).numpy()[0] for e in chosen)
        outputs.append(out if layer.shared_experts is None else out + layer.shared_experts(x).numpy()[0])
    return np.array(outputs)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"moe_num_shared_experts": 0, "moe_k": 3}, {"k": 3}),
        ({"moe_num_shared_experts": 2, "moe_k": 5}, {"k": 5}),
        ({"moe_k": 1, "moe_norm_min": 0.9}, {"k": 1, "norm_min": 0.9}),
    ],
)
def test_every_token_gets_its_own_experts(changes, options):
    layer = experts_layer(bias=(0.4, 0.0, -0.3, 0.0, 0.1), **changes)
    rows = np.random.default_rng(2).standard_normal((23, 16)).astype(np.float32)
    own = layer(paddle.to_tensor(rows.reshape(1, 23, 16))).numpy()[0]
    np.testing.assert_allclose(own, by_hand(layer, rows, **options), atol=2e-5)


def test_one_token_and_one_expert_for_all():
    layer = experts_layer(bias=(9.0, 0.0, 0.0, 0.0, 0.0), moe_k=1)
    rows = np.random.default_rng(2).standard_normal((4, 16)).astype(np.float32)
    for part in (rows, rows[:1]):
        np.testing.assert_allclose(layer(paddle.to_tensor(part[None])).numpy()[0], by_hand(layer, part, k=1), atol=1e-5)


def test_an_expert_runs_once_on_its_tokens_and_never_without_any():
    layer, seen = experts_layer(bias=(9.0, 8.0, 0.0, 0.0, 0.0)), []
    for number, expert in enumerate(layer.experts):
        expert.register_forward_pre_hook(lambda own, inputs, number=number: seen.append((number, inputs[0].shape[0])))
    layer(paddle.ones([1, 6, 16]))
    assert seen == [(0, 6), (1, 6)]


def test_in_step_with_other_ranks_every_expert_runs_and_has_a_gradient():
    bias = (9.0, 8.0, 0.0, 0.0, 0.0)
    alone, layer = experts_layer(bias=bias), experts_layer(bias=bias, dispatcher=LocalDispatcher(run_all_experts=True))
    rows = paddle.to_tensor(np.random.default_rng(2).standard_normal((1, 6, 16)).astype(np.float32))
    outputs = [own(rows) for own in (alone, layer)]
    np.testing.assert_array_equal(outputs[1].numpy(), outputs[0].numpy())
    paddle.add_n(outputs).sum().backward()
    for number, expert in enumerate(layer.experts):
        gradient, expected = expert.up_proj.weight.grad, alone.experts[number].up_proj.weight.grad
        assert (expected is None) == (number > 1)  # no token comes to the other experts
        np.testing.assert_array_equal(gradient.numpy(), 0.0 if expected is None else expected.numpy())


def test_a_layer_holds_the_experts_of_its_rank_under_their_own_numbers():
    second = SimpleNamespace(rank=1, nranks=2)
    layer = MoE(
        tiny_config(**{**MOE, "moe_num_experts": 4}), 0, ExpertBalance(NO_LOSSES), dispatcher=AllToAllDispatcher(second)
    )
    names = [name for name, _ in layer.named_parameters() if name.startswith("experts.")]
    linears = ("gate_proj", "up_proj", "down_proj")
    assert names == [f"experts.{number}.{linear}.weight" for number in (2, 3) for linear in linears]
    assert layer.experts[3].up_proj.weight.shape == [16, 12]


def test_a_saved_program_computes_the_same_with_every_expert():
    layer = experts_layer()
    rows = paddle.to_tensor(np.random.default_rng(2).standard_normal((9, 16)).astype(np.float32))
    routes, _ = layer.router(rows)
    grouped = layer.dispatcher(rows, routes.weights, routes.experts.numpy(), layer.experts).numpy()
    np.testing.assert_allclose(layer._all_experts(rows, routes).numpy(), grouped, atol=1e-5)


def test_reports_count_no_padding():
    layer, rng = experts_layer(SETTINGS), np.random.default_rng(2)
    rows = rng.standard_normal((1, 8, 16)).astype(np.float32)
    padded = np.concatenate([rows, rng.standard_normal((1, 5, 16)).astype(np.float32)], axis=1)
    balance = layer.router._balance
    layer(paddle.to_tensor(rows))
    figures = figures_of(balance)
    is_token = paddle.to_tensor(np.arange(13)[None] < 8).astype("float32")
    layer(paddle.to_tensor(padded), is_token)
    assert set(figures) == {"router_aux_loss", "router_z_loss", "router_orthogonal_loss"}
    for name, value in figures_of(balance).items():
        assert value == pytest.approx(figures[name], rel=1e-5), name


def figures_of(balance):
    """The mean of every loss over the layers."""
    return {name: float(total) / count for name, (total, count) in balance.reported().items()}


def gradients(model, loss_weight=1.0):
    model.train()
    model.begin_micro_batch(step=0, micro_batch=0, loss_weight=loss_weight)
    hidden = model(*pack(np.arange(30) % 53, [12, 30]))
    token_loss(model, hidden, paddle.to_tensor((np.arange(30)[None] * 5) % 53)).loss_sum.backward()
    figures = figures_of(model.balance)
    return {name: p.grad.numpy() for name, p in named_weights(model).items() if p.grad is not None}, figures


def moe_model(settings=NO_LOSSES, **changes):
    model = tiny_model(**{**MOE, **changes})
    model.balance.section = settings
    return model


def test_losses_of_routers_reach_the_gradient_with_their_share_of_the_step():
    plain, _ = gradients(moe_model())
    whole, figures = gradients(moe_model(SETTINGS))
    half, _ = gradients(moe_model(SETTINGS), loss_weight=0.5)
    name = "model.layers.0.mlp.gate.weight"
    assert set(figures) == {"router_aux_loss", "router_z_loss", "router_orthogonal_loss"}
    assert np.abs(whole[name] - plain[name]).max() > 1e-3
    np.testing.assert_allclose(half[name] - plain[name], (whole[name] - plain[name]) / 2, atol=2e-4)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_changes_nothing(use_reentrant):
    expected, figures = gradients(moe_model(SETTINGS))
    model = moe_model(SETTINGS)
    model.recompute = Recompute(use_reentrant)
    own, own_figures = gradients(model)
    assert own_figures == figures and set(own) == set(expected)
    for name, gradient in expected.items():
        np.testing.assert_array_equal(own[name], gradient, err_msg=name)


def test_joined_losses_are_one_weighted_sum_over_micro_batches(monkeypatch):
    """Against the same losses added to the loss itself, with the learning of predictions beside them."""
    from erniekit.model.moe import router
    from erniekit.training.objectives.objective import supervised

    batches = [random_batch([9, 14], 26, seed=1), random_batch([5], 30, seed=2), random_batch([20, 3], 26, seed=3)]
    units = sum(batch.target_count for batch in batches)
    objective = supervised(multi_token_pred_lambda=0.5)

    kept: list = []

    def summed(model):
        model.train()
        for number, batch in enumerate(batches):
            model.begin_micro_batch(step=0, micro_batch=number, loss_weight=batch.target_count / units)
            loss = objective.loss(model, batch).loss_sum / units
            for own in kept:
                loss = loss + own
            kept.clear()
            loss.backward()
        return {name: p.grad.numpy() for name, p in named_weights(model).items() if p.grad is not None}

    joined = summed(moe_model(SETTINGS, num_nextn_predict_layers=1))
    without = summed(moe_model(num_nextn_predict_layers=1))
    monkeypatch.setattr(router, "add_gradient", lambda value, loss, scale: kept.append(loss * scale) or value)
    expected = summed(moe_model(SETTINGS, num_nextn_predict_layers=1))
    assert joined.keys() == expected.keys()
    for name, gradient in expected.items():
        assert np.abs(joined[name] - gradient).max() <= 1e-5 * np.abs(gradient).max() + 1e-7, name
    gates = [name for name in joined if name.endswith("mlp.gate.weight")]
    assert len(gates) == 3 and all(np.abs(joined[name] - without[name]).max() > 1e-4 for name in gates)


def random_batch(lengths, size, seed):
    """One row of documents and padding, with a label at every token."""
    from erniekit.data.batch import Batch

    rng, tokens = np.random.default_rng(seed), sum(lengths)
    positions = np.concatenate([*(np.arange(length) for length in lengths), np.zeros(size - tokens, np.int64)])
    ends = np.concatenate([np.repeat(np.cumsum(lengths), lengths), np.full(size - tokens, tokens)])
    labels = np.where(np.arange(size) < tokens, rng.integers(1, 53, size), -100)
    arrays = {
        "input_ids": rng.integers(1, 53, (1, size)),
        "position_ids": positions[None],
        "labels": labels[None],
        "startend_row_indices": ends.astype(np.int32)[None, None, :, None],
    }
    return Batch(arrays, ((0,),), tokens, tokens)


def test_biases_move_towards_experts_with_less_than_the_mean_load():
    model = moe_model(MoeParameters(moe_aux_loss_lambda=0.0, moe_router_bias_update_rate=0.01))
    model.train()
    loads = np.zeros((2, 5))
    for micro_batch in range(2):
        model.begin_micro_batch(step=0, micro_batch=micro_batch)
        model(*pack((np.arange(20) * 3 + micro_batch) % 53, [20]))
    for (_, layer), load in model.balance._loads.items():
        loads[layer] += load
    assert loads.sum() == 2 * 2 * 20 * 2  # layers, micro-batches, tokens, experts each
    before = [layer.mlp.moe_statics.e_score_correction_bias.numpy()[0] for layer in model.layers]
    model.end_step()
    for number, layer in enumerate(model.layers):
        moved = layer.mlp.moe_statics.e_score_correction_bias.numpy()[0] - before[number]
        np.testing.assert_allclose(moved, 0.01 * np.sign(loads[number].mean() - loads[number]), atol=1e-6)
    after = [layer.mlp.moe_statics.e_score_correction_bias.numpy() for layer in model.layers]
    model.end_step()  # a step without a load
    for layer, bias in zip(model.layers, after, strict=True):
        np.testing.assert_array_equal(layer.mlp.moe_statics.e_score_correction_bias.numpy(), bias)


def test_a_frozen_router_keeps_its_bias():
    model = moe_model(MoeParameters(moe_aux_loss_lambda=0.0, moe_router_bias_update_rate=0.01))
    for parameter in named_weights(model).values():
        parameter.stop_gradient = True
    before = model.layers[0].mlp.moe_statics.e_score_correction_bias.numpy()
    gradients_of_nothing = model(*pack(np.arange(20), [20]))
    model.end_step()
    assert gradients_of_nothing.stop_gradient
    np.testing.assert_array_equal(model.layers[0].mlp.moe_statics.e_score_correction_bias.numpy(), before)


def test_dense_layers_stay_where_the_configuration_has_them():
    model = tiny_model(**{**MOE, "num_hidden_layers": 4, "moe_layer_start_index": 1, "moe_layer_interval": 2})
    assert [isinstance(layer.mlp, MLP) for layer in model.layers] == [True, False, True, False]


def test_documents_of_a_pack_do_not_see_each_other():
    model = moe_model()
    first, second = np.arange(3, 14), np.arange(20, 39)
    packed = logits_of(model, np.concatenate([first, second]), [11, 30])
    np.testing.assert_allclose(packed[:11], logits_of(model, first), atol=1e-4)
    np.testing.assert_allclose(packed[11:], logits_of(model, second), atol=1e-4)


def test_experts_are_chosen_in_the_groups_with_the_best_two():
    """Of three groups of three, the first has the best expert, and the others the larger sums of two."""
    scores = paddle.to_tensor([[0.9, 0.1, 0.1, 0.6, 0.5, 0.4, 0.2, 0.7, 0.8]])
    kept = only_in_best_groups(scores, groups=3, chosen=2)
    np.testing.assert_array_equal(kept.numpy(), [[0, 0, 0, *scores.numpy()[0, 3:]]])
