"""What the ranks of test_launching.py run instead of a training: `rank_program.py BEHAVIOUR OUTPUT_DIR [WORD ...]`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from erniekit.distributed.rank import attach
from erniekit.errors import ConfigurationError
from erniekit.training.checkpoint.atomic_folder import write_folder

RANK = int(os.environ["PADDLE_TRAINER_ID"])


def say_who(output: Path, words: list[str]) -> int:
    print(f"rank {RANK} of {os.environ['PADDLE_TRAINERS_NUM']} at {os.environ['PADDLE_MASTER']}", flush=True)
    print(f"rank {RANK} complains", file=sys.stderr, flush=True)
    return 0


def is_killed_once(output: Path, words: list[str]) -> int:
    """The first attempt saves a checkpoint, if it is told to, and loses rank 1."""
    attempt = len(list(output.glob("attempt-*")))
    if RANK == 1:
        time.sleep(0.2)
        (output / f"attempt-{attempt}").write_text(json.dumps(words))
        if attempt == 0:
            if "save=yes" in words:
                write_folder(output / "checkpoint-7", lambda folder: (folder / "model").write_text("weights"))
            os.kill(os.getpid(), signal.SIGKILL)
    return 0


def is_always_killed(output: Path, words: list[str]) -> int:
    with (output / "starts").open("a") as file:
        file.write(f"{RANK}")
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def refuses(output: Path, words: list[str]) -> int:
    with (output / "starts").open("a") as file:
        file.write(f"{RANK}")
    raise ConfigurationError("this cannot be mended by starting again")


def stops_when_asked(output: Path, words: list[str]) -> int:
    def stop(number: int, _frame: object) -> None:
        (output / f"stopped-{RANK}").write_text(signal.Signals(number).name)
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    (output / f"ready-{RANK}").touch()
    time.sleep(60)
    return 0


def does_not_stop(output: Path, words: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    (output / f"ready-{RANK}").write_text(str(os.getpid()))
    time.sleep(60)
    return 0


if __name__ == "__main__":
    launcher = attach()
    try:
        sys.exit(globals()[sys.argv[1]](Path(sys.argv[2]), sys.argv[3:]))
    except Exception as error:
        assert launcher is not None
        launcher.report_error(error)
        sys.exit(1)
