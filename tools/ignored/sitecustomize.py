"""Make one expression of ERNIEKit return a parameter's default, in this Python process and those that it starts.

Python imports this module when it starts, because `tools/ignored_parameters.py` puts its folder on PYTHONPATH. The
variable ERNIEKIT_IGNORED holds the parameter, the module, and the position of the expression, as JSON.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import json
import os
import sys
from types import CodeType, ModuleType
from typing import Any

RESOLVE = "erniekit.config.resolve"
IGNORED: dict[str, Any] = json.loads(os.environ.get("ERNIEKIT_IGNORED", "null")) or {}


class Replace(ast.NodeTransformer):
    """Wrap the expression that stands at the position of the reader."""

    def __init__(self) -> None:
        self.replaced = 0

    def visit(self, node: ast.AST) -> ast.AST:
        node = self.generic_visit(node)
        if isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            position = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
            if list(position) == IGNORED["position"]:
                self.replaced += 1
                key: ast.expr = ast.Constant(IGNORED["name"])
                if isinstance(node, ast.Subscript):
                    key = node.slice
                elif isinstance(node, ast.Call):
                    key = node.args[0]
                call = ast.Call(ast.Name("__ignored__", ast.Load()), [node, key], [])
                return ast.fix_missing_locations(ast.copy_location(call, node))
        return node


class Loader(importlib.machinery.SourceFileLoader):
    """Load the module of the reader with the expression replaced, and never from its bytecode."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree: ast.AST = ast.parse(self.get_data(path), path)
        if fullname == IGNORED["module"]:
            replace = Replace()
            tree = replace.visit(tree)
            if replace.replaced != 1:
                raise SystemExit(f"{path}: {replace.replaced} expressions stand at {IGNORED['position']}")
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__ignored__"] = ignored
        super().exec_module(module)
        if module.__name__ == RESOLVE:
            record_defaults(module)


class Finder:
    """Find the modules of ERNIEKit that are to be changed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in (IGNORED["module"], RESOLVE):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        return spec and importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=Loader(fullname, spec.origin)
        )  # type: ignore[arg-type]


DEFAULTS: dict[str, Any] = {}  # those of the configuration that was resolved last


def record_defaults(module: ModuleType) -> None:
    resolve = module.resolve  # type: ignore[attr-defined]

    def recording(*arguments: Any) -> Any:
        builder = resolve(*arguments)
        DEFAULTS.update(builder._defaults)
        return builder

    module.resolve = recording  # type: ignore[attr-defined]


def ignored(value: Any, key: Any) -> Any:
    """Return the default in place of the value, if the key is the parameter's."""
    name = IGNORED["name"]
    if key != name:
        return value
    if name not in DEFAULTS:  # a section that a test made by itself
        from erniekit.config.registry import PARAMETERS

        DEFAULTS[name] = PARAMETERS[name].default
    return DEFAULTS[name]


if IGNORED:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
