"""The dynamic loss scale of float16: gradients are made of `scale x loss`, so that small ones do not vanish.

The smallest number of float16 is 6e-8; most gradients lie below it. A scale of 2^k moves them up by k binary places
(Micikevicius et al., 2018, arXiv:1710.03740). When a gradient overflows, the step is skipped and the scale halved;
after `growth_interval` steps without an overflow it is doubled. Scales are powers of two where the first one is, so
that scaling and its reversal are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SCALE = 2.0**24


@dataclass
class LossScale:
    """The state of the scale; part of every checkpoint.

    Attributes:
        scale: what the loss of the next step is multiplied by.
        finite_steps: without an overflow, since the scale last changed.
        floor: a scale that overflows is not made smaller than this.
        growth_interval: finite steps after which the scale is doubled.
    """

    scale: float = 2.0**15
    finite_steps: int = 0
    floor: float = 1.0
    growth_interval: int = 2000

    def succeed(self) -> None:
        """After a step whose gradients were finite."""
        self.finite_steps += 1
        if self.finite_steps >= self.growth_interval:
            self.scale, self.finite_steps = min(2 * self.scale, max(MAX_SCALE, self.scale)), 0

    def back_off(self) -> bool:
        """After a step whose gradients overflowed; whether there is a smaller scale to go on with."""
        if self.scale <= self.floor:
            return False
        self.scale, self.finite_steps = max(self.scale / 2, self.floor), 0
        return True
