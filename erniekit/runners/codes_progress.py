"""Show how encoding goes on, with the real-time factor: seconds of sound in a second."""

from __future__ import annotations

import time
from types import TracebackType

from erniekit.data.recording_facts import duration
from erniekit.progress import Progress


class CodesProgress:
    """Counts recordings and seconds of sound.

    Args:
        what: is done with them: "encoding".
        recordings: that are to be done; None: not known.
    """

    def __init__(self, what: str, recordings: int | None = None) -> None:
        self._shown, self._seconds = Progress(what, recordings, "recordings"), 0.0
        self._began = time.perf_counter()

    def __enter__(self) -> CodesProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.close()

    def recording(self, seconds: float) -> None:
        """Count a recording of so many seconds; 0 for one that was left out."""
        self._seconds += seconds
        self._shown.advance(note=f"{self._speed():,.1f} x real time")

    def told(self) -> str:
        """Return the time that it took, and the real-time factor."""
        took = time.perf_counter() - self._began
        return f" in {duration(took)}, {self._speed():,.1f} x real time" if self._shown.done else ""

    def _speed(self) -> float:
        return self._seconds / max(1e-9, time.perf_counter() - self._began)
