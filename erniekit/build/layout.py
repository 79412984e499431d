"""Plan the layout of a run: topology, layers of each stage, memory of a rank. It needs neither Paddle nor NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from erniekit.build.adapters import adapter_plan
from erniekit.build.parts import frozen_parts
from erniekit.build.quantization import quantization_from
from erniekit.build.scores import with_score
from erniekit.build.speech import codec_of_run, with_codes
from erniekit.build.vocabulary import with_added_tokens
from erniekit.config.sections.checkpoint import moment_quantization, saves_asynchronously
from erniekit.config.sections.dpo import reference_mode
from erniekit.config.sections.rewards import read_reward
from erniekit.config.values import other_device
from erniekit.data.tokenizers.files import needs_paddlenlp
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
from erniekit.distributed.planning.pipeline_bubble import bubble, chunk_costs
from erniekit.distributed.topology import topology_from
from erniekit.errors import UserError
from erniekit.hub.cache import chosen_hub, find_local_folder, local_model_folder
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.published import published_model
from erniekit.model.quantization.settings import WeightOnly
from erniekit.native.library import PADDLE, processor_paths

if TYPE_CHECKING:
    from erniekit.config import Config
    from erniekit.distributed.topology import Topology

MOMENTS_IN_CHECKPOINTS = {"O0": 8.0, "O1": 2.05, "O2": 1.09}  # bytes a value, see `training.compressed_state`
REWARD_MODEL = "reward model"  # which no hub has
SHARDING_LEVELS = {"none": 0, "stage1": 1, "stage2": 2, "stage3": 3}


@dataclass(frozen=True)
class LayoutPlan:
    """The planned layout of a run, with the memory and the traffic of its ranks.

    Attributes:
        work: the micro-batch and the settings that determine the memory of a rank.
        model_chunks: the layers of each model chunk of the pipeline.
        memory: for a rank of each pipeline stage, bytes by purpose; see `training_memory`.
        bytes_sent: for a rank of each pipeline stage, bytes sent in a step by axis; see `step_bytes`.
        bubble: the share of a step in which stages wait for each other.
        not_counted: the models whose memory is not counted because their shapes are unknown, and why.
    """

    model: ModelConfig
    work: Workload
    topology: Topology
    model_chunks: list[range]
    memory: list[dict[str, int]]
    bytes_sent: list[dict[str, int]]
    bubble: float
    not_counted: tuple[str, ...] = ()

    @property
    def max_traffic(self) -> dict[str, int]:
        """The bytes that the busiest rank sends in a step, by axis."""
        return max(self.bytes_sent, key=lambda axes: sum(axes.values()))

    @property
    def max_memory(self) -> dict[str, int]:
        """The bytes by purpose of the rank that needs most memory."""
        return max(self.memory, key=lambda stage: stage["total"])


def plan_layout(
    config: Config, model: ModelConfig, world_size: int | None = None, longest_document: int | None = None
) -> LayoutPlan:
    """Plan the layout of a model over `world_size` ranks, or over as few ranks as the configured degrees need.

    Args:
        longest_document: the length of the longest document in tokens, if the data has been read.

    Raises:
        ConfigurationError: the configured degrees do not divide the ranks or the model.
    """
    topology = topology_from(config, world_size)
    model_chunks = partition_layers(config, model, topology)
    work = replace(workload(config, model), longest_document=longest_document)
    stages = range(topology.pipeline)
    costs = chunk_costs(model, model_chunks) if topology.pipeline > 1 else []
    waiting = bubble(topology, work.accumulation, costs, backward=3 if work.recompute else 2)
    return LayoutPlan(
        model,
        work,
        topology,
        model_chunks,
        memory=[training_memory(model, work, topology, model_chunks, stage) for stage in stages],
        bytes_sent=[step_bytes(model, work, topology, model_chunks, stage) for stage in stages],
        bubble=waiting,
        not_counted=tuple(known for _, known in other_models(config) if isinstance(known, str)),
    )


def known_model_config(config: Config) -> ModelConfig | str:
    """Return the shape of the model, or a text that says why it is unknown; the model may be created later."""
    name = config.basic.model_name_or_path
    try:
        folder = local_model_folder(config)
        if folder is None:
            found = published_model(name)
            return f"{name} is not here yet; training fetches it" if found is None else _trained(config, found, name)
        model = _trained(config, ModelConfig.from_folder(folder, config.basic.ignore_config_keys), folder)
        return model if needs_paddlenlp(folder) else with_added_tokens(config, model, folder)
    except UserError as error:
        return str(error)


def _trained(config: Config, model: ModelConfig, where: Path | str) -> ModelConfig:
    """Return the shape of the model that the stage makes of one."""
    return with_score(config, with_codes(config, model, where), where)


def partition_layers(config: Config, model: ModelConfig, topology: Topology) -> list[range]:
    """Check that the layout divides the model, and return the layers of each model chunk.

    Raises:
        ConfigurationError: the layout does not divide the model, see `check_divisible`.
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
    others = [(role, known) for role, known in other_models(config) if isinstance(known, ModelConfig)]
    budget = config.acceleration.batch_tokens or _positions_of_seconds(config)
    rows = -(-budget // config.training.max_seq_len) if budget else config.training.per_device_train_batch_size
    return Workload(
        batch_size=rows,
        max_seq_len=config.training.max_seq_len,
        accumulation=config.training.gradient_accumulation_steps,
        recompute=config.memory.recompute,
        no_recompute_layers=config.memory.no_recompute_layers,
        recompute_granularity=config.memory.recompute_granularity,
        fused_head=config.memory.use_fused_head_and_loss_fn or config.applies("teacher_model_name_or_path"),
        dense_mask=config.uses_dense_mask,
        reference_copy=copies_reference(config) and not config.dpo.ref_model_name_or_path,
        reference=dict(others).get("reference"),
        distills=config.applies("teacher_model_name_or_path"),
        teacher=dict(others).get("teacher"),
        reward_models=tuple(known for role, known in others if role == REWARD_MODEL),
        adapters=adapters.settings if adapters else None,
        frozen=frozen_parts(config, model),
        sharding=SHARDING_LEVELS[config.distributed.sharding],
        weight_only=quantization if isinstance(quantization, WeightOnly) else None,
        checkpoint_value=_checkpoint_value(config),
        formats=number_formats(config),
    )


def other_models(config: Config) -> list[tuple[str, ModelConfig | str]]:
    """Return the models of other folders that are in memory in training: what each is (`reference`, `teacher`,
    `reward model`), and its shape, or a text that says why it is unknown."""
    names: list[tuple[str, str]] = []
    if copies_reference(config) and config.dpo.ref_model_name_or_path:
        names.append(("reference", config.dpo.ref_model_name_or_path))
    if config.applies("teacher_model_name_or_path") and not config.distillation.teacher_top_k:
        names.append(("teacher", config.distillation.teacher_model_name_or_path))
    if config.applies("rewards"):
        declared = map(read_reward, config.rewards.rewards)
        names += [(REWARD_MODEL, reward.argument) for reward in declared if reward.kind == "reward_model"]
    return [(role, _shape_of(config, name, role)) for role, name in names]


def copies_reference(config: Config) -> bool:
    """Return whether the reference is a second model in memory."""
    return config.stage.needs_reference and reference_mode(config.dpo, lora=config.lora.lora) == "copy"


def _shape_of(config: Config, name: str, role: str) -> ModelConfig | str:
    ignored = config.basic.ignore_config_keys
    try:
        folder = find_local_folder(name, None if role == REWARD_MODEL else chosen_hub(config))
        known = published_model(name) if folder is None else ModelConfig.from_folder(folder, ignored)
    except UserError as error:
        return f"the {role}: {error}"
    return known or f"the {role}: {name} is not here yet"


def _positions_of_seconds(config: Config) -> int:
    """Return the frames of a micro-batch that `batch_seconds` limits; 0 if it does not, or the codec is not here."""
    if not (config.stage.reads_codes and config.speech.batch_seconds):
        return 0
    return math.ceil(config.speech.batch_seconds * codec_of_run(config).frame_rate)


def number_formats(config: Config) -> Formats:
    """Return the bytes per value of weights, gradients and moments; 0 for offloaded states."""
    formats = _compute_formats(config)
    if config.memory.offload_optim or config.fp8.tensorwise_offload_optimizer:
        return replace(formats, moments=0, master=0)
    return replace(formats, moments=4) if config.fp8.use_lowprecision_moment else formats


def _checkpoint_value(config: Config) -> float:
    """Return the bytes per trained value that `async_save` keeps in shared memory while a checkpoint is written."""
    section = config.checkpoint
    if not saves_asynchronously(section) or section.save_strategy == "no":
        return 0.0
    weight = 4 + _compute_formats(config).master
    if section.ignore_save_lr_and_optim:
        return weight
    return weight + MOMENTS_IN_CHECKPOINTS[moment_quantization(section)]


def _compute_formats(config: Config) -> Formats:
    """Return float32 for a CPU, else the formats of section 1.8; bf16, fp16 or a GPU in `device` imply a GPU.

    On a CPU whether `cpu_bf16: auto` rounds is measured when a run begins; here it does wherever it can.
    """
    precision, device = config.precision, config.basic.device
    sixteen_bits = precision.bf16 or precision.fp16
    if device == "cpu" or other_device(device) or not (sixteen_bits or device.startswith("gpu")):
        paths = processor_paths()
        native = config.acceleration.cpu_kernels != PADDLE and bool(paths)
        rounds = device == "cpu" and precision.bf16 and (precision.cpu_bf16 == "always" or "avx512_bf16" in paths)
        return replace(FLOAT32_ON_CPU, native_kernels=native, rounded_weights=2 if rounds else 0)
    formats = replace(FLOAT32_ON_CPU, on_cpu=False)
    if sixteen_bits:
        formats = BFLOAT16_O2 if precision.fp16_opt_level == "O2" else BFLOAT16_O1
    return replace(formats, gradients=4) if formats.master and precision.amp_master_grad else formats


def describe_formats(formats: Formats) -> str:
    """Return the formats as text for a report."""
    if formats.on_cpu:
        return "float32 with products in bfloat16 on a CPU" if formats.rounded_weights else "float32 on a CPU"
    if formats.weights == 4:
        return "float32 on a GPU" if formats.activations == 4 else "float32 weights, 16-bit activations on a GPU"
    copies = "float32 copies" if formats.master else "float32 copies in host memory"
    return f"16 bits with {copies}, {8 * formats.gradients}-bit gradients, on a GPU"
