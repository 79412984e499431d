"""Calls of tools are found in answers of each family, whole and as they grow."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from erniekit.serving.answers import Answer, AnswerPiece
from erniekit.serving.shapes import ChatShape
from erniekit.serving.tool_calls import call_format, split_calls

CASES = {
    "hermes": (
        "{%- if tools %}<tool_call>{%- endif %}",
        'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
        [("weather", {"city": "Köln"}), ("time", {})],
        "Let me look.",
    ),
    "glm": (
        "<tool_call>{name}<arg_key>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        [("weather", {"city": "Köln", "days": 3})],
        "",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=",
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>",
        [("weather", {"city": "Köln"})],
        "",
    ),
    "mistral": (
        "[TOOL_CALLS]",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln"}}, {"name": "time", "arguments": {}}]',
        [("weather", {"city": "Köln"}), ("time", {})],
        "",
    ),
    "mistral with arguments": (
        "[TOOL_CALLS]",
        '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}[TOOL_CALLS]time[ARGS]{}',
        [("weather", {"city": "Köln"}), ("time", {})],
        "",
    ),
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "Wait.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Köln"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [("weather", {"city": "Köln"})],
        "Wait.",
    ),
    "llama3": (
        'Respond in the format {"name": function name, "parameters": dictionary}',
        '{"name": "weather", "parameters": {"city": "Köln"}}',
        [("weather", {"city": "Köln"})],
        "",
    ),
}
every_family = pytest.mark.parametrize(("template", "answer", "calls", "before"), CASES.values(), ids=CASES)


@every_family
def test_calls_are_found(template: str, answer: str, calls: list, before: str) -> None:
    form = call_format([template])
    text, found = split_calls(answer, form)
    assert text == before and [(call.name, json.loads(call.arguments)) for call in found] == calls
    choice = ChatShape(SimpleNamespace(), form).choice(0, Answer(answer))
    assert choice["finish_reason"] == "tool_calls" and len(choice["message"]["tool_calls"]) == len(calls)
    assert choice["message"]["content"] == (before or None)


@every_family
@pytest.mark.parametrize("length", [1, 7, 1000])
def test_calls_are_told_when_a_stream_has_ended(
    template: str, answer: str, calls: list, before: str, length: int
) -> None:
    shape = ChatShape(SimpleNamespace(), call_format([template]))
    pieces = [AnswerPiece(answer[start : start + length]) for start in range(0, len(answer), length)]
    chunks = [chunk for piece in [*pieces, AnswerPiece("", finished="stop")] for chunk in shape.pieces(0, piece)]
    deltas = [chunk["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == before
    told = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in told] == calls
    assert [call["index"] for call in told] == list(range(len(calls)))
    assert chunks[-1]["finish_reason"] == "tool_calls" and len({call["id"] for call in told}) == len(calls)


@pytest.mark.parametrize("answer", ["<tool_call>no JSON</tool_call>", "3 < 4", "<tool_call>", "plain {text}"])
def test_what_is_no_call_stays_text(answer: str) -> None:
    form = call_format(["<tool_call>"])
    assert split_calls(answer, form) == (answer, [])
    shape = ChatShape(SimpleNamespace(), form)
    chunks = [chunk for piece in [*map(AnswerPiece, answer), AnswerPiece("", finished="stop")]
              for chunk in shape.pieces(0, piece)]  # fmt: skip
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == answer
    assert chunks[-1]["finish_reason"] == "stop"


def test_a_brace_within_a_text_is_no_call_of_llama() -> None:
    form = call_format(['"parameters"'])
    answer = 'The answer is {"name": "f", "parameters": {}}.'
    assert split_calls(answer, form) == (answer, [])
    assert call_format(["no tools here"]) is None
