"""Find the calls of tools in an answer: each family writes them in a way of its own, which its chat template tells.

| template has | an answer calls like this | families |
|---|---|---|
| `<tool_call>` | `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>` | ERNIE-4.5 Thinking, Qwen 2.5, 3 |
| `<arg_key>` | `<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>` | GLM-4.5 |
| `<function=` | `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>` | Qwen3 Coder |
| `[TOOL_CALLS]` | `[TOOL_CALLS][{"name": "f", "arguments": {}}]`, `[TOOL_CALLS]f[ARGS]{}` | Mistral |
| `<｜tool▁call▁begin｜>` | `<｜tool▁call▁begin｜>function<｜tool▁sep｜>f` and JSON in a block of code | DeepSeek V3 |
| `"parameters"` | `{"name": "f", "parameters": {"a": 1}}` as the whole answer | Llama 3 |
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call of a tool: its name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class CallFormat:
    """How a family writes calls.

    Attributes:
        name: of the format.
        begins: the text with which calls begin; what stands before it is the answer's text.
        parse: returns the calls in a text that begins so; None if it is something else after all.
        is_whole: calls stand alone in an answer, so that a text which does not begin so has none.
    """

    name: str
    begins: str
    parse: Callable[[str], list[Call] | None]
    is_whole: bool = False


def call_format(template_texts: Iterable[str]) -> CallFormat | None:
    """Return how a family writes calls, by the texts of its chat templates; None if they name none of the formats."""
    text = "\n".join(template_texts)
    return next((form for mark, form in _BY_MARK if mark in text), None)


def split_calls(text: str, form: CallFormat) -> tuple[str, list[Call]]:
    """Return the text of an answer before its calls, and the calls; what is no call stays text."""
    place = text.find(form.begins)
    if place < 0 or (form.is_whole and text[:place].strip()):
        return text, []
    calls = form.parse(text[place:])
    return (text[:place].rstrip(), calls) if calls else (text, [])


def new_call_id() -> str:
    """Return an id for a call, of nine letters and digits, as Mistral's templates want them."""
    return secrets.token_hex(5)[:9]


def _tagged(text: str, parse_one: Callable[[str], Call | None]) -> list[Call] | None:
    """Parse what stands between `<tool_call>` and `</tool_call>`; the last one may lack its end."""
    bodies = [part.partition("</tool_call>")[0] for part in text.split("<tool_call>")[1:]]
    calls = [parse_one(body.strip()) for body in bodies]
    return None if None in calls else [call for call in calls if call is not None]


def _json_call(text: str) -> Call | None:
    """Return the call of a JSON object with a name, and arguments or parameters."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _call_of(value)


def _call_of(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(value["name"], arguments)
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _hermes(text: str) -> list[Call] | None:
    return _tagged(text, _json_call)


_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_CODER_NAME = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", re.DOTALL)
_CODER_ARGUMENT = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)


def _glm(text: str) -> list[Call] | None:
    def one(body: str) -> Call | None:
        name = body.partition("<arg_key>")[0].strip()
        return _named(name, _GLM_ARGUMENT.findall(body))

    return _tagged(text, one)


def _coder(text: str) -> list[Call] | None:
    def one(body: str) -> Call | None:
        found = _CODER_NAME.search(body)
        return None if found is None else _named(found[1], _CODER_ARGUMENT.findall(found[2]))

    return _tagged(text, one)


def _named(name: str, arguments: list[tuple[str, str]]) -> Call | None:
    """Return a call whose arguments are JSON, or texts where they are not."""
    values = {key.strip(): _value(text.strip()) for key, text in arguments}
    return Call(name, json.dumps(values, ensure_ascii=False)) if name else None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _mistral(text: str) -> list[Call] | None:
    calls: list[Call] = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        name, mark, rest = part.partition("[ARGS]")
        if mark:
            name = name.partition("[CALL_ID]")[0].strip()
            own: list[Call | None] = [_call_of({"name": name, "arguments": _first_json(rest)})]
        else:
            value = _first_json(part)
            own = [_call_of(each) for each in value] if isinstance(value, list) else [None]
        if None in own:
            return None
        calls += [call for call in own if call is not None]
    return calls


def _first_json(text: str) -> Any:
    """Return the JSON value with which a text begins; None if it begins with something else."""
    try:
        return json.JSONDecoder().raw_decode(text.lstrip())[0]
    except (ValueError, RecursionError):
        return None


_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:function)?(?:<｜tool▁sep｜>)?([^\n<]+?)(?:<｜tool▁sep｜>|\s*\n```json\s*)(.*?)"
    r"(?:\n?```)?\s*<｜tool▁call▁end｜>",
    re.DOTALL,
)


def _deepseek(text: str) -> list[Call] | None:
    found = _DEEPSEEK.findall(text)
    calls = [_call_of({"name": name.strip(), "arguments": _first_json(body)}) for name, body in found]
    return None if not calls or None in calls else [call for call in calls if call is not None]


def _llama(text: str) -> list[Call] | None:
    calls = [_json_call(part) for part in _parts(text.replace("<|python_tag|>", ""))]
    return None if not calls or None in calls else [call for call in calls if call is not None]


def _parts(text: str) -> Iterator[str]:
    """Yield the calls of an answer, between which stand semicolons."""
    yield from (part.strip() for part in re.split(r";\s*(?=\{)", text.strip().rstrip(";")) if part.strip())


_HERMES = CallFormat("hermes", "<tool_call>", _hermes)
# The first mark that a template has decides, so those of longer formats stand before those that they contain.
_BY_MARK = (
    ("<arg_key>", CallFormat("glm", "<tool_call>", _glm)),
    ("<function=", CallFormat("qwen3_coder", "<tool_call>", _coder)),
    ("<tool_call>", _HERMES),
    ("[TOOL_CALLS]", CallFormat("mistral", "[TOOL_CALLS]", _mistral)),
    ("<｜tool▁call▁begin｜>", CallFormat("deepseek", "<｜tool▁calls▁begin｜>", _deepseek)),
    ('"parameters"', CallFormat("llama3", "{", _llama, is_whole=True)),
)
