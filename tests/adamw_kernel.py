"""What AdamW's GPU kernel does with a weight in 16 bits, on a CPU, whose kernel knows float32 only."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.optimizer.adamw as paddles

MASTER, HAS_MASTER = 6, 16  # places of the kernel's arguments, after a weight and its gradient


def update_16_bit_weights() -> None:
    """From now on Paddle's AdamW updates the float32 copy of such a weight, and the weight becomes that, rounded."""
    kernels = paddles._C_ops

    class Kernels:
        def __getattr__(self, name: str) -> Any:
            return getattr(kernels, name)

        @staticmethod
        def adamw_(parameter: Any, gradient: Any, *others: Any) -> Any:
            master = others[MASTER]
            if master is None:
                return kernels.adamw_(parameter, gradient, *others)
            plain = list(others)
            plain[MASTER], plain[HAS_MASTER] = None, False
            result = kernels.adamw_(master, gradient.astype("float32"), *plain)
            paddle.assign(master.astype(parameter.dtype), parameter)
            return result

    paddles._C_ops = Kernels()
