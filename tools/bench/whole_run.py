"""Runs of `erniekit` in processes of their own, and the most memory that each of these has taken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from marked import ROOT
from workers import make_model

from erniekit.build.layout import plan_layout
from erniekit.config import Config
from erniekit.distributed.planning.memory import process_bytes, tensor_bytes
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.runners.preview import longest_sample

TOKENIZER = ROOT / "examples" / "models" / "tiny-ernie"
BASE: dict[str, Any] = {
    "train_dataset_type": "erniekit",
    "max_steps": 2,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "save_strategy": "no",
    "report_to": "none",
    "device": "cpu",
}
# Runs in every process before anything else; what it writes tells the peaks of the ones that have loaded Paddle.
_REPORT = """
import atexit, json, os, re, sys
def report():
    if "paddle" in sys.modules:
        from paddle.base import core
        status = open("/proc/self/status").read()
        peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024
        line = {"process": peak, "tensors": core.host_memory_stat_peak_value("Allocated", 0)}
        open(os.environ["MEMORY_REPORT"], "a").write(json.dumps(line) + "\\n")
atexit.register(report)
"""


class Peaks(NamedTuple):
    """Bytes: what Paddle's allocator counts, and resident memory (VmHWM), which holds Python, libraries, gaps, too."""

    tensors: int
    process: int


def run(values: dict[str, Any], folder: Path, ranks: int | None = None, threads: int = 1) -> Peaks:
    """Train as `values` say; of several ranks the larger of each figure. `output_dir` is emptied before."""
    report = folder / "report.jsonl"
    report.unlink(missing_ok=True)
    shutil.rmtree(values["output_dir"], ignore_errors=True)
    (folder / "run.json").write_text(json.dumps(values), encoding="utf-8")
    (folder / "sitecustomize.py").write_text(_REPORT, encoding="utf-8")
    words = [sys.executable, "-m", "erniekit", "train", str(folder / "run.json")]
    words += ["--nproc", str(ranks)] if ranks else []
    paths = os.pathsep.join([str(folder), str(ROOT)])
    own = {"PYTHONPATH": paths, "MEMORY_REPORT": str(report), "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(words, env={**os.environ, **own}, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stdout}{done.stderr}")
    peaks = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
    return Peaks(*(max(peak[name] for peak in peaks) for name in Peaks._fields))


def write_model(shape: dict[str, Any], folder: Path) -> Path:
    """A folder with random weights and the shipped tokenizer, made once."""
    target = folder / shape["model_type"]
    if not target.is_dir():
        target.mkdir()
        make_model(target, shape)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / name, target)
    return target


def estimated(values: dict[str, Any], ranks: int | None = None) -> dict[str, int]:
    """Bytes that `erniekit validate --data` computes for the same: of tensors, and of a whole process, on the fullest
    rank."""
    config = Config.from_mapping(values)
    model = ModelConfig.from_folder(Path(values["model_name_or_path"]))
    plan = plan_layout(config, model, ranks, longest_sample(config))
    return {"tensors": max(map(tensor_bytes, plan.memory)), "process": max(map(process_bytes, plan.memory))}
