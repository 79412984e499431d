"""The data of a run is tokenised while Paddle is imported, by a process that leaves nothing but the token cache."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# A process that has not imported Paddle, as the command line is then. Prints what it found, a word for each question.
PROGRAM = """
import os, sys
from erniekit.config import Config
from erniekit.launch import data_ahead
config = Config.load(sys.argv[1], [], verb="train")
cores = int(sys.argv[2])
data_ahead.usable_cores = lambda: cores
if sys.argv[3:] == ["again"]:
    data_ahead.cached_step_count = lambda config: 5
with data_ahead.data_ahead(config):
    print(bool(data_ahead._process))
    if sys.argv[3:] != ["refused"]:
        data_ahead.wait_for_data()
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("alone")
print("paddle" in sys.modules)
"""


def ahead(folder: Path, *arguments: str, records: str | None = None) -> tuple[list[str], list[str], str]:
    """What the program says, the samples' folders in the token cache, and what reached standard error."""
    data = folder / "records.jsonl"
    data.write_text(records or json.dumps({"src": ["How are you?"], "tgt": ["Well."]}) + "\n", encoding="utf-8")
    config = {
        "stage": "SFT",
        "model_name_or_path": str(ROOT / "examples/models/tiny-ernie"),
        "train_dataset_path": str(data),
        "train_dataset_type": "erniekit",
        "output_dir": str(folder / "run"),
        "data_cache_dir": str(folder / "cache"),
        "max_seq_len": 128,
        "max_steps": 2,
        "do_eval": False,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = [sys.executable, "-c", PROGRAM, str(folder / "config.json"), *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT)
    cache = folder / "cache"
    built = [path.parent.name for path in cache.rglob("manifest.json")] if cache.is_dir() else []
    return done.stdout.split(), built, done.stderr


def test_the_cache_holds_the_samples_before_paddle_is_imported(tmp_path: Path) -> None:
    said, built, errors = ahead(tmp_path, "2")
    assert (said, len(built), errors) == (["True", "alone", "False"], 1, "")


def test_nothing_is_started_on_one_core_or_for_known_data(tmp_path: Path) -> None:
    assert ahead(tmp_path, "1") == (["False", "alone", "False"], [], "")
    assert ahead(tmp_path, "2", "again") == (["False", "alone", "False"], [], "")


def test_what_is_wrong_with_the_data_is_left_to_the_run(tmp_path: Path) -> None:
    assert ahead(tmp_path, "2", records='{"src": 5}\n') == (["True", "alone", "False"], [], "")


def test_a_run_that_does_not_begin_ends_it(tmp_path: Path) -> None:
    said, _, errors = ahead(tmp_path, "2", "refused")
    assert (said, errors) == (["True", "alone", "False"], "")


@pytest.mark.skipif(sys.platform != "linux", reason="only the kernel of Linux ends a process with its parent")
def test_it_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    """Nobody is left to end it, for example after the system's memory has run out."""
    program = """
import os, sys, time
from erniekit.launch import data_ahead, job
data_ahead._is_worth_it = lambda config: True
job.prepare = lambda config: time.sleep(60)
with data_ahead.data_ahead(None):
    print(data_ahead._process, flush=True)
    sys.stdin.read()
"""
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as run:
        assert run.stdout is not None
        process = int(run.stdout.readline())
        descriptor = os.pidfd_open(process)
        run.kill()
        ended, _, _ = select.select([descriptor], [], [], 20)
        os.close(descriptor)
    assert ended
