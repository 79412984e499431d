"""What others wrote cannot steer the terminal, and its edge breaks no words."""

from __future__ import annotations

import ast
import io
import logging
import sys
from pathlib import Path

import pytest

from erniekit.cli import main
from erniekit.errors import ModelFileError
from erniekit.log import console_logging
from erniekit.terminal import colours_of, escape_control_characters, wrapped


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_break_between_words_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    path = "/" + "folder/" * 6 + "file-with-hyphens.jsonl"
    text = f"short  line\n  a line of many words, and {path} stays whole"
    assert wrapped(text, io.StringIO()) == text
    shown = wrapped(text, Terminal())
    assert shown.splitlines() == [
        "short  line",
        "  a line of many words, and",
        f"      {path}",
        "      stays whole",
    ]
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    with console_logging():
        logging.getLogger("erniekit.x").info("a line of many words that reaches the edge")
    assert max(map(len, terminal.getvalue().splitlines())) <= 30


PACKAGE = Path(__file__).parents[1] / "erniekit"


def test_control_characters_are_shown_not_obeyed() -> None:
    assert escape_control_characters("\x1b[2J\x07\r\x7f\x9b1m\x00") == r"\x1b[2J\x07\x0d\x7f\x9b1m\x00"


def test_other_text_is_left_as_it_is() -> None:
    text = "Größe\t1\n你好 🙂 \\ é"
    assert escape_control_characters(text) == text


HOSTILE = "\x1b[2J\x1b]0;title\x07"


def test_errors_and_log_lines_are_safe_wherever_they_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    error = ModelFileError(f"{HOSTILE}: no such\n  tensor")
    assert str(error) == "\\x1b[2J\\x1b]0;title\\x07: no such\n  tensor" == f"{error}"
    with console_logging():
        logging.getLogger("erniekit.any").warning(f"skipped {HOSTILE}")
    assert capsys.readouterr().out == "warning: skipped \\x1b[2J\\x1b]0;title\\x07\n"


@pytest.mark.parametrize(
    "content",
    [
        f'"{HOSTILE}": 1'.encode("unicode_escape").decode().replace("\\x07", "\\a"),
        "output_dir: \"\\e[2Jout\"\nseed: 3\nmodel_name_or_path: \"m\\e[1m\"",
        "learning_rate: \"\\e[31mfast\"",
        "lr_scheduler_type: \"\\e[31mfast\"",
        "train_dataset_path: \"\\e[31m.jsonl\"",
        "\"\\e[31m",
    ],
)  # fmt: skip
@pytest.mark.parametrize("words", ["validate FILE", "train FILE", "preview FILE", "validate FILE --all --data"])
def test_a_configuration_cannot_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    file = tmp_path / "a\x1b[1mb.yaml"
    file.write_text(content)
    main([word.replace("FILE", str(file)) for word in words.split()])
    shown = capsys.readouterr()
    assert shown.out + shown.err and "\x1b" not in shown.out + shown.err
    main([HOSTILE])
    assert "\x1b" not in capsys.readouterr().err


def test_a_traceback_is_safe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    main(["version"])
    error = RuntimeError(HOSTILE)
    sys.excepthook(RuntimeError, error, None)
    assert capsys.readouterr().err == "RuntimeError: \\x1b[2J\\x1b]0;title\\x07\n"


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert colours_of(Terminal()).first("x") == "\x1b[1;32mx\x1b[0m"
    assert colours_of(io.StringIO()).first("x") == "x"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert colours_of(Terminal()).second("x") == "x"


OWN = {
    "HELP", "label",  # constants
    "f'error: {error}'",  # a UserError, which escapes itself
    "f'error: standard output cannot be written: {output.failure.strerror}'",
    "f'all ranks were ended; the output of each: {said}'",
}  # fmt: skip
# Modules whose prints are safe for another reason.
SAFE = {
    "cli/docs.py": "names of generated files",
    "cli/env.py": "JSON, and titles of its own",
    "cli/help.py": "its own text",
    "cli/params.py": "the schema's text",
    "cli/plot.py": "runners/plot.py escapes the names of runs",
    "cli/preview.py": "runners/preview_rows.py escapes what it quotes, between colours or in JSON",
    "cli/rewards.py": "runners/rewards.py escapes its table; JSON",
    "cli/validate.py": "its report is escaped as a whole",
    "cli/version.py": "its own version",
    "environment.py": "a path of ours",
    "log.py": "the formatter escapes",
    "runners/score.py": "JSON",
}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_printed_is_escaped(path: Path) -> None:
    """A constant, an error of ours, or a text that goes through `escape_control_characters`."""
    if str(path.relative_to(PACKAGE)) in SAFE:
        return
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print" and call.args:
            source = ast.unparse(call.args[0])
            safe = isinstance(call.args[0], ast.Constant) or "escape_control_characters(" in source or source in OWN
            assert safe, f"{path}:{call.lineno}: print({source}) may show what others wrote"
