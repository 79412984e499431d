"""What comparisons share: two sides in processes of their own that take turns on the same random weights."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def answer(start: float, losses: Sequence[float]) -> None:
    """What a side prints when its turn is over; `start` is time.perf_counter's."""
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("ANSWER " + json.dumps({"seconds": seconds, "losses": list(losses), "peak_mb": peak}), flush=True)


class Worker:
    """One side of a comparison: it reads a line of JSON for each turn, and prints other things as it likes."""

    def __init__(self, command: Sequence[str], threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "KMP_BLOCKTIME": "0", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    def run(self, **request: object) -> dict[str, Any]:
        """Seconds, losses and peak memory (MB) of one turn."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return dict(json.loads(line[len("ANSWER ") :]))
        raise SystemExit(f"the worker ended:\n{self.process.communicate()[1][-3000:]}")

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def take_turns(workers: dict[str, Worker], rounds: int, **request: object) -> dict[str, list[dict[str, Any]]]:
    """The answers of every side, a turn a round; then the processes end."""
    answers: dict[str, list[dict[str, Any]]] = {side: [] for side in workers}
    for _ in range(rounds):
        for side, worker in workers.items():
            answers[side].append(worker.run(**request))
    for worker in workers.values():
        worker.close()
    return answers


def ratio_and_range(answers: dict[str, list[dict[str, Any]]]) -> str:
    """How many times as long the others took as we did: the median over the rounds, and its range."""
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(answers["ours"], answers["theirs"], strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def median_seconds(answers: Sequence[dict[str, Any]]) -> float:
    return statistics.median(answer["seconds"] for answer in answers)


def make_model(folder: Path, config: dict[str, Any]) -> None:
    """Write `config.json` and random weights that both sides read."""
    (folder / "config.json").write_text(json.dumps(config))
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from erniekit.environment import import_paddle; import_paddle()\n"
        "from erniekit.model.builder import build_model\n"
        "from erniekit.model.configuration import ModelConfig\n"
        "from erniekit.model.weights import save_model_folder\n"
        f"save_model_folder(build_model(ModelConfig.from_folder({str(folder)!r}), None), {str(folder)!r})"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stderr=subprocess.DEVNULL)
