"""Whether a process is still there."""

from __future__ import annotations

import time
from pathlib import Path


def wait_for_the_end(pid: int | str, patience: float = 5.0) -> None:
    """Return once a process is gone, or waits to be reaped by its parent; AssertionError where it goes on."""
    ends = time.monotonic() + patience
    while time.monotonic() < ends:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} is still running")
