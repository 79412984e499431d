"""The tool that ignores parameters finds each place that reads one, and makes it return the default."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HOOK = ROOT / "tools" / "ignored"
READER = "erniekit/build/quantization.py"
ALGORITHM = "weight_quantize_algo"


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        yield importlib.import_module("ignored_parameters")


@pytest.fixture
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hook_of_ignored", HOOK / "sitecustomize.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _source_at(reader: Any) -> str:
    lines = (ROOT / reader.path).read_text(encoding="utf-8").splitlines()
    assert reader.line == reader.end_line
    return lines[reader.line - 1][reader.column : reader.end_column]


def test_readers_stand_where_they_are_found(tool: ModuleType) -> None:
    found = {reader.path: _source_at(reader) for _, reader in tool.readers_of(["seed"], unproved=True)}
    assert found["erniekit/build/model.py"] == "config.training.seed"
    assert found["erniekit/cli/chat.py"] == "parameters.training.seed"
    assert len(found) > 5


def test_what_has_no_default_to_fall_back_to_is_left_out(tool: ModuleType) -> None:
    assert tool.readers_of(["output_dir", "rslora_plus"]) == []


def _told(name: str, reader: Any) -> str:
    """The quantization of a configuration, in a process that ignores a parameter at a reader."""
    module = reader.path.removesuffix(".py").replace("/", ".")
    position = [reader.line, reader.column, reader.end_line, reader.end_column]
    script = (
        "from erniekit.config import Config; from erniekit.build.quantization import quantization_from\n"
        "values = dict(model_name_or_path='m', output_dir='o', train_dataset_path='t', lora=True)\n"
        f"config = Config.from_mapping(values | dict({ALGORITHM}='nf4'))\n"
        f"print(quantization_from(config), config.basic.{ALGORITHM})"
    )
    ignored = json.dumps({"name": name, "module": module, "position": position})
    paths = os.pathsep.join([str(HOOK), str(ROOT)])
    environment = os.environ | {"ERNIEKIT_IGNORED": ignored, "PYTHONPATH": paths}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    return run.stdout + run.stderr


def test_a_reader_that_ignores_returns_the_default(tool: ModuleType) -> None:
    readers = {reader.path: reader for _, reader in tool.readers_of([ALGORITHM])}
    assert _told(ALGORITHM, readers[READER]) == "None nf4\n"  # and others read what was written
    assert _told(ALGORITHM, readers["erniekit/build/notes.py"]) == "nf4 nf4\n"
    elsewhere = type(readers[READER])(READER, 1, 0, 1, 3)
    assert "no expression stands at [(1, 0, 1, 3)]" in _told(ALGORITHM, elsewhere)


@pytest.mark.parametrize("source", ["config.training.seed", "config['seed']", "value('seed')", "config[name]"])
@pytest.mark.parametrize(("ignored", "expected"), [("seed", 42), ("beta", 7)])
def test_every_form_of_a_reader_can_ignore(source: str, ignored: str, expected: int, hook: ModuleType) -> None:
    hook.POSITIONS["some"] = {(1, 0, 1, len(source))}
    hook.IGNORED.update(name=ignored, module="some", position=[1, 0, 1, len(source)])
    replace = hook.Replace("some")
    tree = replace.visit(ast.parse(source, mode="eval"))
    assert not replace.missing

    class Seven:
        seed = 7
        training: Any

        def __getitem__(self, name: str) -> int:
            return 7

    config = Seven()
    config.training = config
    names = {"__ignored__": hook.ignored, "config": config, "name": "seed", "value": lambda name: 7}
    assert eval(compile(tree, "some", "eval"), names) == expected
    hook.IGNORED["position"] = [2, 0, 2, 9]
    assert eval(compile(tree, "some", "eval"), names) == 7


def test_tests_of_a_reader_are_its_proofs_and_those_that_mirror_it(tool: ModuleType) -> None:
    (reader,) = (reader for _, reader in tool.readers_of([ALGORITHM]) if reader.path == READER)
    tests = [str(Path(test).relative_to(ROOT)) for test in tool.tests_of(ALGORITHM, reader)]
    assert "tests/build/test_quantization.py" in tests
    assert any(test.startswith("tests/config/") and "::" in test for test in tests)


def test_what_is_left_out_is_still_there(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    unproved, unnoticeable = tool.unproved_readers(), dict(tool.UNNOTICEABLE)
    assert len(unproved) == len(set(unproved)) and not set(unproved) & set(unnoticeable)
    assert all(reason.strip() for reason in unnoticeable.values())
    monkeypatch.setattr(tool, "UNNOTICEABLE", {})
    there = {f"{reader.path} {name}" for name, reader in tool.readers_of(tool.PARAMETERS, unproved=True)}
    assert set(unproved) | set(unnoticeable) <= there


@pytest.mark.slow
def test_tests_that_notice_and_tests_that_do_not(tool: ModuleType, tmp_path: Path) -> None:
    readers = [item for item in tool.readers_of([ALGORITHM]) if item[1].path == READER]
    broken = tmp_path / "test_broken.py"
    broken.write_text("def test_it():\n    assert False\n")
    server = tool.Server(readers)
    try:
        noticing, blind = ROOT / "tests/build/test_quantization.py", ROOT / "tests/test_terminal.py"
        results = [server.run_ignoring(*readers[0], [str(file)], "not slow") for file in (noticing, blind, broken)]
    finally:
        server.close()
    assert results[0] == "noticed"
    assert results[1].startswith("can be ignored")
    assert results[2].endswith("test_broken.py::test_it fails with nothing ignored, too")
