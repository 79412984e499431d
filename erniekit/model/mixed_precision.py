"""Computing in 16 bits through Paddle's AMP, on a GPU. A CPU has no such arithmetic in Paddle: float32 runs there.

What gains from 16 bits is between embedding and head: the products of the decoder layers, and attention. Norms, rotary
angles, routers, the head and the loss stay in float32 at both levels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import paddle

from erniekit.errors import ConfigurationError
from erniekit.model.decoder import Decoder, Embedding
from erniekit.model.head import Head
from erniekit.model.moe.router import Gate, GateStatistics
from erniekit.model.norm import RMSNorm
from erniekit.model.quantization.packed import PackedWeight

KEEP_IN_FLOAT32 = [
    Embedding,
    Head,
    RMSNorm,
    Gate,
    GateStatistics,
    PackedWeight,
]  # at every level; of the last, its scales


@dataclass(frozen=True)
class MixedPrecision:
    """How a GPU computes; see `docs/parameters/precision.md`.

    Attributes:
        level: "O1": weights in float32, operators cast what they are given; "O2": weights in 16 bits, of which the
            optimizer has float32 copies.
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
        """Make the decoder compute so in training and evaluation; before it has an optimizer.

        Raises:
            ConfigurationError: the device has no arithmetic in this type.
        """
        check_device(self.dtype)
        modules = decoder.config.architecture.modules()
        outer = (modules.embedding, modules.norm, modules.head, RMSNorm)  # of multi-token prediction
        if self.level == "O2":
            paddle.amp.decorate(
                decoder,
                level="O2",
                dtype=self.dtype,
                master_grad=self.master_grad,
                excluded_layers=[*dict.fromkeys((*KEEP_IN_FLOAT32, *outer))],
            )
        for _, block in decoder.named_blocks():
            if not isinstance(block, outer):
                block.forward = self._with_autocast(block.forward)
        for layer in decoder.sublayers():
            if isinstance(layer, Gate):
                layer.forward = _without_autocast(layer.forward)  # type: ignore[method-assign]

    def context(self) -> AbstractContextManager[Any]:
        """Inside, Paddle casts the operands of operators."""
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


def check_device(dtype: str) -> None:
    """Raise ConfigurationError where the current device cannot compute in this type."""
    supported = paddle.amp.is_bfloat16_supported if dtype == "bfloat16" else paddle.amp.is_float16_supported
    if not paddle.get_device().startswith("gpu") or not supported():
        name, other = ("bf16", "fp16: true, or ") if dtype == "bfloat16" else ("fp16", "")
        raise ConfigurationError(
            f"{name}: true: {paddle.get_device()} does not compute in {dtype}.\n  Write {other}{name}: false."
        )


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with operands as they are, of floating point in float32."""

    @functools.wraps(function)
    def wrapped(x: paddle.Tensor, *arguments: Any) -> Any:
        with paddle.amp.auto_cast(enable=False):
            return function(x.astype("float32"), *arguments)

    return wrapped
