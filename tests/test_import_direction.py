"""Imports point one way, from `cli` down to `config` (docs/architecture.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "erniekit"
# From the top down; a room may import those on lower floors. `data` and `model` never import each other.
FLOORS = (
    ("cli",),
    ("ui",),
    ("runners",),
    ("rollouts",),
    ("rewards",),
    ("serving",),
    ("inference",),
    ("export",),
    ("launch",),
    ("build",),
    ("distributed",),
    ("training",),
    ("hub",),
    ("codecs",),
    ("model", "data"),
    ("config", "native", "web"),
)
ROOMS = {room: -floor for floor, rooms in enumerate(FLOORS) for room in rooms}
NEVER = {"config": {"numpy", "paddle"}, "data": {"paddle"}, "ui": {"numpy", "paddle"}, "web": {"numpy", "paddle"}}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a file imports at any depth, inside functions and for type checking, too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "erniekit")


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "erniekit" and parts[1] in ROOMS else None


def allowed(importer: str, imported: str) -> bool:
    return importer == imported or ROOMS[importer] > ROOMS[imported]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_imports_upwards_or_what_its_room_does_without(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0]
    for module in imported_modules(path):
        imported = room_of(module)
        if own in ROOMS:
            assert imported is None or allowed(own, imported), f"{own} imports {module}"
            assert module.split(".")[0] not in NEVER.get(own, set()), f"{own} imports {module}"
        elif own != "__main__.py":  # errors, environment, terminal: for every room, so they know none
            assert imported is None, f"{own} imports {module}"


def test_every_room_is_known() -> None:
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()} == set(ROOMS)
    assert not allowed("data", "model") and not allowed("model", "data") and not allowed("config", "data")
    assert not allowed("model", "training") and not allowed("model", "distributed") and allowed("cli", "config")


@pytest.mark.parametrize(
    "module",
    [
        "erniekit.cli.validate",
        "erniekit.cli.preview",
        "erniekit.launch.job",
        "erniekit.training.callbacks.defaults",
        "erniekit.codecs.residual_kmeans",
        "erniekit.codecs.kmeans",
        "erniekit.ui.app",
    ],
)
def test_light_modules_load_no_paddle(module: str) -> None:
    """The launcher prepares data and watches ranks; Paddle would cost it memory and start-up time."""
    code = f"import sys, {module}; print('paddle' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
