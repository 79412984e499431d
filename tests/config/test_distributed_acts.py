"""Proofs of section 1.4 that no test of ranks gives: what a rank of two holds and sends with each parameter.

Pipelines, sharding, experts, timeouts and restarts are proved where ranks train for them anyway (tests/runners).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.config import Config
from tests.distributed.cases import communication_runs
from tests.distributed.ranks import run_ranks

RUNS: dict[str, dict[str, Any]] = {
    "alone": {"tensor_parallel_degree": 1},
    "whole sequence": {"sequence_parallel": False},
    "whole sequence, whole logits": {"sequence_parallel": False, "tensor_parallel_output": False},
    "whole sequence, equal copies": {"sequence_parallel": False, "tensor_parallel_config": "sync_param sync_grad"},
    "divided sequence": {},
    "divided sequence, one sum": {"use_sp_callback": True},
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.proves(
    "tensor_parallel_degree", "tensor_parallel_config", "tensor_parallel_output", "sequence_parallel", "use_sp_callback"
)
def test_what_two_slices_hold_and_send(make_config: Callable[..., Config], tmp_path: Path) -> None:
    parameters = {
        name: make_config(**{
            "tensor_parallel_degree": 2, "gradient_accumulation_steps": 2, "max_steps": 2, **values,
            "output_dir": str(tmp_path / name),
        }).resolved()
        for name, values in RUNS.items()
    }  # fmt: skip
    (alone,) = run_ranks(communication_runs.train, 1, parameters=[parameters.pop("alone")])[0]
    ranks = run_ranks(communication_runs.train, 2, parameters=list(parameters.values()))
    for reported in ranks:
        runs = dict(zip(parameters, reported, strict=True))
        for name, run in runs.items():
            np.testing.assert_allclose(run["losses"], alone["losses"], atol=1e-5, err_msg=name)
            assert run["held"] < 0.6 * alone["held"]  # all matrices are cut, norms are not
        whole, divided = runs["whole sequence"], runs["divided sequence"]
        assert whole["entered"] == alone["entered"] and divided["entered"] == alone["entered"] // 2
        assert runs["whole sequence, whole logits"]["sent"] > whole["sent"]
        assert runs["divided sequence, one sum"]["sent"] < divided["sent"]
    sent = [runs["sent"] for runs in (ranks[0][0], ranks[0][2])]  # the first rank sends its copies to the other
    assert sent[1] > sent[0]
