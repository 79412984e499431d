"""The notebook of docs/tutorials runs from its first cell to its last, in a kernel of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.documentation.commands import ROOT

_spec = importlib.util.spec_from_file_location("run_notebook", ROOT / "tools/docs/run_notebook.py")
assert _spec is not None and _spec.loader is not None
run_notebook = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(run_notebook)


def printed(notebook: dict) -> list[str]:
    """Return the text that each cell of code prints."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join(output.get("text", "") for output in cell["outputs"]) for cell in cells]


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = ROOT / "docs/tutorials/first-steps.ipynb"
    shown = printed(run_notebook.nbformat.read(path, as_version=4))
    found = printed(run_notebook.executed(path, tmp_path))
    assert found[:2] == shown[:2]  # the sizes of the files, and what is wrong with the configuration
    steps = [line.split()[0] for line in found[3].splitlines()]
    assert steps == [line.split()[0] for line in shown[3].splitlines()] and len(steps) == 6
    right, _, rest = found[4].splitlines()[-1].partition(" ")
    assert rest == "of 20 as expected" and int(right) >= 15
