"""The log of ERNIEKit, and how the command line shows it.

Every module logs to the logger of its own name, below `erniekit`. As a library ERNIEKit shows nothing and leaves the
root logger alone: a program that embeds it, such as a server, adds a handler to the logger `erniekit` or to the root
logger, and chooses a level:

    logging.getLogger("erniekit").setLevel(logging.INFO)
    logging.getLogger("erniekit").addHandler(my_handler)

INFO is the progress of a run, WARNING what the user should know of it, ERROR what has failed while the run goes on,
DEBUG what explains a run's inside: which weights decay, how memory is kept, models beside the one that is trained. The
command line shows it with ERNIEKIT_LOG=debug. A script that wants the lines of the command line uses `console_logging`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from erniekit.terminal import escape_control_characters, wrapped

PACKAGE = "erniekit"
# verbs such as `generate` write their answers to standard output, so these report on standard error
STDERR_LOGGERS = (
    "erniekit.hub.download",
    "erniekit.hub.fetched",
    "erniekit.inference.batch",
    "erniekit.inference.engine",
    "erniekit.inference.speaking.speaker",
    "erniekit.inference.transcribe",
    "erniekit.build.adapters",
    "erniekit.build.checks",
    "erniekit.build.tokenizer",
    "erniekit.model.architectures.model_config",
    "erniekit.progress",
)


class ConsoleFormatter(logging.Formatter):
    """Write the message alone, safe for a terminal; a warning begins with "warning: "."""

    def format(self, record: logging.LogRecord) -> str:
        message = escape_control_characters(super().format(record))
        return f"warning: {message}" if record.levelno == logging.WARNING else message


class ConsoleHandler(logging.Handler):
    """Print records as they come to what is `sys.stdout` then, those of `STDERR_LOGGERS` to `sys.stderr`.

    Unlike `logging.StreamHandler` it raises OSError where the stream cannot be written: the verb decides what follows.
    """

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.name in STDERR_LOGGERS else sys.stdout
        print(
            wrapped(self.format(record), stream), file=stream, flush=True
        )  # a pipe would hold lines back for kilobytes


@contextmanager
def console_logging(level: int | None = None) -> Iterator[None]:
    """Show ERNIEKit's log on the console while the body runs, as the command line does, and nowhere else.

    Every rank shows its own lines: the launcher keeps them in a file for each rank, and shows those of the first.

    Args:
        level: the lowest level that is shown; None: INFO, or DEBUG where the environment has ERNIEKIT_LOG=debug.
    """
    if level is None:
        level = logging.DEBUG if os.environ.get("ERNIEKIT_LOG", "").lower() == "debug" else logging.INFO
    logger, handler = logging.getLogger(PACKAGE), ConsoleHandler()
    handler.setFormatter(ConsoleFormatter())
    previous_level, previous_propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False  # a handler of the root logger would show every line again
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(previous_level)
        logger.propagate = previous_propagate
