"""Files beside a run, none of which is worth ending it: one that cannot be written is told, and training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class WarnOnIoError:
    """Tells that something cannot be written, once until it can again.

    Args:
        what: the name of the file or files, for the message.
    """

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self._what, self._say, self._warned = what, say, False

    @contextmanager
    def warned(self) -> Iterator[None]:
        """Inside, an error of the disk becomes a message."""
        try:
            yield
        except OSError as error:
            if not self._warned:
                self._say(f"warning: could not write {self._what}: {error.strerror or error}; the run goes on")
            self._warned = True
        else:
            self._warned = False
