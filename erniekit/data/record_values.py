"""Values of one record's fields, checked as they are taken out of it."""

from __future__ import annotations

import re

from erniekit.data.problems import shorten

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class MalformedError(Exception):
    """Raised while one record is parsed (by one of PARSERS); becomes a RecordProblem with file and line."""

    def __init__(self, field: str, expected: str, got: str) -> None:
        super().__init__(field)
        self.field, self.expected, self.got = field, expected, got


def parse_texts(record: dict, name: str) -> list[str]:
    value = record.get(name)
    if isinstance(value, str):
        return [parse_text(value, name)]
    if not isinstance(value, list) or not value:
        raise MalformedError(name, "a string or a list of strings", describe_value(value))
    return [parse_text(item, f"{name}[{number}]") for number, item in enumerate(value)]


def parse_optional_text(record: dict, name: str) -> str:
    value = record.get(name)
    return "" if value is None else parse_text(value, name)


def parse_text(value: object, name: str, strip: bool = True) -> str:
    """A string that UTF-8 can hold. White space around a turn is dropped, as upstream does: templates bring theirs."""
    if not isinstance(value, str):
        raise MalformedError(name, "a string", describe_value(value))
    if not value.isascii() and (match := _LONE_SURROGATE.search(value)):
        raise MalformedError(name, "Unicode text", f"half of a surrogate pair at character {match.start():,}")
    return value.strip() if strip else value


def parse_flag(value: object, name: str) -> bool:
    if value not in (0, 1):  # true, false, 0.0 and 1.0 are equal to these
        raise MalformedError(name, "0 or 1", shorten(value))
    return bool(value)


def describe_value(value: object) -> str:
    return "nothing" if value is None else shorten(value)


def parse_history(record: dict) -> list[tuple[str, str]]:
    """The earlier questions and answers of an alpaca record."""
    history = record.get("history")
    if history is None:
        return []
    if not isinstance(history, list):
        raise MalformedError("history", "a list of [question, answer] pairs", shorten(history))
    rounds = []
    for number, pair in enumerate(history):
        name = f"history[{number}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise MalformedError(name, "a pair [question, answer]", shorten(pair))
        question, answer = parse_text(pair[0], f"{name}[0]"), parse_text(pair[1], f"{name}[1]")
        if not (question and answer):
            raise MalformedError(name, "two texts", "an empty string")
        rounds.append((question, answer))
    return rounds


def split_system(record: dict, questions: list[str], answers: list[str]) -> tuple[str, list[str], list[str]]:
    """The system text of an erniekit record, and its questions and answers.

    With `is_system`, upstream's older way to give a system text, the first exchange holds it; tgt[0] is unused then.
    """
    system = parse_optional_text(record, "system")
    if parse_flag(record.get("is_system", 0), "is_system"):
        system = system or questions[0]
        questions, answers = questions[1:], answers[1:]
        if not questions:
            raise MalformedError("src", "an exchange after the system text (is_system is 1)", "only the system text")
    for name, texts in (("src", questions), ("tgt", answers)):
        for number, text in enumerate(texts):
            if not text:
                raise MalformedError(f"{name}[{number}]", "a text", "an empty string")
    return system, questions, answers
