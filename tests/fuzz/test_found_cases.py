"""Hostile input that `tools/fuzz` has drawn: the first cases of each target, and those that once were findings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from erniekit.data.templates import render_process

ROOT = Path(__file__).parents[2]
FOUND = sorted(path.parent for path in (Path(__file__).parent / "cases").rglob("case.json"))
sys.path.insert(0, str(ROOT / "tools" / "fuzz"))

from case import Case, problem_of, read_case, write_case  # noqa: E402
from run import TARGETS, case_of  # noqa: E402


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(render_process, "SECONDS", 0.5)


@pytest.mark.parametrize("folder", FOUND, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_what_was_found_is_answered(folder: Path, tmp_path: Path) -> None:
    case = read_case(folder)
    write_case(case, tmp_path)
    assert problem_of(case, tmp_path) == ""


@pytest.mark.parametrize("target", TARGETS)
def test_the_first_cases_are_answered(target: str, tmp_path: Path) -> None:
    for number in range(8):
        case = case_of(target, 1, number)
        write_case(case, tmp_path / str(number))
        assert problem_of(case, tmp_path / str(number)) == "", f"{target} --seed 1 --case {number}"


def test_a_case_is_drawn_alike_and_kept_as_it_is(tmp_path: Path) -> None:
    for target in TARGETS:
        case = case_of(target, 1, 3)
        assert case == case_of(target, 1, 3) != case_of(target, 2, 3)
        write_case(case, tmp_path / target)
        assert read_case(tmp_path / target) == case


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        ((1, "error: x"), "exit code 1"),
        ((0, "a\x1bb"), "control characters"),
        ((1, "Traceback: KeyError"), "a traceback"),
    ],
)
def test_wrong_answers_are_findings(
    answer: tuple[int, str], wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("case.answer_of", lambda command: answer)
    assert wrong in problem_of(Case({}, [["validate"]]), tmp_path)


def test_verdicts_that_differ_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("case.answer_of", lambda command: (len(command) - 1, ""))
    case = Case({}, [["validate"], ["generate", "1", "2"]], agree=True)
    assert problem_of(case, tmp_path) == "validate ends with 0; generate ends with 2"
