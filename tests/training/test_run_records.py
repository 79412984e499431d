"""What a run has written down is read again, also while it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.errors import DataError
from erniekit.training.run_records import RunRecords, read_run

TRAINED = [
    {"step": 2, "epoch": 0.1, "loss": 3.0, "tokens": 7200, "tokens_per_second": 2.0},
    {"step": 4, "epoch": 0.2, "loss": 2.0, "tokens": 21600, "tokens_per_second": 4.0, "grad_norm": None},
]
EVALUATED = {"step": 4, "epoch": 0.2, "eval_loss": 2.5, "eval_sources": {"a": {"eval_loss": 2.5}}}


def written(folder: Path, records: list, rest: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "training_log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + rest)
    return folder


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    run = read_run(written(tmp_path / "sft", [*TRAINED, EVALUATED], '{"step": 6, "lo'))
    assert run == RunRecords(tmp_path / "sft" / "training_log.jsonl", "sft", TRAINED, [EVALUATED])
    assert run.points("loss") == ([(2.0, 3.0), (4.0, 2.0)], [(4.0, 2.5)])
    assert run.points("loss", "tokens") == ([(7200.0, 3.0), (21600.0, 2.0)], [(21600.0, 2.5)])
    assert run.points("loss", "hours") == ([(1.0, 3.0), (2.0, 2.0)], [(2.0, 2.5)])
    assert run.points("grad_norm") == ([], []) and run.points("nothing") == ([], [])
    assert run.figures == ["loss", "tokens", "tokens_per_second", "grad_norm", "sources"]
    assert read_run(run.path) == run


def test_steps_that_were_repeated_after_a_resume_count_once(tmp_path: Path) -> None:
    again = [{"step": 2, "loss": 2.9}, {"step": 3, "loss": 2.8}]
    run = read_run(written(tmp_path, [*TRAINED, EVALUATED, *again]))
    assert run.trained == again and not run.evaluated
    assert len(read_run(written(tmp_path, [*TRAINED, EVALUATED, EVALUATED | {"eval_loss": 1.0}])).evaluated) == 1


def test_an_older_log_has_steps_only(tmp_path: Path) -> None:
    run = read_run(written(tmp_path, [{"step": 1, "loss": 2.0}]))
    with pytest.raises(DataError, match="do not count tokens, so --x hours is not known; --x steps is"):
        run.points("loss", "hours")


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"loss": 1}', '{"step": "x"}', '{"step": 1, "loss": "x"}', '{"step": 1.5}']
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(DataError, match=r"training_log.jsonl:2: expected a record of a run"):
        read_run(written(tmp_path, TRAINED[:1], line + "\n"))


def test_folders_without_records_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist; give the output_dir"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is not the output_dir of a run"):
        read_run(tmp_path)
    (written(tmp_path, []) / "checkpoint-4").mkdir()
    with pytest.raises(DataError, match="there are no records yet"):
        read_run(tmp_path)
    with pytest.raises(DataError, match="the folder above it has one"):
        read_run(tmp_path / "checkpoint-4")
    (tmp_path / "training_log.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(DataError, match="this is no text"):
        read_run(tmp_path)
