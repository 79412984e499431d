"""Long work shows how far it has come."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from erniekit import progress as module
from erniekit.progress import Progress, lines_of, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_off_a_terminal_there_is_one_line_a_minute(
    clock: list[float], logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    for _ in progress(range(150), "packing", 150, "samples"):
        clock[0] += 1.0
    assert logged == [
        "packing: 60 of 150 (40%) samples, 1/s, 1:30 left",
        "packing: 120 of 150 (80%) samples, 1/s, 0:30 left",
    ]


def test_without_a_total_there_is_a_rate_and_no_time_left(clock: list[float], logged: list[str]) -> None:
    work = Progress("listing", unit="recordings")
    clock[0] += 61
    work.advance(6100, note="2.0 x real time")
    assert logged == ["listing: 6,100 recordings, 100/s, 2.0 x real time"]


def test_a_terminal_has_a_bar_that_goes_away_and_no_thread(
    clock: list[float], logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    threads = threading.active_count()
    with Progress("tokenising \x1b[2Ja.jsonl", 400, "records") as work:
        work.advance(10)
        assert terminal.getvalue() == ""  # short work shows nothing
        clock[0] += 2.0
        work.advance(90)
        assert threading.active_count() == threads
        with Progress("inside", 5) as inner:
            clock[0] += 2.0
            inner.advance(5)
    shown = terminal.getvalue()
    assert r"tokenising \x1b[2Ja.jsonl" in shown and "100 of 400 (25%) records, 50/s, 0:06 left" in shown
    assert "inside" not in shown and not logged
    assert module._shown is None


def test_a_thread_beside_training_has_lines(
    clock: list[float], logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())

    def upload() -> None:
        for _ in progress(range(2), "uploading", 4, "MB"):
            clock[0] += 61

    thread = threading.Thread(target=upload)
    thread.start()
    thread.join()
    assert terminal.getvalue() == "" and logged[0].startswith("uploading: 1 of 4 (25%) MB")


def test_items_count_by_their_parts_also_when_they_begin_anew() -> None:
    work = Progress("uploading", 30, "MB")
    first, second = work.parts(10e6, 1e-6), work.parts(20e6, 1e-6)
    done = []
    for part, so_far in ((first, 4e6), (first, 8e6), (first, 2e6), (first, 11e6), (second, 20e6), (second, 20e6)):
        part(so_far)
        done.append(round(work.done))
    assert done == [4, 8, 2, 10, 30, 30]


def test_an_error_removes_the_bar(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(KeyError), Progress("x", 5) as work:
        clock[0] += 2.0
        work.advance()
        assert module._shown is work
        raise KeyError
    assert module._shown is None


def test_a_total_is_counted_when_it_is_first_shown(clock: list[float], logged: list[str], tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("{}\n" * 7)
    counted = []
    work = Progress("reading", lambda: counted.append(1) or lines_of(file))
    work.advance()
    assert not counted
    for _ in range(2):
        clock[0] += 61
        work.advance()
    assert counted == [1] and "of 7" in logged[0]
    assert lines_of(tmp_path) is None and lines_of(file.with_suffix(".parquet")) is None


def test_counting_costs_next_to_nothing_and_imports_nothing() -> None:
    code = (
        "import sys, time; from erniekit.progress import progress;"
        "began = time.perf_counter(); n = sum(1 for _ in progress(range(100000), 'x', 100000));"
        "print(n, time.perf_counter() - began < 2, 'rich' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["100000", "True", "False"]
