"""Running sums of metrics: each mean over its own units."""

from __future__ import annotations

from erniekit.training.metrics import Totals


def test_a_metric_may_have_units_of_its_own() -> None:
    totals = Totals()
    totals.add(Totals(6.0, 4.0, {"correct": 1.0, "level": 9.0, "level/units": 2.0, "idle": 0.0, "idle/units": 0.0}))
    totals.add(Totals(2.0, 4.0, {"correct": 1.0, "level": 3.0, "level/units": 1.0, "idle": 0.0, "idle/units": 0.0}))
    assert totals.loss == 1.0
    assert totals.metrics == {"correct": 0.25, "level": 4.0}  # what has no units of its own is over the loss's
    assert Totals.from_json(totals.to_json()).metrics == totals.metrics


def test_nothing_read_has_means_of_0() -> None:
    assert Totals(sums={"correct": 0.0}).metrics == {"correct": 0.0} and Totals().loss == 0.0
