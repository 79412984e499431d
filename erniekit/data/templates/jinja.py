"""A model folder's own jinja chat template, rendered as transformers does it, and the assistant's spans found in it.

The span of an answer is what rendering the dialogue with it adds to rendering the dialogue before it with the header of
the next answer. That works for templates that only append; one that rewrites earlier turns is refused with the reason.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from erniekit.data.conversation import ASSISTANT, USER, Conversation, Turn
from erniekit.data.templates.ernie import ErnieTemplate, Segment, TemplateRefusedError
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.errors import DataError, ModelFileError

_PROBE = Conversation(
    (
        Turn(USER, "first question"),
        Turn(ASSISTANT, "first answer", True),
        Turn(USER, "second question"),
        Turn(ASSISTANT, "second answer", True),
    )
)
_MARK = secrets.token_hex(16)  # made anew by every process, so no text holds it
# what the expressions of a template can raise, for example "a" + none
_EVALUATION_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks answers for other programs; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MarkedGenerationBlock(_GenerationBlock):
    """The same block with `_MARK` on both sides of its text."""

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        mark = jinja2.nodes.Output([jinja2.nodes.TemplateData(_MARK)])
        return [mark, *super().parse(parser), mark]


def marked_segments(source: str) -> Callable[[Conversation], list[Segment]]:
    """Return a renderer for a template of ours, which marks every answer with `{% generation %}`.

    One pass gives the text and its segments, where `JinjaTemplate` has to render a dialogue twice for each answer.
    """
    template = _compile(_environment(_MarkedGenerationBlock), source)

    def render(conversation: Conversation) -> list[Segment]:
        texts = template.render(messages=_messages(conversation)).split(_MARK)
        trained = [turn.trained for turn in conversation.turns if turn.role == ASSISTANT]
        segments = []
        for number, is_target in enumerate(trained):
            segments += [Segment(texts[2 * number], False), Segment(texts[2 * number + 1], is_target)]
        return [*segments, Segment(texts[-1], False)] if texts[-1] else segments

    return render


class JinjaTemplate:
    """Raises ModelFileError for a broken template, DataError for one whose answers cannot be told apart."""

    end_of_turn_target: int | None = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.chat_template is not None
        self._where = str(tokenizer.template_path)
        self._special_tokens = tokenizer.special_tokens
        try:
            environment = _environment()
            self._template = _compile(environment, tokenizer.chat_template)
            names = jinja2.meta.find_undeclared_variables(environment.parse(tokenizer.chat_template))
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(f"{self._where}: chat_template, line {error.lineno}: {error.message}") from None
        self.takes_tools = "tools" in names
        self._takes_calls = "tool_calls" in tokenizer.chat_template
        self.fingerprint = hashlib.blake2b(tokenizer.chat_template.encode(), digest_size=16).hexdigest()
        self._end_of_turn = self._find_end_of_turn(tokenizer)
        end_id = tokenizer.token_id(self._end_of_turn)
        assert end_id is not None  # it is one of the tokenizer's control tokens
        self.stop_token_ids = tuple(dict.fromkeys((end_id, tokenizer.eos_id)))

    def render(self, conversation: Conversation) -> list[Segment]:
        self._check_tools(conversation)
        messages = _messages(conversation)
        tools = [dict(tool) for tool in conversation.tools] or None
        offset = len(messages) - len(conversation.turns)
        segments: list[Segment] = []
        rendered = ""  # what the segments hold so far
        for number, turn in enumerate(conversation.turns, start=offset):
            if turn.role != ASSISTANT:
                continue
            before = self._text(messages[:number], add_generation_prompt=True, tools=tools)
            with_answer = self._text(messages[: number + 1], add_generation_prompt=False, tools=tools)
            self._check_prefix(rendered, before)
            self._check_prefix(before, with_answer)
            end = with_answer.rfind(self._end_of_turn, len(before))
            if end < 0:
                raise DataError(f"{self._where}: chat_template: the answer {turn.content[:40]!r} is not ended in it")
            segments.append(Segment(before[len(rendered) :], False))
            rendered = with_answer[: end + len(self._end_of_turn)]
            segments.append(Segment(rendered[len(before) :], turn.trained))
        if conversation.turns and conversation.turns[-1].role != ASSISTANT:
            full_text = self._text(messages, add_generation_prompt=True, tools=tools)
            self._check_prefix(rendered, full_text)
            segments.append(Segment(full_text[len(rendered) :], False))
        return segments

    def _check_tools(self, conversation: Conversation) -> None:
        """A template that does not mention them would leave them out without a word."""
        called = any(turn.fields is not None for turn in conversation.turns)
        lacking = "tools" if conversation.tools and not self.takes_tools else "tool_calls"
        if (conversation.tools and not self.takes_tools) or (called and not self._takes_calls):
            raise TemplateRefusedError(f"{self._where}: chat_template: it has no place for `{lacking}`")

    def _text(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, tools: list[dict[str, Any]] | None = None
    ) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )  # fmt: skip
        except (jinja2.TemplateError, *_EVALUATION_ERRORS) as error:
            raise TemplateRefusedError(f"{self._where}: chat_template: {error}") from None

    def _check_prefix(self, shorter: str, longer: str) -> None:
        if not longer.startswith(shorter):
            raise DataError(
                f"{self._where}: chat_template: a longer dialogue does not begin with the text of the shorter one "
                f"({_difference(shorter, longer)}), so the answers cannot be marked as targets. Use a template that "
                "only appends: drop what rewrites earlier turns, and begin answers where the generation prompt ends"
            )

    def _find_end_of_turn(self, tokenizer: Tokenizer) -> str:
        """The control token that ends an answer; without one a model could not learn to stop."""
        messages = _messages(_PROBE)
        before = self._text(messages[:1], add_generation_prompt=True)
        with_answer = self._text(messages[:2], add_generation_prompt=False)
        self._check_prefix(before, with_answer)
        answer = with_answer[len(before) :]
        _, found, after = answer.partition(_PROBE.turns[1].content)
        token = tokenizer.find_control_token(after)
        if not found or token is None:
            raise DataError(
                f"{self._where}: chat_template: no control token ends an answer ({answer!r} after the generation "
                "prompt), so a model trained with it would not learn to stop. End assistant turns with eos_token"
            )
        return token


def renders_identically(template: JinjaTemplate, ernie: ErnieTemplate) -> bool:
    """Whether a jinja template is ERNIE-4.5's format, judged by dialogues with and without a system text."""
    probes = (_PROBE, Conversation(_PROBE.turns, system="a system text"))
    try:
        return all(_rendered_text(template.render(probe)) == _rendered_text(ernie.render(probe)) for probe in probes)
    except TemplateRefusedError:
        return False


def _rendered_text(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def _messages(conversation: Conversation) -> list[dict[str, Any]]:
    system: list[dict[str, Any]] = [{"role": "system", "content": conversation.system}] if conversation.system else []
    return system + [
        {"role": turn.role, **({"content": turn.content} if turn.fields is None else turn.fields)}
        for turn in conversation.turns
    ]


def _difference(shorter: str, longer: str) -> str:
    same = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(longer))
    start = max(0, same - 15)
    return f"{shorter[start : same + 25]!r} became {longer[start : same + 25]!r}"


def _environment(generation_block: type[_GenerationBlock] = _GenerationBlock) -> jinja2.Environment:
    """Return the helpers that chat templates rely on, in a sandbox, because a template is somebody else's program."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation_block, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _compile(environment: jinja2.Environment, source: str) -> jinja2.Template:
    template = environment.from_string(source)
    template.globals = dict(template.globals)  # jinja2's ChainMap would take most of the time of a rendering
    return template


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Plain JSON; jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
