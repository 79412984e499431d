"""Which values of a configuration reach the plans of training and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from erniekit.build.data import evaluates, evaluation_dataset, evaluation_plan
from erniekit.build.model import open_tokenizer
from erniekit.config import Config


@pytest.mark.proves("evaluation_strategy", "do_eval")
@pytest.mark.parametrize(
    ("values", "expected"),
    [({}, True), ({"evaluation_strategy": "no"}, False), ({"do_eval": False}, False)],
)
def test_whether_a_run_evaluates(
    values: dict[str, Any], expected: bool, make_config: Callable[..., Config], records: Any
) -> None:
    asked = {"do_eval": True, "eval_dataset_path": str(records), "evaluation_strategy": "epoch"}
    assert evaluates(make_config(**{**asked, **values})) is expected


@pytest.mark.proves("packing", "greedy_intokens", "buffer_size", "max_seq_len", "per_device_eval_batch_size")
@pytest.mark.parametrize(
    "values",
    [
        {"packing": False},
        {"greedy_intokens": False},
        {"buffer_size": 5},
        {"max_seq_len": 64},
        {"per_device_eval_batch_size": 3},
        {"packing": False, "batch_tokens": 256},
    ],
    ids=str,
)
def test_rows_of_evaluation_are_formed_as_asked(
    values: dict[str, Any], make_config: Callable[..., Config], records: Any
) -> None:
    def batches(**parameters: Any) -> list[Any]:
        config = make_config(do_eval=True, eval_dataset_path=str(records), **parameters)
        plan = evaluation_plan(config, evaluation_dataset(config, *open_tokenizer(config)))
        return [batch.samples for step in range(plan.steps_in_epoch(0)) for batch in plan.micro_batches(step)]

    assert batches(**values) != batches(packing=values.get("packing", True) or "batch_tokens" not in values)
