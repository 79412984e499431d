"""A run's layout on paper: topology, layers of each stage, memory of a rank. Needs neither Paddle nor NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from erniekit.build.adapters import adapter_plan
from erniekit.build.quantization import quantization_from
from erniekit.config.sections.checkpoint import moment_quantization, saves_asynchronously
from erniekit.config.sections.dpo import reference_mode
from erniekit.distributed.planning.communication import step_bytes
from erniekit.distributed.planning.divisibility import check_divisible
from erniekit.distributed.planning.memory import (
    BFLOAT16_O1,
    BFLOAT16_O2,
    FLOAT32_ON_CPU,
    Formats,
    Workload,
    training_memory,
)
from erniekit.distributed.planning.pipeline_bubble import chunk_costs, simulate
from erniekit.distributed.topology import topology_from
from erniekit.errors import UserError
from erniekit.hub.cache import local_model_folder
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.published import published_model
from erniekit.model.quantization.settings import WeightOnly

if TYPE_CHECKING:
    from erniekit.config import Config
    from erniekit.distributed.topology import Topology

MOMENTS_IN_CHECKPOINTS = {"O0": 8.0, "O1": 2.05, "O2": 1.09}  # bytes a value, see `training.compressed_state`
SHARDING_LEVELS = {"none": 0, "stage1": 1, "stage2": 2, "stage3": 3}


@dataclass(frozen=True)
class LayoutPlan:
    """The layout of a run on paper, with the memory and the traffic of its ranks.

    Attributes:
        work: what a rank computes at a time.
        model_chunks: the layers of each run of the pipeline, see `stages.layer_runs`.
        memory: bytes by purpose of a rank of each pipeline stage, see `training_memory`.
        bytes_sent: bytes that a rank of each stage sends in a step, by axis, see `step_bytes`.
        bubble: the share of a step in which stages wait for each other, see `simulate`.
    """

    model: ModelConfig
    work: Workload
    topology: Topology
    model_chunks: list[range]
    memory: list[dict[str, int]]
    bytes_sent: list[dict[str, int]]
    bubble: float

    @property
    def max_traffic(self) -> dict[str, int]:
        """Return the bytes that the busiest rank sends in a step, by axis."""
        return max(self.bytes_sent, key=lambda axes: sum(axes.values()))

    @property
    def max_memory(self) -> dict[str, int]:
        """The memory of the rank that takes most."""
        return max(self.memory, key=lambda stage: stage["total"])


def plan_layout(
    config: Config, model: ModelConfig, world_size: int | None = None, longest_document: int | None = None
) -> LayoutPlan:
    """Divide a model as a configuration says, over `world_size` ranks, or over as few as its degrees need.

    Args:
        longest_document: in tokens, where the data has been read.

    Raises:
        ConfigurationError: ranks or model cannot be divided so.
    """
    topology = topology_from(config, world_size)
    model_chunks = partition_layers(config, model, topology)
    work = replace(workload(config, model), longest_document=longest_document)
    stages = range(topology.pipeline)
    timeline = simulate(
        topology, work.accumulation, chunk_costs(model, model_chunks), backward=3 if work.recompute else 2
    )
    return LayoutPlan(
        model,
        work,
        topology,
        model_chunks,
        memory=[training_memory(model, work, topology, model_chunks, stage) for stage in stages],
        bytes_sent=[step_bytes(model, work, topology, model_chunks, stage) for stage in stages],
        bubble=timeline.bubble,
    )


def known_model_config(config: Config) -> ModelConfig | str:
    """The shape of the model, or why it is unknown, which is no problem of the configuration: it may be made later."""
    name = config.basic.model_name_or_path
    try:
        folder = local_model_folder(config)
        if folder is None:
            return published_model(name) or f"{name} is not here yet; training fetches it"
        return ModelConfig.from_folder(folder)
    except UserError as error:
        return str(error)


def partition_layers(config: Config, model: ModelConfig, topology: Topology) -> list[range]:
    """The layers of each run of the pipeline, once everything of the model is known to be divisible.

    Raises:
        ConfigurationError: what cannot be divided, see `check_divisible`.
    """
    return check_divisible(
        model,
        topology,
        max_seq_len=config.training.max_seq_len,
        pp_seg_method=config.distributed.pp_seg_method,
        add_tail_layers=config.distributed.add_tail_layers,
        quantization=quantization_from(config),
    )


def workload(config: Config, model: ModelConfig) -> Workload:
    """Return what decides how much memory a rank takes, from a configuration and its model."""
    adapters = adapter_plan(config, model)
    quantization = quantization_from(config)
    mode = reference_mode(config.dpo, lora=config.lora.lora)
    budget = config.acceleration.batch_tokens
    rows = -(-budget // config.training.max_seq_len) if budget else config.training.per_device_train_batch_size
    return Workload(
        batch_size=rows,
        max_seq_len=config.training.max_seq_len,
        accumulation=config.training.gradient_accumulation_steps,
        recompute=config.memory.recompute,
        no_recompute_layers=config.memory.no_recompute_layers,
        recompute_granularity=config.memory.recompute_granularity,
        fused_head=config.memory.use_fused_head_and_loss_fn,
        dense_mask=config.uses_dense_mask,
        reference_copy=config.stage.needs_reference and mode == "copy",
        adapters=adapters.settings if adapters else None,
        sharding=SHARDING_LEVELS[config.distributed.sharding],
        weight_only=quantization if isinstance(quantization, WeightOnly) else None,
        checkpoint_value=_checkpoint_value(config),
        formats=number_formats(config),
    )


def number_formats(config: Config) -> Formats:
    """Of the arithmetic, and of what AdamW remembers: nothing on the device where it is elsewhere between steps."""
    formats = _compute_formats(config)
    if config.memory.offload_optim or config.fp8.tensorwise_offload_optimizer:
        return replace(formats, moments=0, master=0)
    return replace(formats, moments=4) if config.fp8.use_lowprecision_moment else formats


def _checkpoint_value(config: Config) -> float:
    """Bytes of a trained value that `async_save` keeps in shared memory until the checkpoint is on the disk."""
    section = config.checkpoint
    if not saves_asynchronously(section) or section.save_strategy == "no":
        return 0.0
    weight = 4 + _compute_formats(config).master
    if section.ignore_save_lr_and_optim:
        return weight
    return weight + MOMENTS_IN_CHECKPOINTS[moment_quantization(section)]


def _compute_formats(config: Config) -> Formats:
    """float32 on a CPU; what section 1.8 says on the GPU that 16-bit formats or `device` ask for."""
    precision = config.precision
    sixteen_bits = precision.bf16 or precision.fp16
    if config.basic.device == "cpu" or not (sixteen_bits or config.basic.device.startswith("gpu")):
        return FLOAT32_ON_CPU
    formats = replace(FLOAT32_ON_CPU, on_cpu=False)
    if sixteen_bits:
        formats = BFLOAT16_O2 if precision.fp16_opt_level == "O2" else BFLOAT16_O1
    return replace(formats, gradients=4) if formats.master and precision.amp_master_grad else formats


def describe_formats(formats: Formats) -> str:
    """The same in words."""
    if formats.on_cpu:
        return "float32 on a CPU"
    if formats.weights == 4:
        return "float32 on a GPU" if formats.activations == 4 else "float32 weights, 16-bit activations on a GPU"
    copies = "float32 copies" if formats.master else "float32 copies in host memory"
    return f"16 bits with {copies}, {8 * formats.gradients}-bit gradients, on a GPU"
