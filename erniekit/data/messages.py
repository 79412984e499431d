"""Lists of messages with roles, as OpenAI's format has them, turned into turns."""

from __future__ import annotations

from erniekit.data.conversation import ASSISTANT, TOOL_ROLES, USER, Turn
from erniekit.data.problems import shorten
from erniekit.data.record_values import MalformedError, describe_value, parse_flag, parse_text
from erniekit.data.tool_calls import parse_tool_calls, reject_tool_calls, tool_call_fields, tool_result_fields


def parse_messages(messages: object, name: str, *, tools: bool = False) -> tuple[str, list[Turn]]:
    """The system text ("" where there is none) and turns that alternate user, assistant, user, ...

    Args:
        name: of the field, for messages.
        tools: whether assistants may call tools; calls are refused otherwise.

    Raises:
        MalformedError: it is no such list.
    """
    if not isinstance(messages, list) or not messages:
        raise MalformedError(name, "a list of messages", describe_value(messages))
    system = ""
    turns: list[Turn] = []
    for number, message in enumerate(messages):
        field_path = f"{name}[{number}]"
        if not isinstance(message, dict):
            raise MalformedError(field_path, "an object with role and content", shorten(message))
        if not tools:
            reject_tool_calls(message, field_path)
        if number == 0 and message.get("role") == "system":
            system = parse_text(message.get("content"), f"{field_path}.content")
        else:
            turns.append(_turn(message, field_path, turns[-1] if turns else None, tools, may_be_system=number == 0))
    return system, turns


def _turn(message: dict, field_path: str, previous: Turn | None, tools: bool, *, may_be_system: bool) -> Turn:
    role = message.get("role")
    if tools and role in TOOL_ROLES and previous is not None and _takes_result(previous):
        result = tool_result_fields(message, field_path)
        return Turn(role, result["content"], fields=result)
    calls = parse_tool_calls(message, field_path) if tools and role == ASSISTANT else []
    without_text = calls and message.get("content") is None
    content = "" if without_text else parse_text(message.get("content"), f"{field_path}.content")
    expected = _expected_role(previous)
    if role != expected:
        system_or = "system or " if may_be_system else ""
        raise MalformedError(f"{field_path}.role", f"{system_or}{expected}", describe_value(role))
    if not content and not calls:
        raise MalformedError(f"{field_path}.content", "a text", "an empty string")
    fields = tool_call_fields(message, calls) if calls else None
    return Turn(role, content, role == ASSISTANT and _is_trained(message, field_path), fields)


def _takes_result(turn: Turn) -> bool:
    """Whether a tool's result may follow: after calls, and after other results."""
    return turn.fields is not None


def _expected_role(previous: Turn | None) -> str:
    if previous is None:
        return USER
    if previous.role == ASSISTANT:
        return USER if previous.fields is None else TOOL_ROLES[0]
    return ASSISTANT


def _is_trained(message: dict, name: str) -> bool:
    if "label" in message and "weight" in message:
        raise MalformedError(name, "either label or weight", "both")
    key = "weight" if "weight" in message else "label"
    return parse_flag(message.get(key, 1), f"{name}.{key}")
