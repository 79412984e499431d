"""Text of others (data, models) on its way to a terminal."""

from __future__ import annotations

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def escape_control_characters(text: str) -> str:
    """The text with every control character but newline and tab as `\\xNN`, so that it cannot steer a terminal."""
    return text.translate(_ESCAPED)
