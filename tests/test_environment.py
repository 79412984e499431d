"""How many cores and how much memory a process may use."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest

from erniekit import environment
from erniekit.environment import apply_cpu_settings, available_memory, import_paddle, usable_cores
from erniekit.errors import UserError

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("50000 100000", 1),
        ("250000 100000", 2),
        ("9900000 100000", 8),
        ("", 8),
    ],
)
def test_the_quota_of_a_container_counts(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("300000", 3), ("1000", 1)])
def test_so_does_that_of_version_1(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8


def test_available_memory(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       16000000 kB\nMemFree:         1000 kB\nMemAvailable:    2048 kB\n")
    assert available_memory(file) == 2 << 20
    file.write_text("MemTotal:       16000000 kB\n")
    assert available_memory(file) is None
    assert available_memory(tmp_path / "absent") is None


def test_a_missing_paddle_names_a_heading_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_paddle(name, *rest, **named):
        if name == "paddle":
            raise ImportError(name="paddle")
        return real_import(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_paddle)
    with pytest.raises(UserError, match=r"README\.md, 'On a GPU'"):
        import_paddle()
    assert "### On a GPU\n" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("users", "found"), [({}, "1"), ({"KMP_BLOCKTIME": "200"}, "200")])
def test_a_thread_waits_a_millisecond_for_its_next_kernel(
    users: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = dict(users)
    monkeypatch.setattr(environment.os, "environ", variables)
    monkeypatch.delitem(environment.sys.modules, "paddle", raising=False)
    apply_cpu_settings(threads=2)
    assert (variables["KMP_BLOCKTIME"], variables["OMP_NUM_THREADS"]) == (found, "2")
