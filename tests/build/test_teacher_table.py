"""How the teacher is asked for its likeliest tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from erniekit.build import teacher_table
from tests.config.test_distillation_acts import distill, tiny_teacher  # noqa: F401 (fixtures)


def test_samples_are_asked_about_in_rows_of_the_run(
    distill: Callable[..., Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: list[int] = []
    make = teacher_table.collate

    def collate(*given: Any, **named: Any) -> Any:
        batch = make(*given, **named)
        lengths.append(batch.shape[1])
        return batch

    monkeypatch.setattr(teacher_table, "collate", collate)
    longest = []
    for max_seq_len in (64, 256):
        lengths.clear()
        distill(teacher_top_k=4, max_seq_len=max_seq_len, max_steps=1)
        longest.append(max(lengths))
    assert 32 < longest[0] <= 64 < 128 < longest[1] <= 256
