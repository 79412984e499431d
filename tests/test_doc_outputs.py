"""Pages show what their commands print: the tool that writes it, and that nobody has edited it since by hand."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from erniekit.cli import main

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("outputs", ROOT / "tools/docs/outputs.py")
assert _spec is not None and _spec.loader is not None
outputs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(outputs)

PAGE = """Before.
<!-- output of: erniekit env; lines: ^loss|end -->
```text
old
```
```text
by hand
```
"""


def test_a_block_holds_the_lines_that_are_asked_for() -> None:
    commands = []

    def run(command: str) -> str:
        commands.append(command)
        return "noise\nloss 1\n  indented\n  at the end\nloss 2\nmore\n"

    text = outputs.updated(PAGE, run)
    assert commands == ["erniekit env"]
    block = "```text\n$ erniekit env\n...\nloss 1\n  ...\n  at the end\nloss 2\n```\n"
    assert block + "```text\nby hand\n```" in text
    assert outputs.updated(text, run) == text
    with pytest.raises(ValueError, match="no line matches"):
        outputs.updated(PAGE, lambda command: "nothing of it")


BLOCKS = [block for page in sorted((ROOT / "docs").glob("*.md")) for block in outputs.BLOCK.finditer(page.read_text())]


def test_the_shown_lines_are_those_that_their_comment_asks_for() -> None:
    assert len(BLOCKS) > 5
    for block in BLOCKS:
        command, *lines = (line for line in block["shown"].splitlines() if line.strip() != "...")
        assert command == f"$ {block['command']}" and lines, f"{block['command']}: run tools/docs/outputs.py"
        assert [line for line in lines if not re.search(block["lines"], line)] == []


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if " validate " in block["command"]], ids=lambda block: block["command"]
)
def test_pages_show_what_validate_prints(
    block: re.Match[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other commands need a trained model: tools/docs/outputs.py."""
    monkeypatch.chdir(ROOT)
    main(block["command"].split()[1:])
    shown = capsys.readouterr()
    expected = outputs.selected(shown.out + shown.err, block["lines"])
    assert block["shown"].partition("\n")[2] == expected, f"run tools/docs/outputs.py: {block['command']}"
