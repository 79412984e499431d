"""A form changes one line of a text and leaves the rest as it is."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.config.registry import PARAMETERS
from erniekit.errors import ConfigurationError
from erniekit.ui.yaml_text import with_value, written_values

TEXT = """\
# begins
stage: SFT   # what
train_dataset_path:
  - a.jsonl
  - b.jsonl
# between
seed: 42

output_dir: "out: put"
"""


def change(text: str, name: str, value: str | None) -> str:
    return with_value(text, PARAMETERS[name], value)


def test_written_values_are_those_of_fields() -> None:
    assert written_values(TEXT) == {
        "stage": "SFT",
        "train_dataset_path": "a.jsonl, b.jsonl",
        "seed": "42",
        "output_dir": "out: put",
    }
    assert written_values("a: [") == written_values("- a") == written_values("") == {}


def test_a_scalar_keeps_its_comment() -> None:
    assert change(TEXT, "stage", "DPO") == TEXT.replace("SFT", "DPO")


def test_a_list_is_replaced_and_what_follows_stays() -> None:
    changed = change(TEXT, "train_dataset_path", "c.jsonl")
    assert changed == TEXT.replace("train_dataset_path:\n  - a.jsonl\n  - b.jsonl", "train_dataset_path: c.jsonl")


def test_a_line_is_removed_with_its_comment_or_added() -> None:
    assert change(TEXT, "stage", None) == TEXT.replace("stage: SFT   # what\n", "")
    assert change(TEXT, "seed", None) == TEXT.replace("seed: 42\n", "")
    assert change(TEXT, "max_steps", "10") == TEXT + "max_steps: 10\n"
    assert change("seed: 1", "max_steps", "10") == "seed: 1\nmax_steps: 10\n"
    assert change("", "seed", "1") == "seed: 1\n" and change("", "seed", None) == ""


def test_an_empty_value_and_a_block_of_text_are_replaced() -> None:
    assert change("seed:\nstage: SFT\n", "seed", "1") == "seed: 1\nstage: SFT\n"
    assert change("output_dir: |\n  a\n  b\nseed: 1\n", "output_dir", "x") == "output_dir: x\nseed: 1\n"


@pytest.mark.parametrize(
    ("name", "typed", "line"),
    [
        ("learning_rate", "1e-4", "learning_rate: 1e-4"),
        ("learning_rate", "many", "learning_rate: many"),
        ("output_dir", "2024", 'output_dir: "2024"'),
        ("output_dir", "yes", 'output_dir: "yes"'),
        ("output_dir", "a # b", 'output_dir: "a # b"'),
        ("output_dir", "a: b", 'output_dir: "a: b"'),
        ("train_dataset_path", "[a.jsonl, b.jsonl]", "train_dataset_path: [a.jsonl, b.jsonl]"),
        ("packing", "true", "packing: true"),
        ("max_steps", "{a: 1}", 'max_steps: "{a: 1}"'),
        ("max_steps", "!!python/object:os.system x", 'max_steps: "!!python/object:os.system x"'),
    ],
)
def test_values_are_quoted_where_they_would_mean_something_else(name: str, typed: str, line: str) -> None:
    assert change("", name, typed) == f"{line}\n"


@given(value=st.text(min_size=1, max_size=40).filter(str.strip))
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back_and_other_lines_stay(value: str) -> None:
    changed = change(TEXT, "output_dir", value)
    assert yaml.safe_load(changed)["output_dir"].strip() == value.strip()
    assert changed.startswith(TEXT[: TEXT.index("output_dir")])


@pytest.mark.parametrize("text", ["a: [", "- a", "{seed: 1}", "a: 1\n---\nb: 2", "x: &a 1\ny: *b"])
def test_a_text_that_is_no_list_of_lines_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        change(text, "seed", "2")


@pytest.mark.parametrize("text", ["seed: &x [*x]\n", "seed: &x\n- *x\n", "a: &a [1]\nseed: [*a, *a]\n"])
def test_values_that_contain_themselves_are_shown_and_replaced(text: str) -> None:
    assert "seed" in written_values(text)
    assert change(text, "seed", "2").endswith("seed: 2\n")
