"""What proofs of the data's parameters share: the batches of a run, read without training on them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.config import Config


@pytest.fixture
def read_epoch(make_config: Callable[..., Config]) -> Callable[..., SimpleNamespace]:
    """Read an epoch as `erniekit train` does: its micro-batches by steps, the lengths of all samples, what is told."""
    from erniekit.build.data import training_dataset, training_plan
    from erniekit.build.model import open_tokenizer

    def read(epoch: int = 0, **values: Any) -> SimpleNamespace:
        config = make_config(**values)
        dataset = training_dataset(config, *open_tokenizer(config))
        plan = training_plan(config, dataset)
        first = sum(plan.steps_in_epoch(number) for number in range(epoch))
        steps = [plan.micro_batches(first + step) for step in range(plan.steps_in_epoch(epoch))]
        rows = [row for step in steps for batch in step for row in batch.samples]
        return SimpleNamespace(
            steps=steps,
            rows=rows,  # the samples of each row
            order=[sample for row in rows for sample in row],
            lengths=dataset.lengths,
            reported=f"{dataset.report}\n{plan.describe(config.training.max_steps, config.training.num_train_epochs)}",
        )

    return read
