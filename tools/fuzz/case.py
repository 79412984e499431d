"""One hostile input: its files, the commands it is given to, and what is wrong with their answers."""

from __future__ import annotations

import contextlib
import io
import json
import re
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

SECONDS = 30.0  # that one command may take; on a quiet machine the slowest takes five
MEMORY = 1 << 30  # bytes that the peak of the process may grow by in one command
OF_VALUES = re.compile(r"NaN|infinite|not finite")  # `erniekit validate` reads no weights
CONTROL = {*map(chr, range(32)), "\x7f", *map(chr, range(0x80, 0xA0))} - {"\n", "\t", "\r"}


@dataclass
class Case:
    """Commands that one input is given to, and the files of it, below a folder.

    Attributes:
        files: name below the folder -> content.
        commands: words of the command line; `{folder}` stands for the folder.
        agree: whether all commands have to accept the input, or all have to refuse it; only what a value of a weight
            says may be refused later (`OF_VALUES`).
    """

    files: dict[str, bytes]
    commands: list[list[str]]
    agree: bool = False
    links: dict[str, str] = field(default_factory=dict)  # name below the folder -> a file that stands there unchanged


def write_case(case: Case, folder: Path) -> None:
    """Write the files of a case, and its commands as `case.json`."""
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for name, target in case.links.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.symlink_to(Path(target).absolute())
    text = json.dumps({"commands": case.commands, "agree": case.agree, "links": case.links}, indent=1)
    (folder / "case.json").write_text(text + "\n", encoding="utf-8")


def read_case(folder: Path) -> Case:
    """Read what `write_case` wrote."""
    stored = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path.name != "case.json"
    }
    return Case(files, stored["commands"], stored["agree"], stored["links"])


def problem_of(case: Case, folder: Path, shown: bool = False) -> str:
    """Run the commands of a case in this process; return what is wrong with the answers, or ""."""
    codes = []
    for words in case.commands:
        command = [word.replace("{folder}", str(folder)) for word in words]
        begun, peak = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        code, text = answer_of(command)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
        codes.append(0 if OF_VALUES.search(text) else code)
        if shown:
            print(f"$ erniekit {' '.join(command)}\n{text}exit code {code}", file=sys.stderr)
        problem = wrong_with(code, text)
        if not problem and time.monotonic() - begun > SECONDS:
            problem = f"it took {time.monotonic() - begun:.0f} s"
        if not problem and grown > MEMORY:
            problem = f"it took {grown >> 20:,} MB"
        if problem:
            return f"{words[0]}: {problem}"
    if case.agree and len(set(codes)) > 1:
        return "; ".join(f"{words[0]} ends with {code}" for words, code in zip(case.commands, codes, strict=True))
    return ""


def answer_of(command: list[str]) -> tuple[int, str]:
    """Run a command of erniekit in this process; return its exit code and what it has printed."""
    from erniekit.cli import main as erniekit

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = erniekit(command)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException as error:
            return 1, f"{out.getvalue()}Traceback: {type(error).__name__}: {error}"
    return code, out.getvalue()


def wrong_with(code: int, text: str) -> str:
    """Return what no answer of the command line may be, or ""."""
    if "Traceback" in text:
        return f"a traceback: {text.strip().splitlines()[-1][:200]}"
    if code not in (0, 2):
        return f"exit code {code}: {text.strip()[-200:]!r}"
    if CONTROL & set(text):
        return f"control characters: {sorted(CONTROL & set(text))}"
    return ""
