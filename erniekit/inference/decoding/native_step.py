"""One step of decoding in one call of our C library (`native/source/decode.c`), for plain decoders on a CPU.

It reads the decoder's own weights where they lie. Norms with an offset or a scale, and what DoRA multiplies columns
with, are computed once. `refusal` says which decoders it does not compute; `decoder_step.py` computes all of them.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import paddle

from erniekit.inference.decoding.step import BLOCK_TOKENS, StepBatch
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.plain_decoder import plain_modules
from erniekit.model.bf16 import float32_products
from erniekit.model.decoder import Decoder, Embedding, Head
from erniekit.model.decoder_layer import DecoderLayer
from erniekit.model.linear import Linear
from erniekit.model.lora.lora import LowRankAdapter
from erniekit.model.mapped_weights import MappedWeight
from erniekit.model.mlp import ACTIVATION_KINDS, MLP
from erniekit.model.norm import RMSNorm
from erniekit.model.quantization.packed import PackedWeight
from erniekit.native import library
from erniekit.native.linear import BYTES, INPUTS_FIRST, NIBBLES, OUTPUTS_FIRST, LinearWeight, fields
from erniekit.native.mkl import sgemm_address

MAX_HEAD = 512  # channels of a head (`decode.h`)
SLAB_BYTES = 16 << 20  # blocks are allocated together, about so many bytes of them


class _Layer(ctypes.Structure):
    _fields_ = fields(
        norms=(ctypes.c_void_p, "attention_input_norm attention_output_norm mlp_input_norm mlp_output_norm"),
        of_heads=(ctypes.c_void_p, "query_norm key_norm"),
        linears=(LinearWeight, "query key value output gate up down"),
        attention=(ctypes.c_int64, "window rope"),
    )


class _Decoder(ctypes.Structure):
    _fields_ = fields(
        sizes=(ctypes.c_int64, "hidden heads key_heads head_dim inner vocabulary layer_count rope_count"),
        kinds=(ctypes.c_int64, "norm_whole interleaved activation embedding_form"),
        scales=(ctypes.c_float, "epsilon embedding_scale residual_scale attention_scale"),
        weights=(ctypes.c_void_p, "embedding norm frequencies magnitudes layers"),
        head=(LinearWeight, "head"),
        mkl=(ctypes.c_void_p, "sgemm"),
    )


class _Batch(ctypes.Structure):
    _fields_ = fields(
        sizes=(ctypes.c_int64, "tokens sequences wanted_count longest_table"),
        arrays=(ctypes.c_void_p, "token_ids positions embedded starts cached block_tables wanted blocks"),
    )


def refusal(decoder: Any) -> str | None:
    """Return why `NativeStep` does not compute a decoder; None: it does."""
    if not isinstance(decoder, Decoder):
        return "it is no decoder of one process"
    config, architecture = decoder.config, decoder.config.architecture
    if paddle.get_device() != "cpu" or library.function("decode_step", "pplpp") is None:
        return "no native kernels compute here"
    if decoder.tp.size > 1 or len(decoder.layers) < config.num_hidden_layers or not decoder.pipeline_stage.last:
        return "ranks divide the model"
    if architecture.codes is not None:
        return "it writes codes"
    if architecture.modules() != plain_modules() or architecture.attention_sinks:
        return f"{config.model_type} has layers of its own"
    if any(not isinstance(layer.mlp, MLP) for layer in decoder.layers):
        return "it has layers of experts"
    if architecture.activation not in ACTIVATION_KINDS:
        return f"no kernel computes its gate, {architecture.activation}"
    if config.head_dim > MAX_HEAD or config.head_dim % 2:
        return f"its heads have {config.head_dim} channels"
    if any(owner.vocabulary.place(owner) is not None for owner in (decoder.embedding, decoder.head.owner)):
        return "rows of new tokens stand beside its weights"
    if any(layer._forward_pre_hooks for layer in decoder.sublayers()):  # such as those that gather parameters (ZeRO 3)
        return "a layer's weights are there only while it computes"
    for name, parameter in decoder.named_parameters():
        if parameter.dtype != paddle.float32 or not parameter.is_contiguous():
            return f"{name} is not contiguous float32"
    for layer in decoder.layers:
        for linear in layer.sublayers():
            if isinstance(linear, Linear) and not (
                isinstance(linear.product, PackedWeight | MappedWeight | None)
                and isinstance(linear.adapter, LowRankAdapter | None)
            ):
                return "linear layers have products or adapters of another kind"
    return None


def block_bytes(config: ModelConfig) -> int:
    """Return the memory of one key-value block."""
    channels = -(-config.head_dim // BLOCK_TOKENS) * BLOCK_TOKENS
    return config.num_hidden_layers * 2 * config.num_key_value_heads * channels * BLOCK_TOKENS * 4


class NativeStep:
    """Computes steps with the weights of a decoder, dropout off.

    It reads where the weights lie once: one that is put in another place, such as by merging adapters, needs a new
    step, and so does a change of what is computed once. What training writes into the others acts.
    """

    def __init__(self, decoder: Decoder, use: Callable[[str], None] = lambda name: None) -> None:
        """`refusal` of the decoder must be None.

        Args:
            use: lets the decoder have a set of adapters (`StepBatch.adapters`), which is described when it comes first.
        """
        self._decoder = decoder
        self._kept: list[Any] = []  # whatever C has the address of
        self._run = library.function("decode_step", "pplpp")
        self._memory_of = library.function("decode_memory", "plpp")
        self._use = use
        self._models: dict[str, _Decoder] = {}
        self._model = self._described("")
        self._slabs: list[np.ndarray] = []
        self._blocks = np.zeros(0, np.uint64)  # the address of each
        self._memory = np.zeros(0, np.float32)

    @paddle.no_grad()
    def logits(self, batch: StepBatch) -> np.ndarray:
        """See `Step`.

        Raises:
            ValueError: a token is not in the vocabulary, or a place is in no block.
        """
        tokens, wanted = len(batch.token_ids), len(batch.wanted)
        self._model = self._described(batch.adapters)
        self._check(batch)
        arrays: dict[str, np.ndarray] = {
            "token_ids": np.ascontiguousarray(batch.token_ids, np.int64),
            "positions": np.ascontiguousarray(batch.positions, np.int64),
            "starts": np.ascontiguousarray(batch.starts, np.int32),
            "cached": np.ascontiguousarray(batch.cached, np.int32),
            "block_tables": np.ascontiguousarray(batch.block_tables, np.int32),
            "wanted": np.ascontiguousarray(batch.wanted, np.int64),
            "blocks": self._blocks,
        }
        if batch.inputs:
            arrays["embedded"] = self._embed(batch)
        described = _Batch(tokens, len(batch.cached), wanted, arrays["block_tables"].shape[1])
        for name, array in arrays.items():
            setattr(described, name, array.ctypes.data)
        threads, size = ctypes.c_int64(), ctypes.c_int64()
        self._memory_of(_address(self._model), tokens, _address(threads), _address(size))
        if len(self._memory) < size.value:
            self._memory = np.empty(size.value, np.float32)
        logits = np.empty((wanted, self._model.vocabulary), np.float32)
        self._run(
            _address(self._model), _address(described), threads.value, self._memory.ctypes.data, logits.ctypes.data
        )
        return logits

    def _described(self, adapters: str) -> _Decoder:
        if adapters not in self._models:
            self._use(adapters)
            self._models[adapters] = self._describe(self._decoder)
        return self._models[adapters]

    def _check(self, batch: StepBatch) -> None:
        """Raise ValueError for what C would read or write outside of its arrays; allocate the blocks that are new."""
        ids, counts = np.asarray(batch.token_ids), np.diff(batch.starts)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._model.vocabulary:
            size = self._model.vocabulary
            raise ValueError(f"token ids from {ids.min()} to {ids.max()}, and the vocabulary has {size:,}")
        in_order = len(batch.starts) and batch.starts[0] == 0 and batch.starts[-1] == len(ids) and (counts > 0).all()
        if not in_order or len(batch.positions) != len(ids) or len(batch.wanted) > len(ids):
            raise ValueError("starts, positions or wanted do not fit the tokens")
        if len(batch.wanted) and not 0 <= min(batch.wanted) <= max(batch.wanted) < len(ids):
            raise ValueError("a token is wanted that is not in the batch")
        needed = -(-(batch.cached + counts) // BLOCK_TOKENS)
        if ((batch.block_tables >= 0).sum(axis=1) < needed).any():
            raise ValueError("a sequence has fewer blocks than tokens")
        self._allocate(int(batch.block_tables.max()) + 1)

    def _allocate(self, count: int) -> None:
        """Have memory for the blocks below `count`; what is new is zero, so that padding of heads is.

        Slabs are mapped, so that they take what is used of them, and are given back when the step goes: those of NumPy
        come from the heap once one of their size has been freed, and then take all of their memory for good.
        """
        size = block_bytes(self._decoder.config)
        while len(self._blocks) < count:
            number = max(1, SLAB_BYTES // size)
            mapped = mmap.mmap(-1, number * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(AttributeError, OSError):  # of a system without huge pages, which only make reading faster
                mapped.madvise(mmap.MADV_HUGEPAGE)
            slab = np.frombuffer(mapped, np.float32).reshape(number, size // 4)
            self._slabs.append(slab)
            own = slab.ctypes.data + size * np.arange(len(slab), dtype=np.uint64)
            self._blocks = np.concatenate([self._blocks, own.astype(np.uint64)])

    def _embed(self, batch: StepBatch) -> np.ndarray:
        """Return the hidden states [T, H] that enter the first layer, with those of encoders."""
        assert len(batch.cached) == 1, "further arrays come with one sequence"
        training = self._decoder.training
        self._use(batch.adapters)
        arrays: Mapping[str, np.ndarray] = {"input_ids": batch.token_ids[None], **batch.inputs}
        self._decoder.eval()
        try:
            with float32_products():
                states = self._decoder.embed({name: paddle.to_tensor(array) for name, array in arrays.items()})
        finally:
            if training:
                self._decoder.train()
        return np.ascontiguousarray(states[0].numpy(), np.float32)

    # Where everything lies.

    def _describe(self, decoder: Decoder) -> _Decoder:
        config, architecture = decoder.config, decoder.config.architecture
        multipliers = architecture.multipliers(config)
        attention = config.head_dim**-0.5 if multipliers.attention is None else multipliers.attention
        layers = (_Layer * len(decoder.layers))(*map(self._layer, decoder.layers))
        self._kept.append(layers)
        tables, embedding = decoder.rope_tables, self._rows(decoder.embedding)
        return _Decoder(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            vocabulary=config.vocab_size,
            layer_count=len(layers),
            rope_count=len(tables),
            norm_whole=architecture.qk_norm == "projection",
            interleaved=architecture.rotary_interleaved,
            activation=ACTIVATION_KINDS[architecture.activation],
            epsilon=config.rms_norm_eps,
            embedding_scale=multipliers.embedding,
            residual_scale=multipliers.residual,
            attention_scale=attention,
            embedding=embedding.weight,
            embedding_form=embedding.form,
            norm=self._norm(decoder.norm),
            frequencies=self._keep(np.array([table.per_pair for table in tables], np.float32)),
            magnitudes=self._keep(np.array([table.magnitude for table in tables], np.float32)),
            layers=ctypes.addressof(layers),
            head=self._rows(decoder.head.owner),
            sgemm=sgemm_address(),
        )

    def _layer(self, layer: DecoderLayer) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        gate, up = (mlp.gate_up_proj, None) if mlp.fused else (mlp.gate_proj, mlp.up_proj)
        normalises = attention.normalises is not None
        return _Layer(
            attention_input_norm=self._norm(layer.input_layernorm),
            attention_output_norm=self._norm(layer.attention_output_norm),
            mlp_input_norm=self._norm(layer.post_attention_layernorm),
            mlp_output_norm=self._norm(layer.mlp_output_norm),
            query_norm=self._norm(attention.q_norm) if normalises else None,
            key_norm=self._norm(attention.k_norm) if normalises else None,
            query=self._linear(attention.q_proj),
            key=self._linear(attention.k_proj),
            value=self._linear(attention.v_proj),
            output=self._linear(attention.o_proj),
            gate=self._linear(gate),
            up=LinearWeight() if up is None else self._linear(up),
            down=self._linear(mlp.down_proj),
            window=attention.window or 0,
            rope=-1 if attention.rope is None else attention.rope,
        )

    def _linear(self, linear: Linear) -> LinearWeight:
        if isinstance(linear.product, PackedWeight):
            described = self._packed(linear.product)
        elif isinstance(linear.product, MappedWeight):
            described = self._mapped(linear.product)
        else:
            inputs, outputs = linear.weight.shape
            described = LinearWeight(INPUTS_FIRST, inputs, outputs, self._keep(linear.weight))
        if linear.bias is not None:
            described.bias = self._keep(linear.bias)
        if isinstance(linear.adapter, LowRankAdapter):
            adapter = linear.adapter
            described.lora_a, described.lora_b = self._keep(adapter.lora_A), self._keep(adapter.lora_B)
            described.rank, described.lora_scale = adapter.lora_A.shape[1], adapter.scaling
            if adapter.lora_magnitude_vector is not None:
                norms = adapter.column_norms(linear.dense_weight)
                described.column_scale = self._keep((adapter.lora_magnitude_vector / norms).numpy())
        return described

    def _rows(self, owner: Embedding | Head) -> LinearWeight:
        """Describe a weight with a row for each token."""
        if owner.mapped is not None:
            return self._mapped(owner.mapped)
        outputs, inputs = owner.weight.shape
        return LinearWeight(OUTPUTS_FIRST, inputs, outputs, self._keep(owner.weight))

    def _mapped(self, mapped: MappedWeight) -> LinearWeight:
        self._kept.append(mapped.weight)
        return mapped.described()

    def _packed(self, packed: PackedWeight) -> LinearWeight:
        form, outputs = packed.form, packed.codes.shape[0]
        inputs = packed.codes.shape[1] * 8 // form.bits
        described = LinearWeight(NIBBLES if form.levels else BYTES, inputs, outputs, self._keep(packed.codes))
        described.scales, described.group = self._keep(packed.scales), inputs // packed.scales.shape[1]
        if form.levels:
            described.levels = self._keep(np.array(form.levels, np.float32))
        return described

    def _norm(self, norm: RMSNorm | None) -> int | None:
        if norm is None:
            return None
        if norm.offset == 0.0 and norm.scale == 1.0:
            return self._keep(norm.weight)
        return self._keep(((norm.weight + norm.offset) * norm.scale).numpy())

    def _keep(self, values: paddle.Tensor | np.ndarray) -> int:
        """Return the address of values that stay as long as this step does."""
        self._kept.append(values)
        return values.ctypes.data if isinstance(values, np.ndarray) else values.data_ptr()


def _address(structure: Any) -> int:
    return ctypes.addressof(structure)
