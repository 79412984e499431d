"""Tools, calls and results in the messages of a record, checked and handed on to the chat template as written."""

from __future__ import annotations

import json
from typing import Any

from erniekit.data.fields import CALL_FIELDS
from erniekit.data.problems import shorten
from erniekit.data.record_values import MalformedError, describe_value, parse_text


def parse_tools(record: dict) -> tuple[dict[str, Any], ...]:
    """The field `tools`: a list of JSON objects with a name (OpenAI's form wraps them in `function`), or its text."""
    value = record.get("tools")
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        value = _from_json(value, "tools", "a list of tools")
    if not isinstance(value, list):
        raise MalformedError("tools", "a list of tools", shorten(value))
    for number, tool in enumerate(value):
        name = f"tools[{number}]"
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
            raise MalformedError(name, "an object with a name", shorten(tool))
    return tuple(value)


def parse_tool_calls(message: dict, name: str) -> list[dict[str, Any]]:
    """The calls of an assistant's message: `tool_calls`, or the one of OpenAI's older `function_call`; [] for none.

    Raises:
        MalformedError: a call without the name of its function, or arguments that are no JSON object.
    """
    calls = message.get("tool_calls")
    if calls is None and message.get("function_call") is not None:
        calls = [{"type": "function", "function": message["function_call"]}]
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise MalformedError(f"{name}.tool_calls", "a list of calls", shorten(calls))
    for number, call in enumerate(calls):
        field_path = f"{name}.tool_calls[{number}]"
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise MalformedError(field_path, "an object with function", shorten(call))
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise MalformedError(f"{field_path}.function.name", "a name", describe_value(function.get("name")))
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _from_json(arguments, f"{field_path}.function.arguments", "a JSON object")
        if not isinstance(arguments, dict):
            raise MalformedError(f"{field_path}.function.arguments", "a JSON object", describe_value(arguments))
    return calls


def reject_tool_calls(message: dict, name: str) -> None:
    """For messages of pairs, which cannot hold calls: without one another answer would be trained than is written."""
    for field in sorted(CALL_FIELDS):
        if message.get(field):
            raise MalformedError(f"{name}.{field}", "no calls (pairs cannot hold them yet)", shorten(message[field]))


def tool_call_fields(message: dict, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """What a template sees of an assistant's message with calls, beside its role."""
    content = {} if "content" not in message else {"content": _text_or_none(message["content"])}
    return {**content, "tool_calls": calls}


def tool_result_fields(message: dict, name: str) -> dict[str, Any]:
    """What a template sees of a tool's result, beside its role."""
    named = {key: parse_text(message[key], f"{name}.{key}") for key in ("name", "tool_call_id") if message.get(key)}
    return {"content": parse_text(message.get("content"), f"{name}.content"), **named}


def _text_or_none(content: object) -> object:
    return content.strip() if isinstance(content, str) else content


def _from_json(text: str, name: str, expected: str) -> Any:
    try:
        return json.loads(parse_text(text, name))
    except ValueError:
        raise MalformedError(name, expected, shorten(text)) from None
