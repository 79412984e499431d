"""The page says of a text what `erniekit validate` says of its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.cli import main
from erniekit.ui.check import answer, check_text
from erniekit.ui.workspace import Workspace
from tests.ui.conftest import CONFIGURATION

WRONG = (
    CONFIGURATION.replace("max_steps: 4", "max_steps: many").replace("stage: SFT", "stage: STF") + "lerning_rate: 1\n"
)


def test_a_valid_text_has_values_and_origins(workspace: Workspace) -> None:
    shown = answer(CONFIGURATION, check_text(CONFIGURATION, "sft.yaml", workspace))
    assert shown["valid"] and shown["problems"] == []
    assert shown["values"]["max_steps"] == {"text": "4", "origin": "sft.yaml:9", "set": True}
    assert shown["written"]["learning_rate"] == "1.0e-3"


def test_problems_are_the_lines_of_validate_at_their_parameters(
    workspace: Workspace, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = check_text(WRONG, "sft.yaml", workspace).problems
    assert {problem["name"] for problem in problems} == {"max_steps", "stage", "lerning_rate"}
    (folder / "sft.yaml").write_text(WRONG, encoding="utf-8")
    assert main(["validate", "sft.yaml"]) == 2
    told = capsys.readouterr().err
    for problem in problems:
        assert f"sft.yaml:{problem['line']}: {problem['text']}" in told or problem["text"] in told
    assert told.count("sft.yaml:") == len(problems)


def test_missing_files_and_checks_of_preflight_are_told(workspace: Workspace, folder: Path) -> None:
    text = CONFIGURATION.replace("data/train.jsonl", "data/none.jsonl")
    (problem,) = check_text(text, "sft.yaml", workspace).problems
    assert problem["name"] == "train_dataset_path" and "does not exist" in problem["text"]
    problem, *_ = check_text(CONFIGURATION + "tensor_parallel_degree: 3\n", "sft.yaml", workspace).problems
    assert problem["name"] == "tensor_parallel_degree" and "does not divide" in problem["text"]


def test_paths_elsewhere_are_refused_before_anything_is_looked_at(workspace: Workspace, folder: Path) -> None:
    (folder / "data" / "link.jsonl").symlink_to("/etc/hosts")
    for path in ("/etc/hosts", "../x.jsonl", "data/link.jsonl"):
        text = CONFIGURATION.replace("data/train.jsonl", path)
        (problem,) = check_text(text, "sft.yaml", workspace).problems
        assert problem["name"] == "train_dataset_path" and "lies outside of" in problem["text"]
        assert "does not exist" not in problem["text"]


@pytest.mark.parametrize("text", ["a: [", "- a", "a: &x [*x]", "\x00", "x" * 100_000, "[" * 200])
def test_hostile_texts_have_a_problem_and_no_traceback(workspace: Workspace, text: str) -> None:
    shown = answer(text, check_text(text, "sft.yaml", workspace))
    assert shown["problems"] and not shown["valid"]
