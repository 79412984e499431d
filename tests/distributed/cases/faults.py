"""Ranks that fail in every way; all but one without Paddle, so they start fast."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from erniekit.distributed.rank import RankLostError, RankTimeoutError
from erniekit.errors import ConfigurationError


def _rank() -> int:
    return int(os.environ["PADDLE_TRAINER_ID"])


def returns(word: str) -> dict:
    return {"rank": _rank(), "word": word, "size": int(os.environ["PADDLE_TRAINERS_NUM"])}


def raises_and_others_notice() -> None:
    if _rank() == 1:
        time.sleep(0.3)  # rank 1 ends after those that blame it
        raise ValueError("the seventh sample is bad")
    raise RankLostError("rank 1 has ended")


def raises_and_others_go_on() -> None:
    if _rank() == 1:
        raise ValueError("the seventh sample is bad")
    time.sleep(60)


def exits() -> None:
    if _rank() == 1:
        sys.exit(3)
    time.sleep(60)


def is_killed() -> None:
    if _rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def hangs(pids: str) -> None:
    child = subprocess.Popen(["sleep", "60"])
    with open(f"{pids}/{_rank()}", "w", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {child.pid}")
    if _rank() == 1:
        time.sleep(60)


def says_and_is_killed() -> None:
    if _rank() == 1:
        print("the last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def hangs_and_others_notice(stopped: bool) -> None:
    if _rank() == 1:
        if stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        _waits_for_ever()
    time.sleep(0.3)
    raise RankTimeoutError("rank 1 has sent nothing for 0.3 s")


def hangs_before_the_store() -> None:
    if _rank() == 1:
        _waits_for_ever()
    from erniekit.distributed.init import join_store

    join_store(timeout=1.0, world_size=int(os.environ["PADDLE_TRAINERS_NUM"]))


def _waits_for_ever() -> None:
    threading.Event().wait()


def waits_for_all_others() -> None:
    raise RankTimeoutError(f"rank {_rank()} has been sent nothing")


def is_stopped_alone() -> None:
    if _rank() == 1:
        sys.exit(128 + signal.SIGTERM)
    time.sleep(0.3)
    raise RankLostError("rank 1 has ended")


def leaves() -> None:
    if _rank() == 1:
        sys.exit(0)
    time.sleep(0.3)
    raise RankLostError("rank 1 has ended")


def refuses() -> None:
    if _rank() == 1:
        time.sleep(0.3)
        raise ConfigurationError("max_seq_len: too long")
    raise RankLostError("rank 1 has ended")


def wraps_what_it_noticed() -> None:
    if _rank() == 1:
        time.sleep(0.3)
        raise ValueError("the seventh sample is bad")
    try:
        raise RankLostError("rank 1 has ended")
    except RankLostError as error:
        raise OSError(f"(External) RankLostError: {error}") from None


def sleeps(pids: str) -> None:
    with open(f"{pids}/{_rank()}", "w", encoding="utf-8") as file:
        file.write(str(os.getpid()))
    time.sleep(60)
