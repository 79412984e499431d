"""What `make` says where the Python that it is given does not run."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["python9", "shim"])
def test_a_python_that_does_not_run_is_told_in_a_sentence(name: str, tmp_path: Path) -> None:
    shim = tmp_path / "shim"  # as pyenv's, which exists for versions that are not active
    shim.write_text("#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n")
    shim.chmod(shim.stat().st_mode | stat.S_IEXEC)
    done = subprocess.run(
        ["make", "quickstart", f"PYTHON={name}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert f"error: '{name}' does not run here" in done.stderr and "make quickstart PYTHON=python3.11" in done.stderr
    assert "127" not in done.stderr and not (tmp_path / "venv").exists()
