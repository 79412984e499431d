"""Whole runs whose data and output are in an object store: killed, gone on elsewhere, and the same in the end."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.cli import main
from erniekit.hub.object_store import open_folder
from erniekit.manifest import problems
from erniekit.training.checkpoint.stored import is_stored, stored_checkpoints
from tests.distributed.warm_processes import start

ROOT = Path(__file__).parents[2]


def training(store: Path, **values: object) -> list[str]:
    settings = {
        "output_dir": f"file://{store}/runs/sft",
        "train_dataset_path": f"file://{store}/data/train.jsonl",
        "max_steps": 60,  # long enough for a kill after the first upload
        "max_seq_len": 96,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "hidden_dropout_prob": 0.1,
        "do_eval": "false",
        "logging_steps": 1,
        "save_steps": 4,
        "save_total_limit": 2,
        "warmup_steps": 2,
        "report_to": "none",
        "overwrite_output_dir": "false",
        **values,
    }
    overrides = [f"{name}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "erniekit", "train", "examples/configs/quickstart/sft.yaml", *overrides]


def run(words: list[str], cache: Path, kill_after: str = "") -> tuple[int, list[str]]:
    """Run a command with a cache of its own, as on a machine of its own; kill it after a line with such a text."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ERNIEKIT_CACHE": str(cache)}
    process = start(
        words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    for line in io.TextIOWrapper(process.stdout, encoding="utf-8"):
        lines.append(line.rstrip("\n"))
        if kill_after and kill_after in line:
            process.kill()
    return process.wait(), lines


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A folder that stands for a bucket, with data."""
    data = tmp_path / "bucket/data/train.jsonl"
    data.parent.mkdir(parents=True)
    data.write_bytes((ROOT / "examples/data/sft-eval.jsonl").read_bytes())
    return tmp_path / "bucket"


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "training_log.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.proves("output_dir", "train_dataset_path", "resume_from_checkpoint", "save_total_limit")
def test_a_run_killed_on_one_machine_ends_on_another_as_if_nothing_had_been(bucket: Path, tmp_path: Path) -> None:
    whole, other = tmp_path / "whole", bucket / "runs/sft"
    code, said = run(training(bucket, output_dir=whole), tmp_path / "cache 0")
    assert code == 0, said
    code, said = run(training(bucket), tmp_path / "cache 1", kill_after="uploaded checkpoint-")
    assert code == -9, said
    store = open_folder(f"file://{other}")
    newest = stored_checkpoints(store, store.list())[-1]
    assert problems(other / newest, hashes=True) == [] and not is_stored(store, "", store.list())
    code, said = run(training(bucket, resume_from_checkpoint="true"), tmp_path / "cache 2")
    assert code == 0, said
    assert f"downloading file://{other}/{newest}" in said and f"everything is in file://{other}" in said
    assert not any("not bit-exact" in line for line in said)
    assert (other / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert losses(other) == losses(whole) and problems(other, hashes=True) == []
    assert stored_checkpoints(store, store.list()) == ["checkpoint-56", "checkpoint-60"]
    config = (other / "training_config.yaml").read_text()
    assert f"output_dir: file://{other}" in config and str(tmp_path / "cache") not in config


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.exhaustive
def test_ranks_share_what_their_launcher_has_fetched_and_it_uploads_for_them(bucket: Path, tmp_path: Path) -> None:
    words = [*training(bucket, max_steps=2, save_steps=2), "--nproc", "2"]
    code, said = run(words, tmp_path / "cache")
    assert code == 0, said
    assert len([line for line in said if line.startswith("downloading ")]) == 1, said
    store = open_folder(f"file://{bucket}/runs/sft")
    present = store.list()
    assert stored_checkpoints(store, present) == ["checkpoint-2"] and is_stored(store, "", present)
    assert {"rank_logs/rank-0.log", "rank_logs/rank-1.log", "training_log.jsonl"} <= present.keys()
    assert said[-1] == f"everything is in {store.url}"


@pytest.mark.slow
def test_a_finished_run_is_a_model_for_every_verb(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run(training(bucket, max_steps=2, save_strategy="no"), tmp_path / "cache 1")
    assert code == 0, said
    url, cache = f"file://{bucket}/runs/sft", tmp_path / "cache 2"
    for words in (
        ["generate", url, "--prompt", "What is 1 + 1?", "max_new_tokens=4"],
        ["eval", url, f"eval_dataset_path=file://{bucket}/data/train.jsonl", "max_evaluate_steps=1", "eval_answers=0"],
    ):
        code, said = run([sys.executable, "-m", "erniekit", *words], cache)
        assert code == 0, (words, said)
    assert json.loads((bucket / "runs/sft/eval_results.json").read_text())["eval_loss"] > 0
    monkeypatch.setenv("ERNIEKIT_CACHE", str(cache))
    assert main(["export", url]) == 2, "into the cache nothing is exported"
    assert "name the folder to write with --output DIR" in capsys.readouterr().err
