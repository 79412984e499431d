"""Lists of messages with roles, as OpenAI's format has them, turned into turns."""

from __future__ import annotations

from erniekit.data.conversation import ASSISTANT, USER, Turn
from erniekit.data.problems import shorten
from erniekit.data.record_values import MalformedError, described, flag_of, text_of


def dialogue(messages: object, name: str) -> tuple[str, list[Turn]]:
    """The system text ("" where there is none) and turns that alternate user, assistant, user, ...

    Args:
        name: of the field, for messages.

    Raises:
        MalformedError: it is no such list.
    """
    if not isinstance(messages, list) or not messages:
        raise MalformedError(name, "a list of messages", described(messages))
    system = ""
    turns: list[Turn] = []
    for number, message in enumerate(messages):
        place = f"{name}[{number}]"
        if not isinstance(message, dict):
            raise MalformedError(place, "an object with role and content", shorten(message))
        role = message.get("role")
        content = text_of(message.get("content"), f"{place}.content")
        if role == "system" and number == 0:
            system = content
            continue
        expected = USER if len(turns) % 2 == 0 else ASSISTANT
        if role != expected:
            first = "system or " if number == 0 else ""
            raise MalformedError(f"{place}.role", f"{first}{expected}", described(role))
        if not content:
            raise MalformedError(f"{place}.content", "a text", "an empty string")
        turns.append(Turn(role, content, role == ASSISTANT and _is_trained(message, place)))
    return system, turns


def _is_trained(message: dict, name: str) -> bool:
    if "label" in message and "weight" in message:
        raise MalformedError(name, "either label or weight", "both")
    key = "weight" if "weight" in message else "label"
    return flag_of(message.get(key, 1), f"{name}.{key}")
