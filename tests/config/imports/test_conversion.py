"""Tables: what becomes of a value, and how the file is written."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from erniekit.config.imports.conversion import Conversion, combined, idle, only, taken, yaml_value
from erniekit.config.imports.settings import Setting
from erniekit.config.parse import SourceLocation
from erniekit.errors import ConfigurationError

TABLE = {
    "rate": taken(1e-4, "learning_rate"),
    "steps": taken(10, "max_steps", "as there"),
    "a.mode": only("x", "it is not built", "y"),
    "a.workers": idle(4, "the machine decides"),
    "a.seed": combined(3),
}


def conversion(**values: Any) -> Conversion:
    settings = [
        Setting(key.replace("__", "."), (), value, SourceLocation("f.yaml", line))
        for line, (key, value) in enumerate(values.items(), 1)
    ]
    return Conversion(settings, TABLE, "f.yaml")


def followed(**values: Any) -> Conversion:
    result = conversion(**values)
    result.follow_table()
    result.raise_if_any()
    return result


def test_defaults_of_the_other_program_are_written_out() -> None:
    assert followed().parameters == {"learning_rate": 1e-4, "max_steps": 10}
    assert followed(rate=2e-4).yaml(["Head"]).splitlines() == [
        "# Head",
        "",
        "max_steps: 10   # steps, its default: as there",
        "learning_rate: 0.0002   # rate",
    ]


def test_keys_without_effect_are_told_where_they_differ_from_the_default() -> None:
    assert followed(a__workers=4).told == []
    assert followed(a__workers=8).told == ["a.workers: 8: the machine decides"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"a__mode": "z"}, "f.yaml:1: `a.mode`: z is not possible: it is not built"),
        ({"a__mod": "z"}, "f.yaml:1: `a.mod`: unknown key; did you mean `a.mode`?"),
        ({"rate": "fast"}, "f.yaml:1: `rate`: as `learning_rate` expected a finite number, got fast"),
        ({"steps": -5}, "f.yaml:1: `steps`: as `max_steps` must be at least -1 (optimizer steps), got -5"),
        ({"steps": -5, "b": 1}, "2 problems in the configuration"),
    ],
)
def test_what_is_not_built_is_refused_with_its_line(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        followed(**values)
    assert told in str(caught.value)


def test_accepted_values_are_listed_at_the_end() -> None:
    result = followed(a__mode="y", rate=2e-4, a__workers=8)
    assert result.told == ["a.workers: 8: the machine decides"]
    assert result.yaml([]).splitlines()[-1] == "# - what is done here anyway, or is in the lines above: a.mode"


def test_empty_sections_are_no_keys() -> None:
    assert followed(a=None).parameters["max_steps"] == 10
    with pytest.raises(ConfigurationError, match="`a`: unknown key"):
        followed(a=1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-5, "1.0e-05"),
        (0.25, "0.25"),
        (2.0, "2.0"),
        (True, "true"),
        (None, "null"),
        ("a/b.lst", "a/b.lst"),
        ("a: b", '"a: b"'),
        ("a #b", '"a #b"'),
        ("12", '"12"'),
        ([8, 8, 6], "8,8,6"),
        ([0.0, 0.3], "0.0,0.3"),
        ([], "[]"),
    ],
)
def test_values_are_written_so_that_they_are_read_back(value: Any, text: str) -> None:
    assert yaml_value(value) == text
    if not isinstance(value, (float, list)):  # numbers such as 1e-05 and lists are read by their parameters
        assert yaml.safe_load(text) == value


def test_paths_are_a_block_where_there_are_several() -> None:
    result = conversion()
    result.write("train_dataset_path", ["a", "b, c"])
    result.write("eval_dataset_path", ["d, e"])
    assert yaml.safe_load(result.yaml([])) == {"train_dataset_path": ["a", "b, c"], "eval_dataset_path": ["d, e"]}
