"""What ERNIEKit logs while a test, or a part of it, runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from erniekit.log import PACKAGE, ConsoleFormatter


class _ListHandler(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines
        self.setFormatter(ConsoleFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collect the lines of level INFO and above as the command line shows them."""
    lines: list[str] = []
    logger, handler = logging.getLogger(PACKAGE), _ListHandler(lines)
    previous = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(previous)
