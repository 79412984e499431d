"""Running sums of the metrics of training and evaluation. Sums only: memory does not grow with the
number of batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

UNITS = "/units"  # ends the name of the sum by which a metric is divided instead of the units of the loss


@dataclass
class Totals:
    """Sums over some steps or batches; every mean is taken over `units`, never over batches of unequal size."""

    loss_sum: float = 0.0
    units: float = 0.0  # target tokens (pairs for DPO)
    sums: dict[str, float] = field(default_factory=dict)
    tokens: int = 0  # tokens read, without padding
    seconds: float = 0.0
    audio_seconds: float = 0.0  # of recordings that were read

    def add(self, other: Totals) -> None:
        self.loss_sum += other.loss_sum
        self.units += other.units
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.audio_seconds += other.audio_seconds
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    @property
    def loss(self) -> float:
        return self.loss_sum / self.units if self.units else 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """The objective's other metrics: per unit, or per unit of their own where `NAME/units` is among the sums. What
        has units of its own, and none of them, has no mean and is left out."""
        own = {name.removesuffix(UNITS): value for name, value in self.sums.items() if name.endswith(UNITS)}
        units = {name: own.get(name, self.units) for name in self.sums if not name.endswith(UNITS)}
        return {
            name: self.sums[name] / count if count else 0.0 for name, count in units.items() if count or name not in own
        }

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def audio_seconds_per_second(self) -> float:
        return self.audio_seconds / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Totals:
        return cls(**stored)
