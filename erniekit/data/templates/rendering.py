"""Render chat templates as transformers does, and find the assistant's spans in the text.

The span of an answer is what rendering the dialogue with it adds to rendering the dialogue before it with the header of
the next answer. Where a template renders earlier turns in another way than the last one (it drops their thoughts, for
example), only the last answer can be told apart; `RewritesTurnsError` says so.

This module also runs in a process of its own (`render_process`), so it imports nothing but jinja2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

Message = Mapping[str, Any]
TextSegment = tuple[str, bool]  # the text, and whether it is an answer that is trained
EndOfTurn = str | Sequence[str]
ASSISTANT = "assistant"


class RefusedError(Exception):
    """The template will not render a dialogue, or its answers cannot be told apart."""


class RewritesTurnsError(RefusedError):
    """The template renders earlier turns in another way than the last one, so only the last answer can be trained."""


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks answers for other programs; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment(generation_block: type[GenerationBlock] = GenerationBlock) -> jinja2.Environment:
    """Return the helpers that chat templates rely on, in a sandbox, because a template is somebody else's program."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation_block, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def compile_template(made: jinja2.Environment, source: str) -> jinja2.Template:
    template = made.from_string(source)
    template.globals = dict(template.globals)  # jinja2's ChainMap would take most of the time of a rendering
    return template


def variables_of(made: jinja2.Environment, source: str) -> set[str]:
    """Return the names of the variables that a template expects from outside."""
    return jinja2.meta.find_undeclared_variables(made.parse(source))


RenderText = Callable[[Sequence[Message], bool], str]  # (messages, whether the header of the next answer follows)


def segments_of(
    render: RenderText, messages: Sequence[Message], trained: Sequence[bool], end_of_turn: EndOfTurn
) -> list[TextSegment]:
    """Return the segments of a dialogue: each answer with its end of turn is one, whatever stands between two another.

    Where the dialogue ends with a user's or a tool's message, the last segment ends with the header of the answer to
    come. A template that rewrites earlier turns gives one segment for everything before the last answer.

    Args:
        trained: for each message whether it is a trained answer.
        end_of_turn: the token that ends answers; or, for templates in which the header of the next message does, all
            tokens that may begin one.

    Raises:
        RewritesTurnsError: an answer before the last one is trained, and the template rewrites earlier turns.
        RefusedError: the template refuses the dialogue, or does not end an answer.
    """
    try:
        return _appended(render, messages, trained, end_of_turn)
    except RewritesTurnsError:
        if any(trained[:-1]):
            raise
    if messages[-1]["role"] != ASSISTANT:
        return [(render(messages, True), False)]
    before = render(messages[:-1], True)
    return [(before, False), (_answer(render, before, messages, end_of_turn), trained[-1])]


def _appended(
    render: RenderText, messages: Sequence[Message], trained: Sequence[bool], end_of_turn: EndOfTurn
) -> list[TextSegment]:
    """Return the segments of a dialogue whose template only appends."""
    segments: list[TextSegment] = []
    rendered = ""  # what the segments contain so far
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = render(messages[:number], True)
        _check_appends(rendered, before)
        try:
            answer = _answer(render, before, messages[: number + 1], end_of_turn)
        except RefusedError as error:
            if trained[number]:
                raise
            raise RewritesTurnsError(str(error)) from None  # a turn that is only read may be rendered in any way
        segments += [(before[len(rendered) :], False), (answer, trained[number])]
        rendered = before + answer
    if messages and messages[-1]["role"] != ASSISTANT:
        full_text = render(messages, True)
        _check_appends(rendered, full_text)
        segments.append((full_text[len(rendered) :], False))
    return segments


def _answer(render: RenderText, before: str, messages: Sequence[Message], end_of_turn: EndOfTurn) -> str:
    """Return what the last message, an answer, adds to the text before it, up to and with its end of turn."""
    with_answer = render(messages, False)
    last_text = messages[-2].get("content") if len(messages) > 1 else None
    start = len(before) if with_answer.startswith(before) else _end_of_prompt(before, with_answer, last_text)
    if start is None:
        raise RefusedError(
            f"an answer does not begin where the generation prompt ends ({_difference(before, with_answer)}), so it "
            "cannot be marked as a target. An answer needs the thoughts that the generation prompt begins, or a "
            "template that begins answers where the generation prompt ends"
        )
    if not isinstance(end_of_turn, str):
        return with_answer[start:] + _next_header(render, with_answer, messages, end_of_turn)
    end = with_answer.rfind(end_of_turn, start)
    if end < 0:
        raise RefusedError(f"the answer {with_answer[start:][:40]!r} is not ended in it")
    return with_answer[start : end + len(end_of_turn)]


def _next_header(render: RenderText, text: str, messages: Sequence[Message], tokens: Sequence[str]) -> str:
    """Return the token with which the next message begins: a tool's after calls, otherwise the user's.

    GLM-4's answers end where the header of the next message begins.
    """
    role = "tool" if messages[-1].get("tool_calls") else "user"
    longer = render([*messages, {"role": role, "content": "next"}], False)
    token = next((each for each in tokens if longer.startswith(each, len(text))), "")
    if not longer.startswith(text) or not token:
        raise RefusedError(f"the answer {text[-40:]!r} is not ended in it, neither by a token nor by the next header")
    return token


def _end_of_prompt(before: str, with_answer: str, last_text: object) -> int | None:
    """Return where an answer begins in a text whose prompt differs from `before` in front of the last message; or None.

    Mistral's templates show a system text only while the question is the last message.
    """
    begin = before.rfind(last_text) if isinstance(last_text, str) and last_text else -1
    if begin < 0:
        return None
    tail, start = before[begin:], 0
    for _ in range(before.count(tail)):  # the same question may stand in the dialogue before
        begin = with_answer.find(tail, start)
        if begin < 0:
            return None
        start = begin + len(tail)
    return start


def _check_appends(shorter: str, longer: str) -> None:
    if not longer.startswith(shorter):
        raise RewritesTurnsError(
            f"a longer dialogue does not begin with the text of the shorter one ({_difference(shorter, longer)}), so "
            "only one answer of a sample can be marked as a target"
        )


def _difference(shorter: str, longer: str) -> str:
    same = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(longer))
    start = max(0, same - 15)
    return f"{shorter[start : same + 25]!r} became {longer[start : same + 25]!r}"


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Plain JSON; jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
