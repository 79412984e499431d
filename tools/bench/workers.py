"""What comparisons share: sides in processes of their own, asked for a turn at a time, on the same random weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class SideEndedError(Exception):
    """A side has ended instead of answering; the message is the end of what it wrote."""


class Worker:
    """One side of a comparison (`sides/turns.py`): it reads a line of JSON for each turn, and prints as it likes."""

    def __init__(self, command: Sequence[str], threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "KMP_BLOCKTIME": "1", "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)  # a peer may be named as this project is
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- lives as long as the process; no pipe: nobody empties it, and some sides write a lot
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment
        )

    def run(self, **request: object) -> dict[str, Any]:
        """Seconds, losses, useful tokens and peak memory (MB) of one turn.

        Raises:
            SideEndedError: the process has ended.
        """
        assert self.process.stdin and self.process.stdout
        with suppress(BrokenPipeError):  # then what it has printed says why
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        said: list[str] = []
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return dict(json.loads(line[len("ANSWER ") :]))
            said.append(line)
        self.process.wait()
        self.errors.seek(0)
        raise SideEndedError("".join(said)[-1000:] + self.errors.read()[-3000:])

    def close(self) -> None:
        assert self.process.stdin
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def make_model(folder: Path, config: dict[str, Any]) -> None:
    """Write `config.json` and random weights that all sides read."""
    (folder / "config.json").write_text(json.dumps(config))
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from erniekit.environment import import_paddle; import_paddle()\n"
        "from erniekit.model.builder import build_model\n"
        "from erniekit.model.architectures.model_config import ModelConfig\n"
        "from erniekit.model.weights import save_model_folder\n"
        f"save_model_folder(build_model(ModelConfig.from_folder({str(folder)!r}), None), {str(folder)!r})"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stderr=subprocess.DEVNULL)
