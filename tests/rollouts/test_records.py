"""`rollouts.jsonl` of a run that goes on: which lines stay, and what is told of a file that cannot be gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from erniekit.errors import TrainingError
from erniekit.rollouts import records
from erniekit.rollouts.records import RolloutRecords


@pytest.fixture
def written(tmp_path: Path) -> RolloutRecords:
    """The answers of three rollouts, two each; the last line was cut by a kill."""
    found = RolloutRecords(tmp_path, writes=True)
    found.write({"rollout": number // 2, "answer": "a\u2028é"} for number in range(6))
    with found.path.open("a") as file:
        file.write('{"rollout": 2, "ans')
    return found


def kept(found: RolloutRecords) -> list[int]:
    return [json.loads(line)["rollout"] for line in found.path.read_bytes().splitlines()]


def test_a_run_that_goes_on_keeps_what_its_checkpoint_knows(written: RolloutRecords) -> None:
    written.keep(2)
    assert kept(written) == [0, 0, 1, 1]
    RolloutRecords(written.path.parent, writes=False).keep(0)
    assert kept(written) == [0, 0, 1, 1]
    written.keep(0)
    assert not written.path.exists()
    written.keep(5)


@pytest.mark.parametrize("line", ['{"rollout"\n', '{"answer": 1}\n', "[]\n", '{"rollout": "x"}\n'])
def test_a_damaged_line_is_told(written: RolloutRecords, line: str) -> None:
    before = written.path.read_text(encoding="utf-8")
    written.path.write_text(line + before, encoding="utf-8")
    with pytest.raises(TrainingError, match=r"rollouts.jsonl:1: is no answer of a rollout\n  Mend the line, or move"):
        written.keep(2)
    assert written.path.read_text(encoding="utf-8") == line + before


def test_a_full_disk_is_told_and_nothing_is_lost(written: RolloutRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    before = written.path.read_bytes()
    monkeypatch.setattr(records, "atomic_write_bytes", full)
    with pytest.raises(TrainingError, match=r"goes on: No space left on device\n  Free some space"):
        written.keep(1)
    assert written.path.read_bytes() == before
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(TrainingError, match="cannot be written: No space left on device; free some space"):
        written.write([{"rollout": 3}])
