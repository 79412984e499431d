"""Tokenise the data of a run in a process of its own while this one imports Paddle, which takes as long.

The other process does what the launcher does before it starts ranks (`job.prepare`), and leaves the samples in the
token cache; this one then finds them there. It says nothing: what is wrong with the data, this one finds, too.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from erniekit.build.step_count import cached_step_count
from erniekit.config import Config
from erniekit.distributed.rank import end_with_parent
from erniekit.environment import usable_cores
from erniekit.hub.cache import is_fetched

_process = 0  # its id; 0: there is none


@contextmanager
def data_ahead(config: Config) -> Iterator[None]:
    """Tokenise the data of a training run meanwhile, if that is worth it; end that process with the body."""
    global _process
    _process = _start(config) if _is_worth_it(config) else 0
    try:
        yield
    finally:
        if _process:
            with suppress(ProcessLookupError):
                os.kill(_process, signal.SIGTERM)
            wait_for_data()


def wait_for_data() -> None:
    """Return when the other process has ended, if there is one; before the data is opened."""
    global _process
    if _process:
        with suppress(ChildProcessError):
            os.waitpid(_process, 0)
        _process = 0


def _is_worth_it(config: Config) -> bool:
    """Return whether the data seems new, there is a core for it, and this process can still be copied safely."""
    if config.stage.reads_prompts:
        return False
    can_fork = hasattr(os, "fork") and "paddle" not in sys.modules and threading.active_count() == 1
    alone = "PADDLE_TRAINER_ID" not in os.environ and not is_fetched(config)
    return can_fork and alone and usable_cores() > 1 and cached_step_count(config) is None


def _start(config: Config) -> int:
    parent, process = os.getpid(), os.fork()
    if process:
        return process
    try:
        end_with_parent(parent)
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        logging.disable()
        from erniekit.launch.job import prepare

        prepare(config)
    finally:
        os._exit(0)  # whatever happens: nothing of the copied process is to run
