"""Paths that no file can have are refused where the configuration is read, whatever parameter names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.cli import main
from erniekit.config.registry import PARAMETERS
from erniekit.config.values import LARGEST_INTEGER, path_problem
from tests.config.samples import load, problems

QUICKSTART = str(Path(__file__).parents[2] / "examples/configs/quickstart/sft.yaml")
PATHS = [name for name, parameter in PARAMETERS.items() if parameter.kind.names_path]


def test_every_parameter_that_names_files_is_checked() -> None:
    named = {name for name, item in PARAMETERS.items() if item.kind.title != "boolean"}
    named = {name for name in named if name.endswith(("_path", "_dir", "from_checkpoint"))}
    assert set(PATHS) == named | {"codec", "codec_features", "codec_centroids", "speech_judge"}


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("x" * 256, "a name of 256 bytes"),
        ("é" * 128, "a name of 256 bytes"),
        ("/".join(["folder"] * 700), "bytes long"),
        ("~nobody-of-this-name/x", "there is no such user"),
        ("a\0b", "NUL"),
        ("\ud800", "not text"),
    ],
)
def test_a_path_that_no_file_can_have_is_refused(name: str, path: str, why: str) -> None:
    assert f"`{name}`" in (said := problems(**{name: path})) and why in said


@pytest.mark.parametrize("path", ["data.jsonl", "x" * 255, "~/data", "~", "org/name:split", "a b/ü.jsonl", "~x/y"[1:]])
def test_other_paths_are_not_touched(path: str) -> None:
    assert path_problem(path) == ""


def test_a_long_list_of_files_on_the_command_line_is_one_override(capsys: pytest.CaptureFixture[str]) -> None:
    files = ",".join(f"shard-{number:05}.jsonl" for number in range(30))
    assert main(["validate", QUICKSTART, f"train_dataset_path={files}"]) == 2
    error = capsys.readouterr().err
    assert "shard-00000.jsonl does not exist" in error and "shard-00029.jsonl does not exist" in error


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "x" * 300])
@pytest.mark.parametrize(
    "words",
    [
        ["train", "{}"], ["eval", "{}"], ["preview", "{}"], ["validate", "{}"], ["pack", QUICKSTART, "--output", "{}"],
        ["export", "{}", "--output", "o"], ["export", QUICKSTART, "--output", "{}"], ["split", "{}", "--output", "o"],
        ["generate", "{}", "--prompt", "p"], ["chat", "{}"],
    ],
)  # fmt: skip
def test_impossible_paths_of_the_command_line_are_no_tracebacks(
    path: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(path) for word in words]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "name", [name for name, item in PARAMETERS.items() if item.kind.schema.get("type") == "integer"]
)
def test_integers_have_a_largest_value(name: str) -> None:
    """Beyond it sums overflow, and 64-bit counters later; "10**22 steps" is a slip."""
    assert "at most" in problems(**{name: LARGEST_INTEGER + 1}) and "at most" in problems(**{name: 1e300})


def test_digits_of_other_scripts_are_no_numbers() -> None:
    assert "expected a finite number" in problems(learning_rate="٣")
    assert "expected an integer" in problems(max_steps="٣")
    assert "is the exponent missing?" in load(learning_rate=5).messages[0]
    assert "at most" in problems(learning_rate=9223372036854775808)
    assert load(learning_rate="3e-5").training.learning_rate == 3e-5
