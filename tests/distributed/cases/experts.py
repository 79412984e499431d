"""A layer of experts divided between ranks against the whole layer, which each rank computes for itself, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.fleet.utils import recompute

from erniekit.config.sections.moe import MoeParameters
from erniekit.distributed import cpu_backend
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.moe.dispatch import (
    LOCAL_DISPATCHER,
    AllGatherDispatcher,
    AllReduceDispatcher,
    AllToAllDispatcher,
    TokenDispatcher,
)
from erniekit.model.moe.experts import MoE
from erniekit.model.moe.router import ExpertBalance
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel

HIDDEN, EXPERTS = 16, 4
CONFIG = ModelConfig.from_json(
    {
        "model_type": "ernie4_5_moe",
        "vocab_size": 53,
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "moe_num_experts": EXPERTS,
        "moe_k": 2,
        "moe_intermediate_size": 12,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0,
    }
)
LOSSES = MoeParameters(0.3, 0.2, 0.1, 0.01)
RECOMPUTE = {"none": None, "hooks": False, "PyLayer": True}
FROZEN = {"nothing": (), "all but expert 0": ("gate.", "shared_experts.", "experts.1", "experts.2", "experts.3")}
Micro = tuple[np.ndarray, np.ndarray]  # x [1, T, H], and which of its positions are tokens


class Ranks:
    """Fleet's groups, with as many ranks along one axis as there are."""

    def __init__(self, axis: str) -> None:
        cpu_backend.apply()
        paddle.set_default_dtype("float64")
        size = dist.ParallelEnv().world_size
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"mp_degree" if axis == "tensor" else "dp_degree": size}
        fleet.init(is_collective=True, strategy=strategy)
        groups = fleet.get_hybrid_communicate_group()
        self.group = groups.get_model_parallel_group() if axis == "tensor" else groups.get_data_parallel_group()
        self.rank, self.size = self.group.rank, self.group.nranks

    def sum(self, values: np.ndarray) -> np.ndarray:
        total = paddle.to_tensor(values)
        dist.all_reduce(total, group=self.group)
        return total.numpy()


def _values(name: str) -> np.ndarray:
    shape = {**CONFIG.weight_shapes()}[f"model.layers.0.mlp.{name}"]
    values = np.random.default_rng(sum(name.encode())).standard_normal(shape) * 0.5
    return values.T if "_proj" in name else values


def _layer(
    tp: TensorParallel, dispatcher: TokenDispatcher, frozen: tuple[str, ...], all_reduce_loads: Any = None
) -> MoE:
    balance = ExpertBalance(LOSSES, all_reduce_loads) if all_reduce_loads else ExpertBalance(LOSSES)
    layer = MoE(CONFIG, 0, balance, tp, dispatcher)
    for name, parameter in layer.named_parameters():
        axis = CONFIG.architecture.placement(f"model.layers.0.mlp.{name}").axis
        parameter.set_value(tp.local_shard(_values(name), axis))
        parameter.stop_gradient = parameter.stop_gradient or name.startswith(frozen)
    return layer


def _run(
    layer: MoE,
    batch: Micro,
    *,
    number: int = 0,
    loss_weight: float,
    mechanism: bool | None = None,
    frozen: bool = False,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Output and gradient of x; the gradients of parameters add up. The loss is sum(out * cos(x)).

    Args:
        frozen: whether x asks for no gradient.
    """
    x, is_token = batch
    layer.router._balance.begin_micro_batch(number, loss_weight)
    own = paddle.to_tensor(x, stop_gradient=frozen)
    mask = paddle.to_tensor(is_token.astype(np.float64))
    entered = own * 1.0
    if frozen and mechanism is not None:  # as model/recompute.py does
        entered.stop_gradient = False
    out = layer(entered, mask) if mechanism is None else recompute(layer, entered, mask, use_reentrant=mechanism)
    (out * paddle.to_tensor(np.cos(x))).sum().backward()
    return out.numpy(), None if own.grad is None else own.grad.numpy()


def _gradients(layer: MoE) -> dict[str, np.ndarray]:
    return {name: p.grad.numpy() for name, p in layer.named_parameters() if not p.stop_gradient and p.grad is not None}


def _figures(layer: MoE) -> dict[str, float]:
    return {name: float(total) for name, (total, _) in layer.router._balance.reported().items()}


def _close(own: np.ndarray, expected: np.ndarray, what: str) -> None:
    np.testing.assert_allclose(own, expected, rtol=0, atol=1e-11 * max(1.0, np.abs(expected).max()), err_msg=what)


def _micro_batch(seed: int, tokens: int, padding: int) -> Micro:
    x = np.random.default_rng(seed).standard_normal((1, tokens + padding, HIDDEN))
    return x, np.arange(tokens + padding)[None] < tokens


def tensor_ranks(sequence: bool) -> list[str]:
    """One micro-batch on all ranks; experts on all ranks, or divided. Returns what was compared."""
    ranks = Ranks("tensor")
    tp = TensorParallel(ranks.rank, ranks.size, ranks.group, sequence)
    ways: dict[str, TokenDispatcher] = {"all here": LOCAL_DISPATCHER}
    if sequence:
        ways |= {
            "exchange": AllToAllDispatcher(ranks.group),
            "padded exchange": AllToAllDispatcher(ranks.group, padded=True),
        }
        ways |= {
            "gathering": AllGatherDispatcher(ranks.group),
            "padded gathering": AllGatherDispatcher(ranks.group, padded=True),
        }
    else:
        ways |= {"replicas": AllReduceDispatcher(ranks.group)}
    x, is_token = _micro_batch(5, 13, 3)
    part = np.s_[:, :]
    if sequence:
        width = x.shape[1] // ranks.size
        part = np.s_[:, ranks.rank * width : (ranks.rank + 1) * width]

    compared = []
    for frozen_name, frozen in FROZEN.items():
        whole = _layer(NO_TENSOR_PARALLEL, LOCAL_DISPATCHER, frozen)
        expected_out, expected_x = _run(whole, (x, is_token), loss_weight=0.7, frozen=bool(frozen))
        expected = _gradients(whole)
        expected_figures = _figures(whole)
        whole.router._balance.end_step([whole.router])
        for way_name, way in ways.items():
            for recompute_name, mechanism in RECOMPUTE.items():
                what = f"{way_name}, frozen: {frozen_name}, recompute: {recompute_name}"
                all_reduce_loads = ranks.sum if sequence else None
                layer = _layer(tp, way, frozen, all_reduce_loads)
                own = np.ascontiguousarray(x[part]), is_token[part]
                out, x_gradient = _run(layer, own, loss_weight=0.7, mechanism=mechanism, frozen=bool(frozen))
                _close(out, expected_out[part], what)
                if not frozen:
                    _close(x_gradient, expected_x[part], what)
                for name, value in expected_figures.items():
                    assert abs(_figures(layer)[name] - value) < 1e-12, (what, name)
                _compare(layer, expected, ranks, tp, way, what)
                layer.router._balance.end_step([layer.router])
                _close(
                    layer.moe_statics.e_score_correction_bias.numpy(),
                    whole.moe_statics.e_score_correction_bias.numpy(),
                    what,
                )
                compared.append(what)
    return compared


def _compare(
    layer: MoE, expected: dict[str, np.ndarray], ranks: Ranks, tp: TensorParallel, way: TokenDispatcher, what: str
) -> None:
    """Gradients of a tensor-parallel rank, each as the table of placements has it."""
    for name, parameter in layer.named_parameters():
        tensor_placement = CONFIG.architecture.placement(
            f"model.layers.0.mlp.{name}", sequence_parallel=tp.sequence_parallel
        )
        if name not in expected or parameter.stop_gradient:
            continue
        own = np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()
        if tensor_placement.partial and not (tensor_placement.expert is not None and way.group is not None):
            own = ranks.sum(own)
        _close(own, tp.local_shard(expected[name], tensor_placement.axis), f"{what}: {name}")


def data_ranks() -> list[str]:
    """Each rank has a micro-batch of its own, one of them padding only; experts are divided over these ranks."""
    ranks = Ranks("data")
    ways: dict[str, TokenDispatcher] = {"exchange": AllToAllDispatcher(ranks.group)}
    ways |= {"padded exchange": AllToAllDispatcher(ranks.group, padded=True)}
    ways |= {
        "gathering": AllGatherDispatcher(ranks.group),
        "padded gathering": AllGatherDispatcher(ranks.group, padded=True),
    }
    batches = [_micro_batch(7, 9, 0), _micro_batch(8, 0, 1), _micro_batch(9, 4, 2), _micro_batch(10, 1, 0)][
        : ranks.size
    ]
    loss_weight = [0.5, 0.0, 0.2, 0.3]
    compared = []
    for frozen_name, frozen in FROZEN.items():
        whole = _layer(NO_TENSOR_PARALLEL, LOCAL_DISPATCHER, frozen)
        outs = []
        for number, batch in enumerate(batches):
            outs.append(_run(whole, batch, number=number, loss_weight=loss_weight[number], frozen=bool(frozen)))
        expected = _gradients(whole)
        whole.router._balance.end_step([whole.router])
        for way_name, way in ways.items():
            for recompute_name, mechanism in RECOMPUTE.items():
                what = f"{way_name}, frozen: {frozen_name}, recompute: {recompute_name}"
                layer = _layer(NO_TENSOR_PARALLEL, way, frozen, ranks.sum)
                own_batch, own_share = batches[ranks.rank], loss_weight[ranks.rank]
                out, x_gradient = _run(
                    layer, own_batch, loss_weight=own_share, mechanism=mechanism, frozen=bool(frozen)
                )
                _close(out, outs[ranks.rank][0], what)
                if not frozen:
                    _close(x_gradient, outs[ranks.rank][1], what)
                for name, parameter in layer.named_parameters():
                    if name in expected and not parameter.stop_gradient:
                        own = parameter.grad.numpy()
                        own = own if name.startswith("experts.") else ranks.sum(own)
                        _close(own, expected[name], f"{what}: {name}")
                layer.router._balance.end_step([layer.router])
                _close(
                    layer.moe_statics.e_score_correction_bias.numpy(),
                    whole.moe_statics.e_score_correction_bias.numpy(),
                    what,
                )
                compared.append(what)
    return compared


def order_of_backward() -> list[str]:
    """The collectives of a backward pass where shared experts and routed ones both communicate."""
    ranks = Ranks("tensor")
    layer = _layer(
        TensorParallel(ranks.rank, ranks.size, ranks.group, sequence_parallel=True), AllToAllDispatcher(ranks.group), ()
    )
    layer.eval()
    x = paddle.to_tensor(_micro_batch(5, 4, 0)[0], stop_gradient=False)
    loss = layer(x).sum()
    called: list[str] = []
    group = ranks.group.process_group
    for name in ("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        for form in (name, f"{name}_on_calc_stream"):
            setattr(group, form, _noting(called, name, getattr(group, form)))
    loss.backward()
    return called


def _noting(called: list[str], name: str, collective: Any) -> Any:
    def noting(*arguments: Any, **options: Any) -> Any:
        called.append(name)
        return collective(*arguments, **options)

    return noting
