"""Parse lists of messages with roles, in OpenAI's format, into turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from erniekit.data.conversation import ASSISTANT, TOOL_ROLES, USER, Turn
from erniekit.data.formats.content_parts import TEXT_PARTS, Content, parse_content_parts
from erniekit.data.formats.problems import (
    CALL_FIELDS,
    THOUGHTS_FIELD,
    WEIGHT_FIELDS,
    MalformedError,
    NothingToTrainError,
    describe_value,
    parse_flag,
    parse_text,
    shorten,
)

SYSTEM_ROLES = ("system", "developer")  # OpenAI renamed the first to the second
OWN_PARTS = ("reasoning", "tool_call")  # LLaMA-Factory's types of parts for which messages have fields

# Tools, calls and results: they are checked, and passed to the chat template as written.


def parse_tools(record: dict) -> tuple[dict[str, Any], ...]:
    """Return the field `tools`: a list of JSON objects with a name (OpenAI wraps them in
    `function`), or its JSON text."""
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
    """Return the calls of an assistant message: `tool_calls`, or OpenAI's older `function_call`; [] for none.

    Raises:
        MalformedError: a call has no function name, or arguments that are not a JSON object.
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
    """Raise MalformedError for a message with calls. Pairs cannot contain them: training would use another answer than
    the file says."""
    for field in sorted(CALL_FIELDS):
        if message.get(field):
            raise MalformedError(f"{name}.{field}", "no calls (pairs cannot hold them yet)", shorten(message[field]))


def tool_call_fields(message: dict, calls: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the fields that a template sees of an assistant message with calls, in addition to its role."""
    content = {}
    if "content" in message:
        content["content"] = message["content"] and parse_content(message["content"], name)
    return {**content, "tool_calls": calls}


def tool_result_fields(message: dict, name: str) -> dict[str, Any]:
    """Return the fields that a template sees of a tool's result, in addition to its role."""
    named = {key: parse_text(message[key], f"{name}.{key}") for key in ("name", "tool_call_id") if message.get(key)}
    return {"content": _result_text(message.get("content"), f"{name}.content"), **named}


def _result_text(content: object, name: str) -> str:
    """Return a tool's result as text: objects and lists that are not content parts become their JSON text."""
    parts = isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") in TEXT_PARTS for part in content
    )
    if parts or not isinstance(content, (list, dict)):
        return parse_content(content, name)
    return parse_text(json.dumps(content, ensure_ascii=False), name)


def parse_content(value: object, name: str) -> str:
    """Return the text of a message that is neither the user's nor the assistant's; see `parse_content_parts`.

    Raises:
        MalformedError: the value is no text, or a part holds a recording, units, an image or a video.
    """
    text, clips, parts = parse_content_parts(value, name)
    if clips:
        raise MalformedError(name, "recordings in messages of the user only", "one in another message")
    if parts:
        raise MalformedError(name, "units in messages of the user and the assistant only", "some in another message")
    return text


def _from_json(text: str, name: str, expected: str) -> Any:
    try:
        return json.loads(parse_text(text, name))
    except (ValueError, RecursionError):
        raise MalformedError(name, expected, shorten(text)) from None


def parse_messages(messages: object, name: str, *, tools: bool = False) -> tuple[str, list[Turn]]:
    """Return the system text ("" if there is none) and turns of user and assistant.

    A user may write several messages before the assistant answers; the template renders each of them.

    Args:
        name: the field's name, for error messages.
        tools: whether assistants may call tools; calls are rejected otherwise.

    Raises:
        MalformedError: the value is not such a list.
    """
    if not isinstance(messages, list) or not messages:
        raise MalformedError(name, "a list of messages", describe_value(messages))
    system = ""
    turns: list[Turn] = []
    for number, message in enumerate(messages):
        field_path = f"{name}[{number}]"
        if not isinstance(message, dict):
            raise MalformedError(field_path, "an object with role and content", shorten(message))
        message = _without_own_parts(message, field_path)
        if not tools:
            reject_tool_calls(message, field_path)
        if number == 0 and message.get("role") in SYSTEM_ROLES:
            system = parse_content(message.get("content"), f"{field_path}.content")
            system = system if system.strip() else ""
        else:
            turns.append(_turn(message, field_path, turns[-1] if turns else None, tools, may_be_system=number == 0))
    return system, turns


def _without_own_parts(message: dict, field_path: str) -> dict:
    """Return a message in which parts of LLaMA-Factory's types `reasoning` and `tool_call` are fields of their own."""
    content = message.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    own: dict[str, list[Any]] = {
        kind: [part.get("value") for part in parts if part.get("type") == kind] for kind in OWN_PARTS
    }
    if message.get("role") != ASSISTANT or not any(own.values()):
        return message
    name = f"{field_path}.content"
    calls = [_from_json(text, name, "the JSON text of a call in a part of type tool_call") for text in own["tool_call"]]
    thoughts = "".join(parse_text(text, name) for text in own["reasoning"])
    rest = [part for part in message["content"] if not (isinstance(part, dict) and part.get("type") in OWN_PARTS)]
    fields = {"tool_calls": [{"type": "function", "function": call} for call in calls]} if calls else {}
    thought_fields = {THOUGHTS_FIELD: thoughts} if thoughts else {}
    return {**message, **fields, **thought_fields, "content": rest or (None if calls else "")}


def _turn(message: dict, field_path: str, previous: Turn | None, tools: bool, *, may_be_system: bool) -> Turn:
    role = message.get("role")
    if tools and role in TOOL_ROLES and previous is not None and _takes_result(previous):
        result = tool_result_fields(message, field_path)
        return Turn(role, result["content"], fields=result)
    calls = parse_tool_calls(message, field_path) if tools and role == ASSISTANT else []
    if calls and message.get("content") is None:
        content = Content("")
    elif role in (USER, ASSISTANT) and not calls:
        content = parse_content_parts(message.get("content"), f"{field_path}.content", trains=role == ASSISTANT)
        if content.clips and role == ASSISTANT:
            raise MalformedError(
                f"{field_path}.content", "recordings in messages of the user only", "one in another message"
            )
    else:
        content = Content(parse_content(message.get("content"), f"{field_path}.content"))
    expected = _expected_roles(previous)
    if role not in expected:
        system_or = "system or " if may_be_system else ""
        raise MalformedError(f"{field_path}.role", f"{system_or}{' or '.join(expected)}", describe_value(role))
    thoughts = _thoughts(message, field_path) if role == ASSISTANT else ""
    if not content.text.strip() and not calls and not content.clips and not content.parts:
        error = NothingToTrainError if role == ASSISTANT else MalformedError
        raise error(f"{field_path}.content", "a text", "an empty string")
    fields = tool_call_fields(message, calls, f"{field_path}.content") if calls else None
    trained = role == ASSISTANT and _is_trained(message, field_path)
    trained &= not content.parts or any(part.trained for part in content.parts)
    return Turn(role, content.text, trained, fields, thoughts, content.clips, content.parts)


def _thoughts(message: dict, field_path: str) -> str:
    """Return what the assistant thought before an answer; "" if the message does not say."""
    value = message.get(THOUGHTS_FIELD)
    return "" if value is None else parse_text(value, f"{field_path}.{THOUGHTS_FIELD}")


def _takes_result(turn: Turn) -> bool:
    """Return whether a tool's result may follow: after calls, and after other results."""
    return turn.fields is not None


def _expected_roles(previous: Turn | None) -> tuple[str, ...]:
    if previous is None:
        return (USER,)
    if previous.role == ASSISTANT:
        return (USER,) if previous.fields is None else TOOL_ROLES[:1]
    return (ASSISTANT, USER) if previous.role == USER else (ASSISTANT,)


def last_must_be_assistant(turns: list[Turn], messages: Sequence[object], name: str) -> None:
    """Raise MalformedError if a dialogue does not end with an answer."""
    if not turns or turns[-1].role != ASSISTANT:
        last = messages[-1]
        role = last.get("role") if isinstance(last, dict) else last
        raise MalformedError(name, "the last message to be the assistant's", describe_value(role))


def _is_trained(message: dict, name: str) -> bool:
    keys = [key for key in WEIGHT_FIELDS if key in message]
    if len(keys) > 1:
        raise MalformedError(name, f"either {keys[0]} or {keys[1]}", "both")
    return not keys or parse_flag(message[keys[0]], f"{name}.{keys[0]}")
