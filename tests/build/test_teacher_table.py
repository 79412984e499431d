"""How the teacher is asked for its likeliest tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.build import teacher_table
from erniekit.errors import ConfigurationError
from erniekit.training.objectives import teacher_top_k
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


def test_a_disk_that_is_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(teacher_top_k, "open", full, raising=False)
    with pytest.raises(
        ConfigurationError, match=r"table cannot be written: No space left on device\n  Free some space"
    ):
        teacher_top_k.write_part(tmp_path / "table", [], [], 0, 1, 4)  # type: ignore[arg-type]
    assert not (tmp_path / "table" / "top_k.json").exists()


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"teacher_top_k_dir: .*file is a file"):
        teacher_top_k.check_complete(tmp_path / "file" / "training", {}, "teacher_top_k_dir")


def test_a_damaged_table_is_told(tmp_path: Path) -> None:
    arrays = teacher_top_k.arrays_folder(tmp_path, "run")
    teacher_top_k.write_part(arrays, [], [], 0, 1, 4)  # type: ignore[arg-type]
    teacher_top_k.finish(tmp_path, {}, 1, "run")
    assert teacher_top_k.TopKTable(tmp_path)._tokens[0].shape == (0, 4)
    whole = (arrays / "tokens-0.npy").read_bytes()
    for content in (whole[:100], b""):
        (arrays / "tokens-0.npy").write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"is damaged: .*\n  Remove the folder, and it is written anew"):
            teacher_top_k.TopKTable(tmp_path)
    (arrays / "tokens-0.npy").unlink()
    with pytest.raises(ConfigurationError, match=r"is damaged: .*No such file"):
        teacher_top_k.TopKTable(tmp_path)
