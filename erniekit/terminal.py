"""Make text from data files and models safe to print to a terminal."""

from __future__ import annotations

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def escape_control_characters(text: str) -> str:
    r"""Replace every control character but newline and tab by `\\xNN`, so that the text cannot control the terminal."""
    return text.translate(_ESCAPED)
