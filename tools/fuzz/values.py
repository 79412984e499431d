"""Values and bytes that programs trip over."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

NUMBERS = [
    0,
    1,
    -1,
    2**31 - 1,
    2**31,
    2**63 - 1,
    2**63,
    10**22,
    10**400,
    0.5,
    -0.0,
    1e308,
    1e-308,
    math.inf,
    -math.inf,
    math.nan,
]
TEXTS = [
    "", " ", "none", "null", "true", "no", "~", "~nouser/x", "/", ".", "..", "/dev/null", "/etc/passwd", "a" * 300, "x/" * 2000,
    "\x00", "\x1b[31mred", "\u202eevil", "\ufeff", "\ud800", "é" * 10, "٣", "１２", "1e5", "0x10", "1_000", "{}", "[]", "${HOME}",
    "%s%n", "-1", "<|im_end|>", "</s>", "<unk>", "\r\n", "\n", "\t", "'", '"', "\\", "🙂",
]  # fmt: skip


def any_value(draw: Random, depth: int = 3) -> Any:
    """Return a value of JSON, at most `depth` levels deep."""
    kind = draw.randrange(7 if depth else 4)
    if kind == 0:
        return draw.choice(NUMBERS)
    if kind in (1, 2):
        return draw.choice(TEXTS)
    if kind == 3:
        return draw.choice([True, False, None])
    if kind == 4:
        return [any_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    if kind == 5:
        return {draw.choice(TEXTS): any_value(draw, depth - 1) for _ in range(draw.randrange(4))}
    nested: Any = draw.choice(TEXTS)
    for _ in range(draw.choice([5, 50, 200])):
        nested = [nested]
    return nested


def changed(value: Any, draw: Random) -> Any:
    """Return a JSON value with one place of it changed: replaced, dropped, doubled or renamed."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        how = draw.randrange(6)
        if how == 0:
            return {other: item for other, item in value.items() if other != key}
        if how == 1:
            return {
                draw.choice([*TEXTS, key.upper(), key[:-1]]) if other == key else other: item
                for other, item in value.items()
            }
        return {other: changed(item, draw) if other == key else item for other, item in value.items()}
    if isinstance(value, list) and value and draw.random() < 0.85:
        place = draw.randrange(len(value))
        how = draw.randrange(5)
        if how == 0:
            return value[:place] + value[place + 1 :]
        if how == 1:
            return [*value, value[place]]
        return [changed(item, draw) if index == place else item for index, item in enumerate(value)]
    if isinstance(value, str) and value and draw.random() < 0.3:
        place = draw.randrange(len(value))
        return value[:place] + draw.choice(TEXTS) + value[place:]
    return any_value(draw)


def as_json(value: Any) -> bytes:
    """Write JSON, with what JSON has no words for as programs write it."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        text = "[" * 5000
    return text.encode("utf-8", "surrogatepass")


def damaged(content: bytes, draw: Random) -> bytes:
    """Return bytes that are cut, doubled, overwritten, or in another encoding."""
    how = draw.randrange(9)
    place = draw.randrange(len(content) + 1)
    if how == 0:
        return content[:place]
    if how == 1:
        return content[:place] + draw.randbytes(draw.randrange(1, 9)) + content[place:]
    if how == 2:
        return content[:place] + draw.choice(TEXTS).encode("utf-8", "surrogatepass") + content[place:]
    if how == 3:
        return content.decode("utf-8", "replace").encode(
            draw.choice(["utf-16", "utf-16-le", "gbk", "utf-8-sig"]), "replace"
        )
    if how == 4:
        return content.replace(b"\n", b"\r\n")
    if how == 5:
        return content + content[:place]
    if how == 6 and content:
        place = min(place, len(content) - 1)
        return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]
    if how == 7:
        return b""
    return content[place:] + content[:place]
