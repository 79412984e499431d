"""The one place that makes a model, in a fixed order, with one log line for each technique it applies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import paddle

from erniekit.model.adapters.fingerprint import Exchange, alone
from erniekit.model.adapters.lora import add_adapters, describe_adapters, load_adapters
from erniekit.model.adapters.settings import LoraSettings
from erniekit.model.configuration import ModelConfig
from erniekit.model.decoder import Decoder, StackPart
from erniekit.model.host_memory import keep_freed_memory
from erniekit.model.initialization import initialize_weights
from erniekit.model.moe.balance import BalanceSettings
from erniekit.model.moe.dispatch import NO_RANKS, ExpertRanks
from erniekit.model.quantization.fp8 import Maximum, compute_in_fp8, own_maximum, read_averages
from erniekit.model.quantization.packed import pack_linears
from erniekit.model.quantization.settings import Fp8, Quantization, WeightOnly
from erniekit.model.recompute import Recompute
from erniekit.model.storage.weight_layouts import open_weights
from erniekit.model.tensor_slice import WHOLE, TensorSlice
from erniekit.model.weights import load_weights, named_linears, packed_weights


def build_model(
    model_config: ModelConfig,
    weights: Path | str | None,
    *,
    seed: int = 0,
    reader: int = 0,
    readers: int = 1,
    hidden_dropout: float = 0.0,
    attention_dropout: float = 0.0,
    lora: LoraSettings | None = None,
    adapters: Path | str | None = None,
    balance: BalanceSettings | None = None,
    recompute: Recompute | None = None,
    quantization: Quantization | None = None,
    tensor: TensorSlice = WHOLE,
    experts: ExpertRanks = NO_RANKS,
    part: StackPart | None = None,
    exchange: Exchange = alone,
    maximum: Maximum = own_maximum,
    log: Callable[[str], None] = lambda line: None,
) -> Decoder:
    """Describe the layers, create them, then fill them.

    Args:
        weights: a model folder to load safetensors from, or None for random weights drawn from `seed`.
        reader, readers: this rank among those that read different data, for dropout masks as one process draws them.
        hidden_dropout: probability for the outputs of attention and MLP, before they join the residual stream.
        attention_dropout: probability for attention probabilities.
        lora: freeze the weights and train new adapters of this kind; beside `adapters` only its dropout counts.
        adapters: a folder of adapters to load, PEFT's or paddlenlp's.
        balance: the losses and the bias updates of routers, where the model has experts; None: none of them.
        recompute: which layers keep only their input in training; None: every layer keeps its activations.
        quantization: how linear layers keep their weights or compute their products; None: plainly.
        tensor: the ranks that divide every large matrix, and which of them this is.
        experts: the ranks that divide the experts, where the model has any, and how tokens reach them.
        part: what this stage of a pipeline has of the stack; None: all of it.
        exchange: with all ranks that have a part of the model.
        maximum: of figures, over the same ranks.
        log: receives one line for each technique applied.

    Raises:
        ModelFileError: the weights or adapters are missing, damaged or do not fit `model_config`.
        ConfigurationError: `lora` asks for layers or singular values that the model does not have, or `quantization`
            does not fit its shapes.
    """
    # what does not fit is told before memory is taken for it
    stored = None if weights is None else open_weights(model_config, weights)
    # Beside adapters it would win a tenth of the time at most, and lose a third of the memory they are meant to save.
    if paddle.get_device() == "cpu" and lora is None and adapters is None and keep_freed_memory():
        log("host memory: freed blocks are kept for the next step")
    with paddle.LazyGuard() if isinstance(quantization, WeightOnly) else nullcontext():  # no dense weight ever exists
        decoder = Decoder(
            model_config,
            seed=seed,
            reader=reader,
            readers=readers,
            hidden_dropout=hidden_dropout,
            attention_dropout=attention_dropout,
            balance=balance,
            tensor=tensor,
            experts=experts,
            part=part,
        )
    if isinstance(quantization, WeightOnly):
        pack_linears(named_linears(decoder), quantization)
        for parameter in decoder.parameters():
            parameter.initialize()
    log(f"model: {model_config.model_type}, {model_config.parameter_count():,} parameters")
    if tensor.size > 1:
        sequence = ", and the sequence between them" if tensor.sequence else ""
        log(f"tensor parallel: {tensor.size} slices of every large matrix{sequence}")
    if part is not None:
        log(f"pipeline parallel: {part}")
    if model_config.moe_num_experts and experts.dispatch.group is not None:
        log(f"expert parallel: {experts.dispatch}")
    if stored is None:
        initialize_weights(decoder, seed)
        log(f"weights: random, seed {seed}, standard deviation {model_config.initializer_range}")
    else:
        layout = load_weights(decoder, stored)
        log(f"weights: {weights} ({layout})")
    if isinstance(quantization, WeightOnly):
        log(f"quantisation: {quantization}; {_size_of_packed(decoder)}")
    if isinstance(quantization, Fp8):
        linears = named_linears(decoder)
        decoder.activation_scales = compute_in_fp8(linears, quantization, decoder.randomness, exchange, maximum)
        decoder.activation_scales.restore(read_averages(adapters or weights))
        log(f"FP8: {len(linears)} linear layers, {quantization}")
    if hidden_dropout or attention_dropout:
        log(f"dropout: {hidden_dropout} on hidden states, {attention_dropout} on attention probabilities")
    divided = " on this rank" if tensor.size > 1 or part is not None else ""
    if adapters is not None:
        own_base = load_adapters(decoder, adapters, dropout=lora.dropout if lora else 0.0, exchange=exchange)
        log(f"adapters: {adapters}, {describe_adapters(decoder)}{divided}")
        if not own_base:
            log(f"warning: the adapters in {adapters} were trained beside other weights than these")
    elif lora is not None:
        add_adapters(decoder, lora, seed=seed, exchange=exchange)
        log(f"adapters: new, {describe_adapters(decoder)}{divided}")
    if recompute is not None:
        decoder.recompute = recompute
        count = max(0, model_config.num_hidden_layers - recompute.first_layer)
        log(f"recompute: {count} of {model_config.num_hidden_layers} layers, {recompute}")
    return decoder


def _size_of_packed(decoder: Decoder) -> str:
    packed = packed_weights(decoder).values()
    held, values = sum(weight.nbytes for weight in packed), sum(weight.values for weight in packed)
    return f"{len(packed)} linear weights in {held / 2**20:,.1f} MiB, {8 * held / max(1, values):.2f} bits a value"
