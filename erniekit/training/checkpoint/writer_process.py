"""The process that completes a checkpoint while training goes on: hashes, syncs, renames, prunes. Needs no Paddle.

    python -m erniekit.training.checkpoint.writer_process TRAINER TARGET [STAGED]

It starts before the checkpoint's files are written, so that it can remove them from shared memory if the trainer is
killed meanwhile, and waits for one line, a JSON object `{"keep": [...], "limit": n}`. After that it finishes even if
the trainer ends: the files are a snapshot, and its lock makes the next run wait.

TRAINER is the id of the parent process, TARGET the checkpoint's folder; its files are in STAGED, or else in the
temporary folder of TARGET. The exit code is 0, or 1 with the error on the standard error stream.
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
from erniekit.terminal import escape_control_characters
from erniekit.training.checkpoint.atomic_folder import finalize_folder, prune
from erniekit.training.checkpoint.lock import locked_by_writer

_POLL_SECONDS = 0.5  # seconds


def main(trainer: int, target: Path, staged: Path | None) -> int:
    """Wait for the request and carry it out; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer stops in order, and waits for this process
    try:
        with locked_by_writer(target.parent):
            request = _read_request(trainer)
            if request is not None:
                finalize_folder(target, staged)
                prune(target.parent, request["limit"], {Path(folder) for folder in request["keep"]})
    except (CheckpointError, OSError) as error:
        print(escape_control_characters(str(error)), file=sys.stderr)
        return 1
    finally:
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)
    return 0


def _read_request(trainer: int) -> dict[str, Any] | None:
    """Return the trainer's request; None if the trainer ended, or cancelled, before it sent one.

    This process has its lock. So if the trainer is alive now, no other run has the folder, nor can get it before this
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
