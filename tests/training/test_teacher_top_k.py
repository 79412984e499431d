"""Tables of a teacher's likeliest tokens on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from erniekit.data.templates.ernie import IGNORE_INDEX, Sample
from erniekit.training.objectives.teacher_top_k import (
    TopK,
    TopKTable,
    arrays_folder,
    check_complete,
    finish,
    write_part,
)

WHAT = {"version": 2, "teacher": "a"}


class TwoSamples:
    """A data set of two samples with two targets each."""

    def __len__(self) -> int:
        return 2

    def sample(self, index: int) -> Sample:
        return Sample(np.arange(3), np.array([IGNORE_INDEX, 5, 6]) + 0 * index)


def said(value: int) -> tuple[Any, TopK]:
    return None, TopK(np.full((2, 3), value, np.int32), np.full((2, 3), -value, np.float32))


def test_two_runs_that_write_the_same_table_do_not_disturb_each_other(tmp_path: Path) -> None:
    dataset: Any = TwoSamples()

    def interrupted(after: list[str]) -> Iterator[tuple[Any, TopK]]:
        yield said(1)
        if after:  # the other run begins, and gets half as far
            with suppress(AssertionError):  # it has said nothing of the second sample yet
                write_part(arrays_folder(tmp_path, after[0]), dataset, iter([said(1)]), 0, 1, 3)
        yield said(2)

    write_part(arrays_folder(tmp_path, "one"), dataset, interrupted(["two"]), 0, 1, 3)
    assert not check_complete(tmp_path, WHAT, "teacher_top_k_dir")
    finish(tmp_path, WHAT, 1, "one")
    assert check_complete(tmp_path, WHAT, "teacher_top_k_dir")
    table = TopKTable(tmp_path)
    write_part(arrays_folder(tmp_path, "two"), dataset, interrupted([]), 0, 1, 3)
    finish(tmp_path, WHAT, 1, "two")
    assert [path.name for path in tmp_path.glob("arrays-*")] == ["arrays-one"]
    for reader in (table, TopKTable(tmp_path)):
        found = reader.of_batch(SimpleNamespace(samples=((0,), (1,))))  # type: ignore[arg-type]
        assert found.tokens[:, 0].tolist() == [1, 1, 2, 2] and found.logprobs[:, 0].tolist() == [-1, -1, -2, -2]
