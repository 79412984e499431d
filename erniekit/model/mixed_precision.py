"""Train in 16 bits through Paddle's AMP, on a GPU; bfloat16 on a CPU, where Paddle has no 16-bit arithmetic:
`cpu_precision.py`.

Only the layers between embedding and head gain from 16 bits: the products of the decoder layers, and attention. Norms,
rotary angles, routers, the head and the loss stay in float32 at both levels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import paddle
from paddle import nn

from erniekit.errors import ConfigurationError
from erniekit.model.code_layers import CodeTable, CodeTables, JoinedHeads, LevelHead
from erniekit.model.decoder import Decoder, Embedding
from erniekit.model.encoders.whisper_encoder import Positions
from erniekit.model.head import Head
from erniekit.model.moe.router import Gate, GateStatistics
from erniekit.model.norm import RMSNorm
from erniekit.model.quantization.packed import PackedWeight

KEEP_IN_FLOAT32 = [
    Embedding,
    Head,
    CodeTable,
    JoinedHeads,
    LevelHead,
    RMSNorm,
    nn.LayerNorm,
    Positions,
    Gate,
    GateStatistics,
    PackedWeight,
]  # at every level; of PackedWeight, its scales


@dataclass(frozen=True)
class MixedPrecision:
    """Mixed precision on a GPU; see `docs/parameters/precision.md`.

    Attributes:
        level: "O1": weights in float32, operators cast their inputs; "O2": weights in 16 bits, of which the
            optimizer has float32 master copies.
        white_list, black_list: further operators that compute in 16 bits, or in float32.
        master_grad: gradients of 16-bit weights in float32.
    """

    dtype: Literal["bfloat16", "float16"]
    level: Literal["O1", "O2"] = "O1"
    white_list: tuple[str, ...] = ()
    black_list: tuple[str, ...] = ()
    master_grad: bool = False

    def __str__(self) -> str:
        weights = self.dtype if self.level == "O2" else "float32"
        gradients = ", float32 gradients" if self.master_grad else ""
        return f"{self.dtype}, level {self.level}: weights in {weights}{gradients}; norms, head and loss in float32"

    def apply_to(self, decoder: Decoder) -> None:
        """Make the decoder use this precision in training and evaluation. Call it before creating the optimizer.

        Raises:
            ConfigurationError: the device does not support this dtype.
        """
        check_device(self.dtype)
        modules = decoder.config.architecture.modules()
        outer = (
            modules.embedding,
            modules.norm,
            modules.head,
            CodeTable,
            CodeTables,
            RMSNorm,
        )  # of multi-token prediction
        if self.level == "O2":
            paddle.amp.decorate(
                decoder,
                level="O2",
                dtype=self.dtype,
                master_grad=self.master_grad,
                excluded_layers=list(float32_layers(decoder)),
            )
        for _, block in decoder.named_blocks():
            if not isinstance(block, outer):
                block.forward = self._with_autocast(block.forward)
        for layer in decoder.sublayers():
            if isinstance(layer, Gate):
                layer.forward = _without_autocast(layer.forward)  # type: ignore[method-assign]

    def context(self) -> AbstractContextManager[Any]:
        """Return the context in which Paddle casts the inputs of operators."""
        return paddle.amp.auto_cast(
            custom_white_list=list(self.white_list),
            custom_black_list=list(self.black_list),
            level=self.level,
            dtype=self.dtype,
        )

    def _with_autocast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            with self.context():
                return function(*arguments, **named)

        return wrapped


def float32_layers(decoder: Decoder) -> tuple[type[nn.Layer], ...]:
    """Return the layers of a decoder whose weights are float32 at every level."""
    modules = decoder.config.architecture.modules()
    return tuple(dict.fromkeys((*KEEP_IN_FLOAT32, modules.embedding, modules.norm, modules.head)))


def check_device(dtype: str) -> None:
    """Raise ConfigurationError if the current device cannot compute in this dtype."""
    supported = paddle.amp.is_bfloat16_supported if dtype == "bfloat16" else paddle.amp.is_float16_supported
    if not paddle.get_device().startswith("gpu") or not supported():
        name, other = ("bf16", "fp16: true, or ") if dtype == "bfloat16" else ("fp16", "")
        raise ConfigurationError(
            f"{name}: true: {paddle.get_device()} does not compute in {dtype}.\n  Set {other}{name}: false."
        )


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` to run without autocast, with its first argument in float32."""

    @functools.wraps(function)
    def wrapped(x: paddle.Tensor, *arguments: Any) -> Any:
        with paddle.amp.auto_cast(enable=False):
            return function(x.astype("float32"), *arguments)

    return wrapped
