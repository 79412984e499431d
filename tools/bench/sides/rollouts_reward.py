"""The reward of both sides of a comparison of rollouts: the share of letters, which differs between random answers."""

from __future__ import annotations


def letters(completions: list[str], **_: object) -> list[float]:
    return [sum(map(str.isalpha, text)) / max(1, len(text)) for text in completions]
