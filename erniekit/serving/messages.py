"""Read the messages of a chat request: what a client may send is less than what a data file may hold."""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from erniekit.data.conversation import ASSISTANT, TOOL_ROLES, USER, Conversation
from erniekit.data.formats.messages import SYSTEM_ROLES, parse_messages, parse_tools
from erniekit.data.formats.problems import THOUGHTS_FIELD, MalformedError
from erniekit.serving.errors import RefusedError
from erniekit.serving.fields import Fields

ROLES = (*SYSTEM_ROLES, USER, ASSISTANT, *TOOL_ROLES[:1])
KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", THOUGHTS_FIELD}
TEXT_TYPES = ("text", "input_text", "output_text")


def conversation_of(fields: Fields, folder: Path, *, uses_tools: bool) -> Conversation:
    """Return the dialogue that a request asks to be continued.

    Args:
        folder: where the sound of `input_audio` parts is written.
        uses_tools: whether the model is told of the tools.

    Raises:
        RefusedError: something in it is malformed, or is not offered here.
    """
    messages = fields.take("messages")
    tools = fields.take("tools")
    if not isinstance(messages, list) or not messages:
        raise RefusedError("messages: expected a list of messages", param="messages")
    own = [_message(message, f"messages[{number}]", folder) for number, message in enumerate(messages)]
    if own[-1]["role"] not in (USER, *TOOL_ROLES):
        raise RefusedError("messages: the last one has to be the user's or a tool's", param="messages")
    try:
        system, turns = parse_messages(own, "messages", tools=True)
        listed = parse_tools({"tools": tools}) if uses_tools else ()
    except MalformedError as error:
        told = f"{error.field}: expected {error.expected}, got {error.got}"
        raise RefusedError(told, param=error.field) from None
    return Conversation(tuple(turns), system, listed)


def _message(message: Any, place: str, folder: Path) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RefusedError(f"{place}: expected an object with role and content", param=place)
    own = {key: value for key, value in message.items() if value is not None}
    if own.get("role") not in ROLES:
        raise RefusedError(f"{place}.role: expected one of {', '.join(ROLES)}", param=f"{place}.role")
    if unknown := sorted(own.keys() - KEYS):
        raise RefusedError(
            f"{place}: the field {unknown[0][:80]} is not known here", param=f"{place}.{unknown[0][:80]}"
        )
    if isinstance(own.get("content"), list):
        parts = own["content"]
        own["content"] = [_part(part, f"{place}.content[{number}]", folder) for number, part in enumerate(parts)]
    if "tool_calls" in own:
        own["tool_calls"] = _with_objects(own["tool_calls"], f"{place}.tool_calls")
        own.setdefault("content", None)
    if own["role"] not in TOOL_ROLES:
        own.pop("name", None)  # of a speaker, which no template here writes
    return own


def _part(part: Any, place: str, folder: Path) -> dict[str, Any]:
    """Return a part of a content that reads no file but those that were sent."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in TEXT_TYPES and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
        return {"type": "audio", "audio": str(_written(part["input_audio"], place, folder))}
    raise RefusedError(f"{place}: expected a part of type text or input_audio, got {kind!r}"[:200], param=place)


def _written(sound: dict[str, Any], place: str, folder: Path) -> Path:
    """Write the sound of a part into a file; return its path."""
    data, form = sound.get("data"), sound.get("format", "wav")
    if not isinstance(data, str) or not isinstance(form, str) or not form.isalnum() or len(form) > 5:
        raise RefusedError(f"{place}.input_audio: expected data in base64, and its format", param=place)
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise RefusedError(f"{place}.input_audio.data: is not base64", param=place) from None
    path = folder / f"recording-{len(list(folder.iterdir()))}.{form.lower()}"
    path.write_bytes(content)
    return path


def _with_objects(calls: Any, place: str) -> Any:
    """Return calls whose arguments are objects, as templates expect them; OpenAI's are JSON texts."""
    if not isinstance(calls, list):
        return calls
    own = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            own.append(call)
            continue
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            where = f"{place}[{number}].function.arguments"
            raise RefusedError(f"{where}: is not JSON", param=where) from None
        own.append({**call, "function": {**function, "arguments": arguments}})
    return own
