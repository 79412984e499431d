"""Keep secrets of the environment out of what the page shows."""

from __future__ import annotations

import os
import re

_NAMES = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)")
_SHORTEST = 8  # characters; a shorter value is a word that occurs by chance
MASK = "[secret]"


def masked(text: str) -> str:
    """Return the text without the values of environment variables that are named like secrets, such as HF_TOKEN."""
    values = {value for name, value in os.environ.items() if _NAMES.search(name.upper()) and len(value) >= _SHORTEST}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text
