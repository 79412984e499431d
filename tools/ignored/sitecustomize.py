"""Make one expression of ERNIEKit return a parameter's default, in this Python process and those that it starts.

Python imports this module when it starts, because `tools/ignored_parameters.py` puts its folder on PYTHONPATH. The
variable ERNIEKIT_IGNORED holds the parameter, the module, and the position of the expression, as JSON. The server of
`forks.py` prepares all readers, and each of its forks ignores another one.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from types import CodeType, ModuleType
from typing import Any

RESOLVE = "erniekit.config.resolve"
VARIABLE = "ERNIEKIT_IGNORED"
IGNORED: dict[str, Any] = {}  # the reader that ignores its parameter
POSITIONS: dict[str, set[tuple[int, ...]]] = {}  # module -> where its prepared readers stand
DEFAULTS: dict[str, Any] = {}  # those of the configuration that was resolved last


def prepare(readers: Iterable[dict[str, Any]]) -> None:
    """Wrap these readers, once their modules are imported, so that each can be the one that ignores its parameter."""
    if not POSITIONS:
        sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    for reader in readers:
        POSITIONS.setdefault(reader["module"], set()).add(tuple(reader["position"]))


def ignore(reader: dict[str, Any]) -> None:
    """Ignore the parameter at a reader that is prepared, here and in the processes that are started from now on."""
    IGNORED.update(reader)
    os.environ[VARIABLE] = json.dumps(reader)


class Replace(ast.NodeTransformer):
    """Wrap the expressions that stand at the positions of a module's readers."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.missing = set(POSITIONS.get(module, ()))

    def visit(self, node: ast.AST) -> ast.AST:
        node = self.generic_visit(node)
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Call) and _reads(node):
            position = node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0
            if position in self.missing:
                self.missing.remove(position)
                if isinstance(node, ast.Attribute):
                    key: ast.expr = ast.Constant(node.attr)
                else:
                    key = node.slice if isinstance(node, ast.Subscript) else node.args[0]
                where = ast.Constant(f"{self.module} {list(position)}")
                call = ast.Call(ast.Name("__ignored__", ast.Load()), [node, key, where], [])
                return ast.fix_missing_locations(ast.copy_location(call, node))
        return node


def _reads(node: ast.Attribute | ast.Subscript | ast.Call) -> bool:
    return isinstance(getattr(node, "ctx", ast.Load()), ast.Load)


class Loader(importlib.machinery.SourceFileLoader):
    """Load the module of a reader with the expression replaced, and never from its bytecode."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        replace = Replace(fullname)
        tree = replace.visit(ast.parse(self.get_data(path), path))
        if replace.missing:
            raise SystemExit(f"{path}: no expression stands at {sorted(replace.missing)}")
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__ignored__"] = ignored
        super().exec_module(module)
        if module.__name__ == RESOLVE:
            record_defaults(module)


class Finder:
    """Find the modules of ERNIEKit that are to be changed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in POSITIONS and fullname != RESOLVE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        return spec and importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=Loader(fullname, spec.origin)
        )  # type: ignore[arg-type]


def record_defaults(module: ModuleType) -> None:
    resolve = module.resolve  # type: ignore[attr-defined]

    def recording(*arguments: Any) -> Any:
        builder = resolve(*arguments)
        DEFAULTS.update(builder._defaults)
        return builder

    module.resolve = recording  # type: ignore[attr-defined]


def ignored(value: Any, key: Any, where: str) -> Any:
    """Return the default in place of the value, if this is the reader and the key is the parameter's."""
    name = IGNORED.get("name")
    if key != name or where != f"{IGNORED['module']} {IGNORED['position']}":
        return value
    if name not in DEFAULTS:  # a section that a test made by itself
        from erniekit.config.registry import PARAMETERS

        DEFAULTS[name] = PARAMETERS[name].default
    return DEFAULTS[name]


if os.environ.get(VARIABLE):
    IGNORED.update(json.loads(os.environ[VARIABLE]))
    prepare([IGNORED])
