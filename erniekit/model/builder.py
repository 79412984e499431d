"""The one place that makes a model, in a fixed order, with one log line for each technique it applies."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

import paddle

from erniekit.config.sections.moe import MoeParameters
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.parts import decoder_linears, part_of
from erniekit.model.decoder import Decoder, PipelineStage
from erniekit.model.freed_memory import keep_freed_memory
from erniekit.model.initial_weights import initialize_weights
from erniekit.model.linear import Linear
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.fingerprint import AllGatherObject, single_process_all_gather
from erniekit.model.lora.lora import add_adapters, describe_adapters, load_adapters
from erniekit.model.lora.trainable_tokens import grown_by_adapters
from erniekit.model.moe.dispatch import NO_EXPERT_PARALLEL, ExpertParallel
from erniekit.model.parameter_memory import without_memory
from erniekit.model.quantization.fp8 import AllReduceMax, compute_in_fp8, read_averages, single_process_all_reduce_max
from erniekit.model.quantization.packed import pack_linears
from erniekit.model.quantization.settings import Fp8, Quantization, WeightOnly
from erniekit.model.recompute import Recompute
from erniekit.model.storage.layouts import open_weights
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel
from erniekit.model.weights import load_weights, named_linears, named_weights, packed_weights

logger = logging.getLogger(__name__)


def build_model(
    model_config: ModelConfig,
    weights: Path | str | None,
    *,
    seed: int = 0,
    dp_rank: int = 0,
    dp_world_size: int = 1,
    hidden_dropout: float = 0.0,
    attention_dropout: float = 0.0,
    lora: LoraSettings | None = None,
    adapters: Path | str | None = None,
    balance: MoeParameters | None = None,
    frozen: Collection[str] = (),
    recompute: Recompute | None = None,
    quantization: Quantization | None = None,
    mapped: bool = False,
    tp: TensorParallel = NO_TENSOR_PARALLEL,
    expert_parallel: ExpertParallel = NO_EXPERT_PARALLEL,
    pipeline_stage: PipelineStage | None = None,
    all_gather_object: AllGatherObject = single_process_all_gather,
    all_reduce_max: AllReduceMax = single_process_all_reduce_max,
    log_level: int = logging.DEBUG,
) -> Decoder:
    """Describe the layers, create them, then fill them.

    Args:
        weights: a model folder to load safetensors from, or None for random weights drawn from `seed`.
        dp_rank, dp_world_size: this rank among those that read different data, for dropout masks as one process
        draws them.
        hidden_dropout: probability for the outputs of attention and MLP, before they join the residual stream.
        attention_dropout: probability for attention probabilities.
        lora: freeze the weights and train new adapters of this kind; beside `adapters` only its dropout counts.
        adapters: a folder of adapters to load, PEFT's or paddlenlp's. Rows of new tokens that they have grow the model,
            unless `model_config` says itself how its vocabulary grows; then the two have to agree.
        balance: the losses and the bias updates of routers, where the model has experts; None: none of them.
        frozen: the parts of the model that are not trained (`architectures/parts.py`), beside what adapters freeze.
        recompute: which layers keep only their input in training; None: every layer keeps its activations.
        quantization: how linear layers keep their weights or compute their products; None: plainly.
        mapped: leave weights in their files where that can be (`mapped_weights`), for a model that is not trained.
        tp: the ranks that divide every large matrix, and which of them this is.
        expert_parallel: the ranks that divide the experts, where the model has any, and how tokens reach them.
        pipeline_stage: what this stage of a pipeline has of the stack; None: all of it.
        all_gather_object: with all ranks that have a part of the model.
        all_reduce_max: of figures, over the same ranks.
        log_level: the level of the log lines, one for each technique applied: INFO for the model that a run trains or
            measures, DEBUG for any other.

    Raises:
        ModelFileError: the weights or adapters are missing, damaged or do not fit `model_config`.
        ConfigurationError: `lora` asks for layers or singular values that the model does not have, or `quantization`
            does not fit its shapes.
    """
    model_config = grown_by_adapters(model_config, adapters)
    # what does not fit is told before memory is taken for it
    stored = None if weights is None else open_weights(model_config, weights)
    # Beside adapters it would win a tenth of the time at most, and lose a third of the memory they are meant to save.
    if paddle.get_device() == "cpu" and lora is None and adapters is None and keep_freed_memory():
        logger.debug("host memory: freed blocks are kept for the next step")
    with without_memory():  # weights of few bits are never dense, the others are filled once
        decoder = Decoder(
            model_config,
            seed=seed,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            hidden_dropout=hidden_dropout,
            attention_dropout=attention_dropout,
            balance=balance,
            tp=tp,
            expert_parallel=expert_parallel,
            pipeline_stage=pipeline_stage,
        )
    if isinstance(quantization, WeightOnly):
        pack_linears(_quantized_linears(decoder), quantization, model_config.architecture)
    logger.log(log_level, f"model: {model_config.model_type}, {model_config.parameter_count():,} parameters")
    if model_config.vocabulary is not None:
        logger.log(log_level, f"vocabulary: {model_config.vocabulary}")
    if tp.size > 1:
        sequence_parallel = ", sequence parallel" if tp.sequence_parallel else ""
        logger.log(log_level, f"tensor parallel: degree {tp.size}{sequence_parallel}")
    if pipeline_stage is not None:
        logger.log(log_level, f"pipeline parallel: {pipeline_stage}")
    if model_config.moe_num_experts and expert_parallel.dispatcher.group is not None:
        logger.log(log_level, f"expert parallel: {expert_parallel.dispatcher}")
    if stored is None:
        initialize_weights(decoder, seed)
        logger.log(log_level, f"weights: random, seed {seed}, standard deviation {model_config.initializer_range}")
    else:
        layout = load_weights(decoder, stored, mapped=mapped)
        logger.log(log_level, f"weights: {weights} ({layout})")
        if model_config.wrapped is not None:
            drawn = "score" if model_config.scored else "tables and heads of codes"
            logger.log(log_level, f"{drawn}: random, seed {model_config.wrapped.seed}")
    if isinstance(quantization, WeightOnly):
        logger.log(log_level, f"quantisation: {quantization}; {_size_of_packed(decoder)}")
    if isinstance(quantization, Fp8):
        linears = _quantized_linears(decoder)
        decoder.activation_scales = compute_in_fp8(
            linears, quantization, decoder.randomness, all_gather_object, all_reduce_max
        )
        decoder.activation_scales.restore(read_averages(adapters or weights))
        logger.log(log_level, f"FP8: {len(linears)} linear layers, {quantization}")
    if hidden_dropout or attention_dropout:
        logger.log(
            log_level, f"dropout: {hidden_dropout} on hidden states, {attention_dropout} on attention probabilities"
        )
    for name, parameter in named_weights(decoder).items():
        if part_of(model_config.architecture, name) in frozen:
            parameter.stop_gradient = True
    divided = " on this rank" if tp.size > 1 or pipeline_stage is not None else ""
    if adapters is not None:
        same_base = load_adapters(
            decoder, adapters, dropout=lora.dropout if lora else 0.0, all_gather_object=all_gather_object
        )
        logger.log(log_level, f"adapters: {adapters}, {describe_adapters(decoder)}{divided}")
        if not same_base:
            level = logging.WARNING if log_level >= logging.INFO else log_level
            logger.log(level, f"the adapters in {adapters} were trained on top of other weights than these")
    elif lora is not None:
        add_adapters(decoder, lora, seed=seed, all_gather_object=all_gather_object)
        logger.log(log_level, f"adapters: new, {describe_adapters(decoder)}{divided}")
    if recompute is not None:
        decoder.recompute = recompute
        count = max(0, model_config.num_hidden_layers - recompute.first_layer)
        logger.log(log_level, f"recompute: {count} of {model_config.num_hidden_layers} layers, {recompute}")
    return decoder


def _quantized_linears(decoder: Decoder) -> dict[str, Linear]:
    of_decoder = decoder_linears(decoder.config)
    return {path: linear for path, linear in named_linears(decoder).items() if path in of_decoder}


def _size_of_packed(decoder: Decoder) -> str:
    packed = packed_weights(decoder).values()
    stored_bytes, values = sum(weight.nbytes for weight in packed), sum(weight.values for weight in packed)
    bits = 8 * stored_bytes / max(1, values)
    return f"{len(packed)} linear weights in {stored_bytes / 2**20:,.1f} MiB, {bits:.2f} bits a value"
