"""Parse ShareGPT's records: `conversations` of objects with `from` and `value`, as LLaMA-Factory and others read them.

Each is rewritten as a message in OpenAI's form, so that everything after the names is checked in one place.
"""

from __future__ import annotations

import json
from typing import Any

from erniekit.data.conversation import ASSISTANT, TOOL_ROLES, USER, Conversation
from erniekit.data.formats.messages import last_must_be_assistant, parse_messages, parse_tools
from erniekit.data.formats.problems import MalformedError, describe_value, parse_optional_text, parse_text, shorten

ROLES = {
    "human": USER,
    "user": USER,
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "assistant": ASSISTANT,
    "model": ASSISTANT,
    "system": "system",
    "developer": "system",
    "function_call": ASSISTANT,
    "observation": TOOL_ROLES[0],
    "tool": TOOL_ROLES[0],
}
THOUGHT_END = "</think>"


def parse_sharegpt(record: dict) -> Conversation:
    """Parse a dialogue; `tools` are JSON objects or their text, calls stand in messages from `function_call`."""
    messages = as_messages(record.get("conversations"), "conversations")
    system, turns = parse_messages(messages, "conversations", tools=True)
    last_must_be_assistant(turns, messages, "conversations")
    own_system = parse_optional_text(record, "system")
    if own_system and system:
        raise MalformedError("system", "none beside a system message", shorten(own_system))
    tools = tuple(
        tool if "function" in tool else {"type": "function", "function": tool} for tool in parse_tools(record)
    )
    return Conversation(tuple(turns), own_system or system, tools)


def preference_as_messages(record: dict) -> dict[str, Any]:
    """Return a preference record with `prompt`, `chosen` and `rejected` in OpenAI's form."""
    prompt = as_messages(record.get("conversations"), "conversations")
    system = parse_optional_text(record, "system")
    if system:
        prompt = [{"role": "system", "content": system}, *prompt]
    answers = {
        name: as_messages([value] if isinstance(value, dict) else value, name) if not isinstance(value, str) else value
        for name in ("chosen", "rejected")
        if (value := record.get(name)) is not None
    }
    return {**record, "prompt": prompt, **answers}


def as_messages(items: object, name: str) -> list[dict[str, Any]]:
    """Return ShareGPT's items as messages of OpenAI's form.

    Raises:
        MalformedError: the value is no list of objects with `from` and `value`.
    """
    if not isinstance(items, list) or not items:
        raise MalformedError(name, "a list of objects with `from` and `value`", describe_value(items))
    return [_message(item, f"{name}[{number}]") for number, item in enumerate(items)]


def _message(item: object, name: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise MalformedError(name, "an object with `from` and `value`", shorten(item))
    if "from" not in item and "role" in item:  # OpenAI's names in ShareGPT's list, as some published sets have it
        return item
    speaker = item.get("from")
    role = ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise MalformedError(f"{name}.from", f"one of {', '.join(ROLES)}", describe_value(speaker))
    rest = {key: value for key, value in item.items() if key not in ("from", "value")}
    if speaker == "function_call":
        return {"role": role, **_calls(item.get("value"), f"{name}.value"), **rest}
    return {"role": role, "content": item.get("value"), **rest}


def _calls(value: object, name: str) -> dict[str, Any]:
    """Return `content` (a thought, if one stands before the calls) and `tool_calls` of a `function_call`'s value."""
    text = parse_text(value, name)
    thought, mark, calls_text = text.rpartition(THOUGHT_END)
    try:
        calls = json.loads(calls_text)
    except (ValueError, RecursionError):
        calls = None
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not calls:
        raise MalformedError(name, "the JSON text of a call with `name` and `arguments`", shorten(text))
    wrapped = [{"type": "function", "function": call} for call in calls]
    return {"content": thought + mark or None, "tool_calls": wrapped}
