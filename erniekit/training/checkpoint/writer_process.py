"""The process that completes a checkpoint while training goes on: hashes, syncs, renames, prunes. Needs no Paddle.

    python -m erniekit.training.checkpoint.writer_process TRAINER TARGET [STAGED]

It is started before the checkpoint's files are written, so that somebody is there to remove them from shared memory
should the trainer be killed meanwhile, and waits for one line, a JSON object `{"keep": [...], "limit": n}`. After that
it comes to its end whatever becomes of the trainer: the files are a snapshot, and its lock keeps the next run waiting.

TRAINER is the process that starts this one, TARGET the checkpoint's folder; its files lie in STAGED, or else beside
TARGET under the name of half-written folders.
Exit code 0, or 1 with what is wrong on the standard error stream.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from erniekit.errors import CheckpointError
from erniekit.training.checkpoint.atomic_folder import finalize_folder, prune
from erniekit.training.checkpoint.lock import locked_by_writer

_POLL_SECONDS = 0.5  # seconds


def main(trainer: int, target: Path, staged: Path | None) -> int:
    """Wait for the order and carry it out; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer stops in order, and waits for this process
    try:
        with locked_by_writer(target.parent):
            request = _read_request(trainer)
            if request is not None:
                finalize_folder(target, staged)
                prune(target.parent, request["limit"], {Path(folder) for folder in request["keep"]})
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)
    return 0


def _read_request(trainer: int) -> dict[str, Any] | None:
    """The trainer's line; None where it ended, or took back what it had begun, before there was one.

    This process has its lock. So if the trainer is alive now, no other run has the folder, nor can have it before this
    process ends.
    """
    while True:
        if os.getppid() != trainer:
            return None
        if select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
            line = sys.stdin.readline()
            return json.loads(line) if line.endswith("\n") else None


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3:] else None))
