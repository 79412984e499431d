"""Make text fit for a terminal: no control characters from data files and models, no words broken at its edge."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Callable
from typing import NamedTuple, TextIO

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def escape_control_characters(text: str) -> str:
    r"""Replace every control character but newline and tab by `\\xNN`, so that the text cannot control the terminal."""
    return text.translate(_ESCAPED)


def wrapped(text: str, stream: TextIO) -> str:
    """Return `text` with its lines broken between words at the width of the terminal; as it is for other streams."""
    return wrap_lines(text, shutil.get_terminal_size().columns) if stream.isatty() else text


def wrap_lines(text: str, width: int) -> str:
    """Break lines that are longer than `width` between words; what follows is indented."""
    return "\n".join(_wrapped_line(line, width) for line in text.split("\n"))


def _wrapped_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip(" ")) + 4)
    # a path stays whole: it may be copied
    return textwrap.fill(
        line,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        expand_tabs=False,
        replace_whitespace=False,
    )


class Colours(NamedTuple):
    """Functions that colour a text: the first speaker's, the second one's."""

    first: Callable[[str], str]
    second: Callable[[str], str]


def colours_of(stream: TextIO) -> Colours:
    """Return colours for a terminal; none for other streams, where NO_COLOR is set, and on a terminal without them."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return Colours(str, str)
    return Colours(lambda text: f"\x1b[1;32m{text}\x1b[0m", lambda text: f"\x1b[1;34m{text}\x1b[0m")
