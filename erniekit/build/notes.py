"""Say at the start of a run, and in `erniekit validate`, which values have no effect here, and what a user should know.

Nothing here refuses: that is `checks.py`. Needs neither Paddle nor NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.config import Config
from erniekit.config.sections.checkpoint import leaves_no_checkpoint
from erniekit.config.sections.dpo import REFERENCE_FREE_LOSSES
from erniekit.distributed.stages import falls_back_to_uniform, layer_chunks

if TYPE_CHECKING:
    from erniekit.distributed.topology import Topology
    from erniekit.model.architectures.model_config import ModelConfig


def run_notes(config: Config) -> list[str]:
    """Return lines about defaults that a user should know of before a run of hours."""
    if not config.basic.do_train:
        return []
    lines = leaves_no_checkpoint(config.checkpoint)
    loss = config.dpo.loss_type
    if config.applies("normalize_logps") and not config.is_set("normalize_logps") and loss not in REFERENCE_FREE_LOSSES:
        lines.append(
            f"normalize_logps is false: {loss} sums log-probabilities over an answer, as its paper does; upstream "
            "rescales them to the mean length of a pair, as normalize_logps: true does here"
        )
    return lines


def model_notes(config: Config, model_config: ModelConfig, stored_mtp_layers: int) -> list[str]:
    """Return a line for each value without effect on this model, and for prediction layers that are left out.

    Args:
        stored_mtp_layers: the multi-token prediction layers that the model has, of which the run may use fewer.
    """
    lines = []
    if not model_config.moe_num_experts:
        names = [name for name in config.moe.__dataclass_fields__ if name.startswith("moe_") and config.is_set(name)]
        lines += [f"`{name}: {config[name]}` has no effect: {model_config.model_type} has no experts" for name in names]
    elif config.lora.lora:
        names = [name for name in ("moe_orthogonal_loss_lambda", "moe_router_bias_update_rate") if config[name]]
        lines += [f"`{name}: {config[name]}` has no effect: adapters leave routers unchanged" for name in names]
    elif config.moe.moe_router_bias_update_rate and (
        model_config.architecture.routing(model_config).correction_bias is None
    ):
        lines.append(
            f"`moe_router_bias_update_rate: {config.moe.moe_router_bias_update_rate}` has no effect: the routers of "
            f"{model_config.model_type} have no correction bias"
        )
    if config.memory.recompute and config.memory.no_recompute_layers >= model_config.num_hidden_layers:
        lines.append(
            f"`no_recompute_layers: {config.memory.no_recompute_layers}` leaves no layer to recompute: the model has "
            f"{model_config.num_hidden_layers}, so `recompute: true` has no effect"
        )
    if config.basic.weight_quantize_algo == "weight_only_mix" and not model_config.moe_num_experts:
        lines.append(
            f"`weight_quantize_algo: weight_only_mix` is weight_only_int8 here: {model_config.model_type} has no "
            "experts, whose weights it stores in int4"
        )
    if model_config.moe_num_experts and not config.moe.moe_use_aux_free:
        if model_config.architecture.routing(model_config).correction_bias is None:
            has_none = f"the routers of {model_config.model_type} have no correction bias"
            lines.append(f"`moe_use_aux_free: false` has no effect: {has_none}")
        elif config.lora.lora:
            lines.append("moe_use_aux_free: adapters hold no router, so merging them brings the correction bias back")
    activation = model_config.architecture.activation
    if config.acceleration.fuse_swiglu and activation != "swiglu":
        lines.append(f"`fuse_swiglu: true` has no effect: {model_config.model_type} computes {activation} in its place")
    if model_config.other_keys.get("num_nextn_predict_layers"):
        lines.append("the model's multi-token prediction layers are left out, of training and of the saved model")
    wanted = model_config.num_nextn_predict_layers
    left_out = stored_mtp_layers - wanted
    if left_out > 0:
        lines.append(
            f"num_nextn_predict_layers is {wanted}: {left_out} of the model's multi-token prediction layers "
            f"{'is' if left_out == 1 else 'are'} left out, of training and of the saved model"
        )
    return lines


def expert_parallel_notes(config: Config, model_config: ModelConfig, topology: Topology) -> list[str]:
    """Return a line for each parameter of expert parallelism that has no effect in this layout."""
    group, way = config.distributed.moe_group, "moe_multimodal_dispatch_use_allgather"
    idle = {}
    if not model_config.moe_num_experts:
        idle = dict.fromkeys(("moe_group", way), f"{model_config.model_type} has no experts")
    elif topology.expert == 1:
        alone = {"mp": "tensor_parallel_degree is 1", "data": "no two ranks train on different data"}
        if topology.sharding > 1:
            alone["data"] = "sharding_parallel_degree leaves no ranks to plain data parallelism, which share experts"
        idle = {"moe_group": alone.get(group, ""), way: "every rank holds all experts"}
    elif group == "mp" and not topology.sequence_parallel:
        idle = {way: "without sequence_parallel every rank of `moe_group: mp` has all tokens already"}
    asked = [key for key in idle if config.is_set(key) and config[key] != "dummy"]
    return [f"`{key}: {config[key]}` has no effect: {idle[key]}" for key in asked]


def pipeline_notes(config: Config, model_config: ModelConfig, topology: Topology) -> list[str]:
    """Return a line if the layers cannot be divided equally, so that the stages get unequal numbers of them."""
    layers, section = model_config.num_hidden_layers, config.distributed
    method, tail = section.pp_seg_method, section.add_tail_layers
    if not falls_back_to_uniform(layers, topology, method, tail):
        return []
    sizes = sorted(map(len, layer_chunks(layers, topology, method=method, tail=tail)))
    return [
        f"`pp_seg_method: {method}` is read as uniform: {layers + tail} layers cannot be divided equally into "
        f"{len(sizes)} model chunks, so these have {sizes[0]} to {sizes[-1]}"
    ]
