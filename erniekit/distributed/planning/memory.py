"""Estimate the memory of a rank in training from the model's shape and the layout alone.

The tensors saved for backward follow the decoder's operations; `tools/bench/memory_estimate.py` compares the estimate
with measured runs. Letters: T tokens of a micro-batch, H hidden size, V vocabulary. Needs no Paddle or NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from erniekit.distributed.planning.code_memory import code_states
from erniekit.distributed.planning.encoder_memory import encoder_values, windows_of
from erniekit.distributed.planning.frozen_memory import frozen_models
from erniekit.distributed.planning.head_memory import head_values
from erniekit.distributed.stages import (
    chunks_in_flight,
    layer_chunks,
    numel_on_rank,
    shapes_on_pp_stage,
    stage_layers,
)
from erniekit.distributed.topology import Topology
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.parts import ALIGNER, AUDIO, LLM, decoder_linears, part_of, trainable_shapes
from erniekit.model.architectures.plain_decoder import EMBEDDING, POST_NORMS, Shapes
from erniekit.model.lora.config import LoraSettings, adapter_shapes
from erniekit.model.quantization.settings import WeightOnly

KEPT_SCORES = 4 << 20  # block_attention.MAX_SAVED_SCORES; a test compares the two
TILE = 256  # attention_plan.TILE; likewise
# Host memory of a process that is not tensors, measured (docs/benchmarks.md, "Peak memory"): Python, Paddle, its
# kernels' buffers. It was measured with every block of a megabyte mapped separately, so that there were no gaps.
PROCESS_BYTES = 450_000_000
# Gaps of the heap. Paddle asks for aligned blocks, and glibc before 2.38 does not put one into the hole that another of
# the same size has left; so the gaps grow with the blocks that layers keep and temporarily use.
FRAGMENTATION_OF_ACTIVATIONS = 0.5
FRAGMENTATION_OF_WORKSPACE = 1.1
FRAGMENTATION_WITH_ADAPTERS = 2.0  # if freed memory is returned (`host_memory`), and large blocks move about


@dataclass(frozen=True)
class Formats:
    """Bytes per number of each kind.

    Attributes:
        master: of the optimizer's float32 master copies of 16-bit weights; 0: there are none.
        moments: of both moments of AdamW together.
        rounded_weights: of the copies in bfloat16 that a step on a CPU keeps for its products; 0: there are none. The
            estimate does not count that inputs of products are then kept in half the memory.
        on_cpu: the host memory of the process counts; otherwise FlashMask's kernel runs.
        native_kernels: on a CPU our kernels compute, which keep no attention scores and need fewer temporary values;
            otherwise Paddle's operators do, attention in blocks of scores.
    """

    weights: int = 4
    activations: int = 4
    gradients: int = 4
    master: int = 0
    moments: int = 8
    rounded_weights: int = 0
    on_cpu: bool = True
    native_kernels: bool = True

    @property
    def has_native_kernels(self) -> bool:
        return self.on_cpu and self.native_kernels


FLOAT32_ON_CPU = Formats()
BFLOAT16_O1 = Formats(activations=2, on_cpu=False)  # float32 weights; products and saved activations in 16 bits
BFLOAT16_O2 = Formats(weights=2, activations=2, gradients=2, master=4, on_cpu=False)


@dataclass(frozen=True)
class Workload:
    """The settings of a run that determine its memory.

    Attributes:
        batch_size: rows of a micro-batch of one data-parallel rank; rows are full.
        longest_document: maximum number of tokens that attend to each other; None: a full row.
        accumulation: micro-batches of a step.
        recompute: layers from `no_recompute_layers` on keep only their input and compute the rest again in backward.
        recompute_granularity: the recomputed part of these layers: "full", "full_attn" or "core_attn".
        fused_head: the full logits never exist.
        dense_mask: FlashMask is off: a B x S x S mask and full score matrices exist.
        reference_copy: there is a second, frozen model of the same shape.
        reference: a frozen model with a shape of its own, with which the trained one is compared.
        distills: the loss compares logits with a teacher's, chunk by chunk.
        teacher: the teacher, where it is in memory.
        reward_models: those that score answers.
        adapters: trained on top of frozen weights; None: all weights are trained.
        frozen: the parts of the model that are not trained (`architectures/parts.py`).
        sharding: ZeRO stage: 0 none, 1 optimizer states, 2 also gradients, 3 also parameters.
        weight_only: quantization of frozen linear weights; None: floats.
        checkpoint_value: bytes per trained value of a checkpoint that waits in shared memory; 0: there is none.
    """

    batch_size: int
    max_seq_len: int
    longest_document: int | None = None
    accumulation: int = 1
    recompute: bool = False
    no_recompute_layers: int = 0
    recompute_granularity: str = "full"
    fused_head: bool = False
    dense_mask: bool = False
    reference_copy: bool = False
    reference: ModelConfig | None = None
    distills: bool = False
    teacher: ModelConfig | None = None
    reward_models: tuple[ModelConfig, ...] = ()
    adapters: LoraSettings | None = None
    frozen: frozenset[str] = frozenset()
    sharding: int = 0
    weight_only: WeightOnly | None = None
    checkpoint_value: float = 0.0
    formats: Formats = FLOAT32_ON_CPU

    @property
    def tokens(self) -> int:
        return self.batch_size * self.max_seq_len


def training_memory(
    model: ModelConfig,
    work: Workload,
    topology: Topology | None = None,
    chunks: list[range] | None = None,
    pp_stage: int = 0,
) -> dict[str, int]:
    """Return bytes by purpose for each rank of a pipeline stage; `total` is their sum. Tokens spread evenly over
    experts.

    Args:
        topology: None: one process.
        chunks: the layers of each model chunk of the pipeline, see `stages.layer_chunks`; None: equal chunks.
    """
    topology = topology or Topology()
    chunks = chunks or layer_chunks(model.num_hidden_layers, topology)
    formats = work.formats
    weights, trained = _param_counts(model, work, topology, chunks, pp_stage)
    packed, dequantized = _packed_weights(model, work, topology, chunks, pp_stage)
    shards = [topology.sharding if work.sharding >= level else 1 for level in (1, 2, 3)]
    saved, working = _LayerActivations(model, work, topology).stage_values(chunks, pp_stage)
    head_saved, head_working = head_values(model, work, topology, pp_stage)
    heard_saved, heard_working = _encoder_values(model, work, topology, pp_stage)
    saved, working = saved + heard_saved, max(working, heard_working)
    working = max(working + dequantized, head_working, _embedding_gradient(model, work, topology, pp_stage))
    working = max(working, _teacher_layer(work, topology) - saved)  # it answers before the trained model's layers do
    workspace = working * formats.activations
    rows = work.batch_size * work.max_seq_len**2
    memory = {
        "parameters": weights * formats.weights // shards[2] + weights * formats.rounded_weights + packed,
        **frozen_models(work, topology, pp_stage),
        "gradients": trained * formats.gradients // shards[1],
        "optimizer": trained * (formats.master + formats.moments) // shards[0],
        "activations": saved * formats.activations,
        "logits": head_saved * formats.activations,
        "workspace": workspace,
        "attention_mask": rows * formats.activations if work.dense_mask else 0,
    }
    if work.reference_copy:
        memory["reference"] = weights * (formats.weights + formats.rounded_weights) + packed
    memory["process"] = _process(memory, work) if formats.on_cpu else 0
    memory["checkpoint"] = int(trained * work.checkpoint_value) // shards[0]
    return {**memory, "total": sum(memory.values())}


def trained_shapes(model: ModelConfig, work: Workload) -> Shapes:
    """Return the names and shapes of the weights that are trained, or of the adapters."""
    if work.adapters is not None:
        return adapter_shapes(model, work.adapters)
    return trainable_shapes(model, work.frozen)


def tensor_bytes(memory: dict[str, int]) -> int:
    """Return the part of an estimate that is tensors, which Paddle counts itself."""
    return process_bytes(memory) - memory["process"]


def process_bytes(memory: dict[str, int]) -> int:
    """Return the part of an estimate that belongs to the process: all but a checkpoint in shared memory."""
    return memory["total"] - memory["checkpoint"]


def _process(memory: dict[str, int], work: Workload) -> int:
    """Return the host memory that is not tensors, on a CPU: interpreter, libraries, heap fragmentation."""
    workspace_fragmentation = FRAGMENTATION_OF_WORKSPACE if work.adapters is None else FRAGMENTATION_WITH_ADAPTERS
    fragmentation = FRAGMENTATION_OF_ACTIVATIONS * memory["activations"] + workspace_fragmentation * memory["workspace"]
    return PROCESS_BYTES + int(fragmentation)


def _param_counts(
    model: ModelConfig, work: Workload, topology: Topology, chunks: list[range], pp_stage: int
) -> tuple[int, int]:
    """Return the number of parameter values on a rank of the stage, and of trained ones; without quantized weights."""
    shapes = model.weight_shapes()
    packed = _packed_shapes(model, work)
    plain = {name: shape for name, shape in shapes.items() if name not in packed}
    weights = numel_on_rank(shapes_on_pp_stage(plain, model, topology, chunks, pp_stage), model.architecture, topology)
    own = shapes_on_pp_stage(trained_shapes(model, work), model, topology, chunks, pp_stage)
    trained = numel_on_rank(own, model.architecture, topology)
    return weights + trained if work.adapters else weights, trained


def _teacher_layer(work: Workload, topology: Topology) -> int:
    """Return the temporary values of a teacher's layer, at most those that it would save for a gradient."""
    teacher = work.teacher
    if teacher is None:
        return 0
    layers = _LayerActivations(teacher, replace(work, adapters=None), topology)
    return max(layers.saved(teacher.is_moe_layer(number)) for number in range(teacher.num_hidden_layers))


def _packed_shapes(model: ModelConfig, work: Workload) -> Shapes:
    linears = decoder_linears(model) if work.weight_only else {}
    return {f"{path}.weight": shape for path, shape in linears.items()}


def _packed_weights(
    model: ModelConfig, work: Workload, topology: Topology, chunks: list[range], pp_stage: int
) -> tuple[int, int]:
    """Return the bytes of quantized weights, and the number of values of the largest, which is made
    dense temporarily."""
    packed = shapes_on_pp_stage(_packed_shapes(model, work), model, topology, chunks, pp_stage)
    if work.weight_only is None or not packed:
        return 0, 0
    taken: Shapes = {}
    for name, (outputs, inputs) in packed.items():
        taken[name] = (work.weight_only.form(name.removesuffix(".weight"), model.architecture).nbytes(outputs, inputs),)
    largest = max(numel_on_rank({name: shape}, model.architecture, topology) for name, shape in packed.items())
    return numel_on_rank(taken, model.architecture, topology), largest


class _LayerActivations:
    """The numbers that decoder layers save and use, on one rank for one micro-batch."""

    def __init__(self, model: ModelConfig, work: Workload, topology: Topology) -> None:
        self.model, self.work, self.topology = model, work, topology
        # Outside of blocks a rank has all tokens, or its shard of the sequence.
        self.own_tokens = work.tokens // (topology.tensor if topology.sequence_parallel else 1)
        head_dim = model.architecture.qk_head_dim(model)
        self.queries = model.num_attention_heads * head_dim // topology.tensor
        self.keys = model.num_key_value_heads * head_dim // topology.tensor
        self.longest = work.longest_document or work.max_seq_len

    def stage_values(self, chunks: list[range], pp_stage: int) -> tuple[int, int]:
        """Return the values that a stage saves for all micro-batches in flight, and those that one layer's backward
        adds."""
        model, work, topology = self.model, self.work, self.topology
        layers = stage_layers(chunks, pp_stage, topology.pipeline)
        predictions = range(model.num_nextn_predict_layers if pp_stage == topology.pipeline - 1 else 0)
        moe = [model.is_moe_layer(number) for number in (*layers, *predictions)]
        is_recomputed = [work.recompute and number >= work.no_recompute_layers for number in layers]
        is_recomputed += [work.recompute] * len(predictions)
        hidden = self.own_tokens * model.hidden_size
        saved_per_layer = [self.saved(is_moe) for is_moe in moe]
        recomputed = [
            self.recomputed_values(is_moe) if layer_recomputed else 0
            for is_moe, layer_recomputed in zip(moe, is_recomputed, strict=True)
        ]
        saved = sum(saved_per_layer) - sum(recomputed)
        # Outside of layers: the input, the output or the final norm, and the rotary tables.
        saved += 3 * hidden
        if not work.formats.has_native_kernels:  # whose tables have the channels of one head
            saved += 2 * work.tokens * (self.queries + self.keys)
        in_flight = chunks_in_flight(topology, pp_stage, work.accumulation) / topology.virtual_pipeline
        working = max(recomputed, default=0) + max((self.working(is_moe) for is_moe in moe), default=0)
        return int(saved * in_flight) + self.masks(), working

    def saved(self, moe: bool) -> int:
        """Return the values that a layer saves between forward and backward."""
        model, tokens = self.model, self.work.tokens
        streams = 2 * self.own_tokens * model.hidden_size  # the two residual streams
        output_norms = sum(name in POST_NORMS for name in model.architecture.norms)
        streams += output_norms * self.own_tokens * model.hidden_size  # their inputs
        inputs = 2 * tokens * model.hidden_size  # the two normalised inputs, of all tokens
        attention = 2 * tokens * (self.queries + self.keys) + self._saved_scores()
        mlp = self._expert_values() if moe else self._mlp_values()
        return streams + inputs + attention + mlp + self._dropped(moe)

    def _mlp_values(self) -> int:
        """Return gate, up and product; of a fused gate and up every rank has the whole, and a copy of its channels."""
        inner = self._per_tp_rank(self.model.intermediate_size)
        fused = 2 * self.model.intermediate_size if self.model.architecture.fused_gate_up else 0
        return self.work.tokens * (3 * inner + fused)

    def recomputed_values(self, moe: bool) -> int:
        """Return how many of these values are recomputed instead of saved."""
        if self.work.recompute_granularity == "core_attn":
            return self._saved_scores()
        if self.work.recompute_granularity == "full_attn":
            attention = self.model.hidden_size + 2 * (self.queries + self.keys)
            return self.work.tokens * attention + self._saved_scores()
        return self.saved(moe) - self.own_tokens * self.model.hidden_size

    def _expert_values(self) -> int:
        """Return the sorted inputs and outputs of experts; gate, up and product, also of shared experts; and the
        router's."""
        model, inner = self.model, self.model.moe_intermediate_size
        shared = 3 * self.work.tokens * self._per_tp_rank(model.architecture.shared_experts_size(model))
        router = 3 * self.own_tokens * model.moe_num_experts
        return self._routed() * (2 * model.hidden_size + 3 * inner) + shared + router

    def working(self, moe: bool) -> int:
        """Return the temporary values of the larger of a layer's two backward passes."""
        model, work = self.model, self.work
        attention = 2 * work.tokens * (model.hidden_size + self.queries + 2 * self.keys)
        if work.dense_mask:
            attention += self._saved_scores()  # the gradient of the scores
        elif work.formats.has_native_kernels:  # copies by tiles, and dK, dV of every query head
            attention += work.tokens * (3 * self.keys + 2 * self.queries)
        elif work.formats.on_cpu:  # one block of scores, their probabilities and their gradient
            attention += 3 * model.num_attention_heads // self.topology.tensor * min(TILE, self.longest) * self.longest
        if moe:
            return max(attention, (2 * self._routed() + 2 * work.tokens) * model.hidden_size)
        inner = work.tokens * self._per_tp_rank(model.intermediate_size)
        return max(attention, 5 * inner // 2 if work.formats.has_native_kernels else 5 * inner)

    def masks(self) -> int:
        """Return an upper bound for the causal masks of the longest document, one per tile length; all layers share
        them."""
        formats = self.work.formats
        if not formats.on_cpu or formats.native_kernels or self.work.dense_mask:
            return 0
        group = self.model.num_attention_heads // self.model.num_key_value_heads
        return group * min(TILE, self.longest) * self.longest

    def _saved_scores(self) -> int:
        """Return the saved attention probabilities, or what is saved to compute them again in backward."""
        heads, tokens = self.model.num_attention_heads // self.topology.tensor, self.work.tokens
        if self.work.dense_mask:
            return heads * tokens * self.work.max_seq_len
        if not self.work.formats.on_cpu:
            return 0
        if self.work.formats.has_native_kernels:
            return heads * tokens  # the logarithms of their sums
        scores = heads * tokens * min(self.longest, (self.longest + TILE) // 2)
        return min(scores, KEPT_SCORES)  # a row of shorter documents has that many

    def _dropped(self, moe: bool) -> int:
        """Return the values saved for dropout before adapters: the input of every linear layer once
        more, and the mask."""
        if self.work.adapters is None or not self.work.adapters.dropout:
            return 0
        model, tokens = self.model, self.work.tokens
        inputs = tokens * (3 * model.hidden_size + self.queries)
        if not moe:
            return 2 * (inputs + tokens * (2 * model.hidden_size + self._per_tp_rank(model.intermediate_size)))
        inputs += self._routed() * (2 * model.hidden_size + model.moe_intermediate_size)
        if shared := self._per_tp_rank(model.architecture.shared_experts_size(model)):
            inputs += tokens * (2 * model.hidden_size + shared)
        return 2 * inputs

    def _routed(self) -> int:
        """Return the number of pairs of a token and one of its experts on a rank."""
        divided = self.topology.expert_axis == "tensor" or self.topology.sequence_parallel
        return self.work.tokens * self.model.moe_k // (self.topology.tensor if divided else 1)

    def _per_tp_rank(self, size: int) -> int:
        return size // self.topology.tensor


def _encoder_values(model: ModelConfig, work: Workload, topology: Topology, pp_stage: int) -> tuple[int, int]:
    """Return the values that an audio encoder and its projector save and use for rows full of placeholders, on the
    first stage."""
    if model.architecture.audio is None or pp_stage > 0:
        return 0, 0
    trained = {part_of(model.architecture, name) for name in trained_shapes(model, work)}
    saved, working = encoder_values(
        model,
        windows_of(model, work.tokens),
        topology,
        trained=trained & {AUDIO, ALIGNER},
        recompute=work.recompute,
        kept_scores=KEPT_SCORES if work.formats.on_cpu and not work.formats.native_kernels else 0,
    )
    return saved * chunks_in_flight(topology, pp_stage, work.accumulation) // topology.virtual_pipeline, working


def _embedding_gradient(model: ModelConfig, work: Workload, topology: Topology, pp_stage: int) -> int:
    """Return the dense gradient of the embedding, before it is accumulated."""
    if work.adapters is not None or LLM in work.frozen or pp_stage > 0:
        return 0
    embedding = model.architecture.file_name(EMBEDDING)
    text = numel_on_rank({embedding: (model.vocab_size, model.hidden_size)}, model.architecture, topology)
    return max(text, code_states(model, work, topology))
