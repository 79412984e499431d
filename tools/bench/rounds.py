"""Rounds of a benchmark, with how far it has come on standard error: a bar on a terminal, elsewhere a line a minute."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator
from typing import TypeVar

from marked import ROOT

sys.path.insert(0, str(ROOT))
from erniekit.progress import progress

T = TypeVar("T")


def counted(items: Collection[T], what: str, unit: str = "rounds") -> Iterator[T]:
    """Yield each item; `what` is measured, in words."""
    logger = logging.getLogger("erniekit.progress")
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield from progress(items, what, len(items), unit)
    finally:
        logger.removeHandler(handler)
