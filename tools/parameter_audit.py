#!/usr/bin/env python3
"""Every parameter with the places that read its value and the tests that prove its effect; `--check` fails where one
lacks either.

Both are found in the syntax trees of the sources, so that no comment, string or namesake counts:

- A reader is an expression outside the schema whose type is known to be a section (`config.training.learning_rate`) or
  the whole configuration (`config["seed"]`, `value = config.__getitem__; value("seed")`, a comprehension over
  `fields(SomeDataclass)`). Types follow from annotations, returned types and assignments; what they do not tell
  is not counted. A property of `Config` and a function of the schema that is given a section stand for what they read.
- A proof is a test with the mark `@pytest.mark.proves("name", ...)`; names may be those of a table of the same file
  (`*CHANGES_LOSSES`).
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from erniekit.config.parameter import NOT_IMPLEMENTED, Parameter
from erniekit.config.registry import PARAMETERS, SECTIONS

ROOT = Path(__file__).parents[1]
SCHEMA = "erniekit.config"
CONFIG = f"{SCHEMA}.config.Config"
NAMES = {f"{section.dataclass.__module__}.{section.dataclass.__name__}": set(section.names) for section in SECTIONS}
GETTER = "the method that returns a parameter by name"
MARK = "proves"

Locations = dict[str, list[str]]  # parameter -> "file:line"


@dataclass(frozen=True)
class Reader:
    """An expression that reads a parameter: its file below the root, and where it begins and ends there."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int


@dataclass
class Module:
    """One file: its tree, and what its imports and definitions stand for (`Config`: `erniekit.config.Config`)."""

    name: str
    path: str
    tree: ast.Module
    names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                self.names |= {item.asname or item.name: f"{node.module}.{item.name}" for item in node.names}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.names[node.name] = f"{self.name}.{node.name}"


class Project:
    """What is known of all modules: classes' fields, and the types that functions and methods return."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self.modules = {module.name: module for module in modules}
        self.fields: dict[str, dict[str, str]] = defaultdict(dict)
        self.returns: dict[str, str] = {}
        for module in self.modules.values():
            for node in module.tree.body:
                if isinstance(node, ast.FunctionDef):
                    self._note_return(module, f"{module.name}.{node.name}", node)
                elif isinstance(node, ast.ClassDef):
                    self._note_class(module, node)

    def _note_class(self, module: Module, node: ast.ClassDef) -> None:
        name = f"{module.name}.{node.name}"
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                self.fields[name][item.target.id] = self.annotated(module, item.annotation)
            elif isinstance(item, ast.FunctionDef):
                self._note_return(module, f"{name}.{item.name}", item)

    def _note_return(self, module: Module, name: str, node: ast.FunctionDef) -> None:
        self.returns[name] = self.annotated(module, node.returns)

    def annotated(self, module: Module, annotation: ast.expr | None) -> str:
        """The class that an annotation names ("" for any other): `Config`, `Config | None`."""
        if isinstance(annotation, ast.BinOp):
            return self.annotated(module, annotation.left)
        return self.resolved(module.names.get(annotation.id, "")) if isinstance(annotation, ast.Name) else ""

    def resolved(self, name: str) -> str:
        """Where a name is defined that a package hands on: `erniekit.config.Config` is of its module `config`."""
        package, _, last = name.rpartition(".")
        onward = self.modules[package].names.get(last, name) if package in self.modules else name
        return name if onward == name else self.resolved(onward)


class Reads(ast.NodeVisitor):
    """The parameters that one module reads, with their lines, and which function of it reads them."""

    def __init__(self, project: Project, module: Module, of_the_schema: Mapping[str, set[str]]) -> None:
        self.project, self.module, self.of_the_schema = project, module, of_the_schema
        self.found: list[tuple[str, str, Reader]] = []  # function, parameter, where
        self.calls: list[tuple[str, str, Reader]] = []  # the same, where a function of the schema reads it
        self.types: dict[str, str] = {}
        self.words: dict[str, list[str]] = {}  # a loop's variable -> the names that it goes through
        self.inside = module.name

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._within(node.name, node, {"self": f"{self.module.name}.{node.name}"})

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        annotated = {item.arg: self.project.annotated(self.module, item.annotation) for item in arguments}
        kept = {"self": self.types["self"]} if arguments and arguments[0].arg == "self" and "self" in self.types else {}
        self._within(node.name, node, annotated | kept)

    def _within(self, name: str, node: ast.AST, types: dict[str, str]) -> None:
        before = self.types, self.words, self.inside
        self.types, self.words, self.inside = self.types | types, dict(self.words), f"{self.inside}.{name}"
        self.generic_visit(node)
        self.types, self.words, self.inside = before

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self.types[node.target.id] = self.project.annotated(self.module, node.annotation)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._assign(node.target, node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=False):
                self._assign(one, its)
        elif isinstance(target, ast.Name):
            self.types[target.id] = self.type_of(value)
            self.words[target.id] = self._names_in(value)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        for generator in node.generators:
            if isinstance(generator.target, ast.Name):
                self.words[generator.target.id] = self._names_in(generator.iter)
        self.generic_visit(node)

    def _names_in(self, node: ast.expr) -> list[str]:
        """The names in a sequence, where they are the fields of a class: `[item.name for item in fields(C)]`."""
        if isinstance(node, ast.Name):
            return self.words.get(node.id, [])
        if isinstance(node, ast.ListComp) and isinstance(node.elt, ast.Attribute) and node.elt.attr == "name":
            call = node.generators[0].iter
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "fields":
                return list(self.project.fields.get(self._named(call.args[0]), ()))
        return []

    def type_of(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return self.types.get(node.id, "")
        if isinstance(node, ast.Attribute):
            owner = self.type_of(node.value)
            if owner == CONFIG and node.attr == "__getitem__":
                return GETTER
            return self.project.fields[owner].get(node.attr, "") if owner in self.project.fields else ""
        if isinstance(node, ast.Call):
            return self.project.returns.get(self._named(node.func), "")
        return ""

    def _named(self, node: ast.expr) -> str:
        """The full name of a function, method or class."""
        if isinstance(node, ast.Name):
            return self.project.resolved(self.module.names.get(node.id, ""))
        if isinstance(node, ast.Attribute):
            owner = self.type_of(node.value) or self._named(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return ""

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        owner = self.type_of(node.value)
        if owner in NAMES:
            self._note([node.attr], node)
        elif owner:
            self._note(self.of_the_schema.get(f"{owner}.{node.attr}", ()), node, self.calls)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        if self.type_of(node.value) == CONFIG:
            self._note(self._written(node.slice), node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if self.type_of(node.func) == GETTER and node.args:
            self._note(self._written(node.args[0]), node)
        if isinstance(node.func, ast.Name):
            self._note(self.of_the_schema.get(self._named(node.func), ()), node, self.calls)

    def _written(self, node: ast.expr) -> list[str]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [node.value]
        return self.words.get(node.id, []) if isinstance(node, ast.Name) else []

    def _note(self, names: Iterable[str], node: ast.expr, found: list[tuple[str, str, Reader]] | None = None) -> None:
        end = node.end_lineno or node.lineno, node.end_col_offset or 0
        reader = Reader(self.module.path, node.lineno, node.col_offset, *end)
        found = self.found if found is None else found
        found += [(self.inside, name, reader) for name in names if name in PARAMETERS]


def modules_below(root: Path) -> list[Module]:
    """Every file of the package `root`/erniekit."""
    found = []
    for path in sorted((root / "erniekit").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found.append(Module(name, path.relative_to(root).as_posix(), tree))
    return found


def find_reads(modules: Iterable[Module]) -> Locations:
    """Where the value of each parameter is read, outside the schema."""
    locations: Locations = defaultdict(list)
    for name, readers in _all_reads(modules)[0].items():
        locations[name] = list(dict.fromkeys(f"{reader.path}:{reader.line}" for reader in readers))
    return locations


def find_readers(modules: Iterable[Module]) -> dict[str, list[Reader]]:
    """The expressions that read each parameter; where a function of the schema does, those inside it."""
    outside, calls, inside = _all_reads(modules)
    for name, callers in calls.items():
        outside[name] = [reader for reader in outside[name] if reader not in callers] + inside[name]
    return {name: list(dict.fromkeys(readers)) for name, readers in outside.items()}


Readers = dict[str, list[Reader]]


def _all_reads(modules: Iterable[Module]) -> tuple[Readers, Readers, Readers]:
    """The reads outside the schema, those among them that call a function of the schema, and the schema's own."""
    project = Project(modules)
    of_the_schema: dict[str, set[str]] = defaultdict(set)  # its functions, and what they read of a section
    outside: Readers = defaultdict(list)
    calls: Readers = defaultdict(list)
    inside: Readers = defaultdict(list)
    for module in project.modules.values():
        if module.name.startswith(SCHEMA):
            visitor = Reads(project, module, {})
            visitor.visit(module.tree)
            for function, name, reader in visitor.found:
                of_the_schema[function].add(name)
                inside[name].append(reader)
    for module in project.modules.values():
        if not module.name.startswith(SCHEMA):
            visitor = Reads(project, module, of_the_schema)
            visitor.visit(module.tree)
            for _, name, reader in [*visitor.found, *visitor.calls]:
                outside[name].append(reader)
            for _, name, reader in visitor.calls:
                calls[name].append(reader)
    return outside, calls, inside


def proofs(root: Path) -> Locations:
    """The tests that prove the effect of each parameter, as "file:line", whether they know the parameter or not."""
    locations: Locations = defaultdict(list)
    for path in sorted((root / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tables = {
            node.target.id if isinstance(node, ast.AnnAssign) else node.targets[0].id: _constants(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value
            and isinstance(node.target if isinstance(node, ast.AnnAssign) else node.targets[0], ast.Name)
        }  # fmt: skip
        for function in tree.body:
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
                for name in _proved(function, tables):
                    locations[name].append(f"{path.relative_to(root).as_posix()}:{function.lineno}")
    return locations


def _proved(function: ast.FunctionDef, tables: Mapping[str, list[str]]) -> list[str]:
    names: list[str] = []
    for decorator in function.decorator_list:
        for node in ast.walk(decorator):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == MARK:
                for argument in node.args:
                    if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name):
                        names += tables.get(argument.value.id, [])
                    elif isinstance(argument, ast.Constant):
                        names.append(str(argument.value))
    return list(dict.fromkeys(names))


def _constants(node: ast.expr) -> list[str]:
    """The words of a tuple, list or set, or the keys of a dictionary, that stand in the source."""
    inside = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    return [item.value for item in inside if isinstance(item, ast.Constant) and isinstance(item.value, str)]


def problems(read: Locations, proved: Locations) -> list[str]:
    """A line for every parameter that nobody reads or proves, and every proof of what is no parameter."""
    lines = []
    for name, parameter in PARAMETERS.items():
        if not _is_read(parameter, read):
            lines.append(f"{name}: nothing in erniekit reads it")
        if not proved.get(name):
            lines.append(f'{name}: no test is marked @pytest.mark.{MARK}("{name}")')
    lines += [f"{name}: {location} proves it, and there is no such parameter"
              for name, locations in proved.items() if name not in PARAMETERS for location in locations]  # fmt: skip
    return lines


def _is_read(parameter: Parameter, read: Locations) -> bool:
    """Also where what it stands for is read, and where its verb does not exist."""
    if parameter.stands_for:
        return all(read.get(name) for name in parameter.stands_for)
    return bool(read.get(parameter.name)) or parameter.devices == NOT_IMPLEMENTED


def table(read: Locations, proved: Locations) -> str:
    """One line for each parameter: the places that read it, and its proofs."""
    blocks = []
    for section in SECTIONS:
        blocks.append(f"{section.title}")
        for parameter in section.parameters:
            blocks.append(f"  {parameter.name}  ({parameter.takes_effect})")
            blocks += [f"    read   {location}" for location in read.get(parameter.name, [])]
            for name in parameter.stands_for:
                blocks += [f"    read   as {name}: {location}" for location in read.get(name, [])]
            blocks += [f"    proof  {location}" for location in proved.get(parameter.name, [])]
    return "\n".join(blocks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print what is missing only, and exit with 1 if anything")
    options = parser.parse_args()
    read, proved = find_reads(modules_below(ROOT)), proofs(ROOT)
    missing = problems(read, proved)
    if not options.check:
        print(table(read, proved))
    for line in missing:
        print(f"error: {line}", file=sys.stderr)
    if not missing:
        print(f"{len(PARAMETERS)} parameters, each with a reader and a proof")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
