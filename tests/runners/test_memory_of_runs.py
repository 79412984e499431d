"""The estimate of `validate` beside the peaks of whole runs, on one process and on ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.memory_estimate import measure


@pytest.mark.exhaustive
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["LoRA, recompute", "tp2 + sp", "pp2", "sharding stage 3 x 2", "experts, ep2 over mp"])
def test_the_estimate_is_near_the_peaks_of_a_run(name: str, tmp_path: Path) -> None:
    _, tensors, process = measure(name, tmp_path)
    assert tensors.estimated == pytest.approx(tensors.measured, rel=0.2)
    assert process.estimated == pytest.approx(process.measured, rel=0.3)
