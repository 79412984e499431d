"""A model folder's own jinja chat templates, rendered as transformers does it in a process under limits."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.parser

from erniekit.data.conversation import ASSISTANT, USER, Conversation, Turn
from erniekit.data.media.clip import Clip
from erniekit.data.templates.ernie import ErnieTemplate, RewritesTurnsError, Segment, TemplateRefusedError
from erniekit.data.templates.render_process import RENDER_PROCESS, LimitExceededError
from erniekit.data.templates.rendering import EndOfTurn, GenerationBlock, compile_template, environment
from erniekit.data.templates.speech import UnitText, content_text, refused_units, split_at_marks
from erniekit.data.templates.transcription import DEFAULT_REQUEST, DEFAULT_SPEECH, LANGUAGE_FIELD, Request, Speech
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.errors import DataError, ModelFileError
from erniekit.terminal import escape_control_characters

_PROBE = Conversation(
    (
        Turn(USER, "first question"),
        Turn(ASSISTANT, "first answer", True),
        Turn(USER, "second question"),
        Turn(ASSISTANT, "second answer", True),
    )
)
_PROBE_CALLS = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
_MARK = secrets.token_hex(16)  # made anew by every process, so no text contains it
_AUDIO_PART = {"type": "audio", "audio": "", "audio_url": ""}  # some templates look for one key, some for another
_VERSION = b"2"  # raise it when the same template and dialogue give other segments


class _MarkedGenerationBlock(GenerationBlock):
    """The same block with `_MARK` on both sides of its text."""

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        mark = jinja2.nodes.Output([jinja2.nodes.TemplateData(_MARK)])
        return [mark, *super().parse(parser), mark]


def marked_segments(source: str, tokenizer: Tokenizer, units: UnitText) -> Callable[[Conversation], list[Segment]]:
    """Return a renderer for a template of ours, which marks every answer with `{% generation %}`.

    One pass gives the text and its segments, where `JinjaTemplate` has to render a dialogue twice for each answer.
    """
    template = compile_template(environment(_MarkedGenerationBlock), source)

    def render(conversation: Conversation) -> list[Segment]:
        texts = template.render(messages=messages_of(conversation, tokenizer, units)).split(_MARK)
        trained = [turn.trained for turn in conversation.turns if turn.role == ASSISTANT]
        segments = []
        for number, is_target in enumerate(trained):
            answer = Segment(texts[2 * number + 1], is_target)
            segments += [Segment(texts[2 * number], False), *split_at_marks(answer)]
        return [*segments, Segment(texts[-1], False)] if texts[-1] else segments

    return render


class JinjaTemplate:
    """The templates of a model folder: `tool_use`, where there is one, for dialogues with tools, else `default`.

    Args:
        variables: further variables of the template, such as `enable_thinking`.
        request: how transcripts are asked for.
        speech: how units of speech are written.

    Attributes:
        takes_tools, takes_thoughts, takes_audio: whether the template has a place for tools, for `reasoning_content`,
            and for recordings.
        variable_names: the variables that it expects from outside.

    Raises:
        ModelFileError: a template is broken, or exceeds a limit of time or memory.
        DataError: no control token ends its answers.
    """

    end_of_turn_target: int | None = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        variables: Mapping[str, Any] | None = None,
        request: Request = DEFAULT_REQUEST,
        speech: Speech = DEFAULT_SPEECH,
    ) -> None:
        assert tokenizer.chat_templates
        self._tokenizer = tokenizer
        self._request = request
        self._units = UnitText(tokenizer, speech.unit_token)
        self._where = str(tokenizer.template_path)
        self._sources = tokenizer.chat_templates
        self._variables = {**tokenizer.special_tokens, **(variables or {})}
        names = {name: self._variable_names(source) for name, source in self._sources.items()}
        self._tool_source = "tool_use" if "tool_use" in self._sources else "default"
        self.takes_tools = "tools" in names[self._tool_source]
        self._takes_calls = any("tool_calls" in source for source in self._sources.values())
        self.takes_thoughts = any("reasoning_content" in source for source in self._sources.values())
        self.takes_audio = "audio" in self._sources["default"]
        self.variable_names: Set[str] = set().union(*names.values())
        self.fingerprint = self._fingerprint(variables or {}) + speech.key
        self._end_of_turn, ends = self._find_end_of_turn()
        end_ids = [number for token in ends if (number := tokenizer.token_id(token)) is not None]
        self.stop_token_ids = tuple(dict.fromkeys((*end_ids, tokenizer.eos_id)))

    def render(self, conversation: Conversation) -> list[Segment]:
        (rendered,) = self.render_many([conversation])
        if isinstance(rendered, TemplateRefusedError):
            raise rendered
        return rendered

    def render_many(self, conversations: Sequence[Conversation]) -> list[list[Segment] | TemplateRefusedError]:
        conversations = [self._worded(each) for each in conversations]
        results: list[list[Segment] | TemplateRefusedError | None] = [self._refusal(each) for each in conversations]
        for name in {self._source_name(each) for each in conversations}:
            chosen = [
                number
                for number, each in enumerate(conversations)
                if results[number] is None and self._source_name(each) == name
            ]
            replies = self._ask(name, [self._item(conversations[number]) for number in chosen]) if chosen else []
            for number, reply in zip(chosen, replies, strict=True):
                results[number] = self._result(conversations[number], reply)
        return [result for result in results if result is not None]

    def _source_name(self, conversation: Conversation) -> str:
        return self._tool_source if conversation.tools else "default"

    def _item(self, conversation: Conversation) -> dict[str, Any]:
        messages = messages_of(conversation, self._tokenizer, self._units)
        offset = len(messages) - len(conversation.turns)
        trained = [False] * offset + [turn.trained for turn in conversation.turns]
        tools = [_guarded(dict(tool), self._tokenizer.plain_text) for tool in conversation.tools] or None
        return {"messages": messages, "tools": tools, "trained": trained, "end_of_turn": self._end_of_turn}

    def _result(self, conversation: Conversation, reply: dict[str, Any]) -> list[Segment] | TemplateRefusedError:
        if "segments" not in reply:
            kind = RewritesTurnsError if "rewrites" in reply else TemplateRefusedError
            return kind(self._message(reply.get("rewrites") or reply["refused"]))
        segments = [part for text, trained in reply["segments"] for part in split_at_marks(Segment(text, trained))]
        for turn in conversation.turns:
            if turn.trained and turn.thoughts and not self._says(turn.thoughts, segments):
                return TemplateRefusedError(self._message("it leaves out the `reasoning_content` of a trained answer"))
        return segments

    def _says(self, thoughts: str, segments: Iterable[Segment]) -> bool:
        text = self._tokenizer.plain_text(thoughts)
        return any(segment.trained and text.strip() in segment.text for segment in segments)

    def _refusal(self, conversation: Conversation) -> TemplateRefusedError | None:
        """Return why the template cannot hold a dialogue: it would leave out silently what it does not mention."""
        lacking = [
            name
            for name, used, taken in (
                ("tools", bool(conversation.tools), self.takes_tools),
                ("tool_calls", any(turn.fields is not None for turn in conversation.turns), self._takes_calls),
                ("reasoning_content", any(turn.thoughts for turn in conversation.turns), self.takes_thoughts),
                ("audio", bool(conversation.clips), self.takes_audio),
            )
            if used and not taken
        ]
        if (refused := refused_units(conversation, self._units)) is not None:
            return refused
        if lacking:
            return TemplateRefusedError(self._message(f"it has no place for `{lacking[0]}`"))
        if any(turn.clips for turn in conversation.turns if turn.role != USER):
            return TemplateRefusedError("a recording in an answer or a tool's result: only a user's turn may hold one")
        if conversation.transcribes:
            return TemplateRefusedError(
                f"asr_prompt contains {LANGUAGE_FIELD}, and the record names no language: give it a `language`, or "
                "set asr_language"
            )
        return None

    def _worded(self, conversation: Conversation) -> Conversation:
        """Return a conversation that transcribes with the words of the request behind its recording; unchanged if they
        name a language that is not known."""
        words = self._request.words_for(conversation) if conversation.transcribes else None
        if words is None:
            return conversation
        turns = (replace(turn, content=words) if turn.role == USER else turn for turn in conversation.turns)
        return replace(conversation, turns=tuple(turns), transcribes=False)

    def _variable_names(self, source: str) -> set[str]:
        try:
            (reply,) = RENDER_PROCESS.ask(source, {}, [{}])
        except LimitExceededError as error:
            raise ModelFileError(self._message(str(error))) from None
        if "variables" not in reply:
            where = f"{self._where}: chat_template" + (f", line {reply['line']}" if "line" in reply else "")
            raise ModelFileError(f"{where}: {escape_control_characters(reply['refused'])}")
        return set(reply["variables"])

    def _ask(self, name: str, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        try:
            return RENDER_PROCESS.ask(self._sources[name], self._variables, items)
        except LimitExceededError as error:
            raise ModelFileError(self._message(str(error))) from None

    def _message(self, reason: str) -> str:
        return f"{self._where}: chat_template: {escape_control_characters(reason)}"

    def _fingerprint(self, variables: Mapping[str, Any]) -> str:
        digest = hashlib.blake2b(_VERSION, digest_size=16)
        digest.update(json.dumps([sorted(self._sources.items()), sorted(variables.items())]).encode())
        if self._request != DEFAULT_REQUEST:
            digest.update(json.dumps([self._request.prompt, self._request.language]).encode())
        return digest.hexdigest()

    def _find_end_of_turn(self) -> tuple[EndOfTurn, list[str]]:
        """Return the end of turn as `segments_of` takes it, and the tokens that end answers; without one a model could
        not learn to stop."""
        answered = self._text(_PROBE.turns[:2])
        token = self._tokenizer.find_control_token(answered.partition(_PROBE.turns[1].content)[2])
        if token is not None:
            return token, [token]
        control_tokens = sorted(self._tokenizer.control_tokens, key=len, reverse=True)
        calling = Turn(ASSISTANT, "", True, {"content": "", "tool_calls": _PROBE_CALLS})
        dialogues = [_PROBE.turns[:3], (_PROBE.turns[0], calling, Turn("tool", "a result"))][: 1 + self._takes_calls]
        headers = [self._text(turns).removeprefix(self._text(turns[:-1])) for turns in dialogues]
        begun = [next((each for each in control_tokens if text.startswith(each)), "") for text in headers]
        if not begun[0]:
            raise DataError(
                self._message(
                    f"no control token ends an answer (after it stands {headers[0][:60]!r}), so a model trained with "
                    "it would not learn to stop. End assistant turns with eos_token"
                )
            )
        return control_tokens, [each for each in begun if each]

    def _text(self, turns: Sequence[Turn]) -> str:
        messages = messages_of(Conversation(tuple(turns)), self._tokenizer, self._units)
        (reply,) = self._ask("default", [{"messages": messages, "tools": None, "header": False}])
        if "text" not in reply:
            raise TemplateRefusedError(self._message(reply["refused"]))
        return reply["text"]


def renders_identically(template: JinjaTemplate, ernie: ErnieTemplate) -> bool:
    """Return whether a jinja template is ERNIE-4.5's format, judged by dialogues with everything that it can hold."""
    return template.render_many(_PROBES) == [ernie.render(probe) for probe in _PROBES]


def _answers(*texts: str) -> Conversation:
    turns = [Turn(USER if number % 2 == 0 else ASSISTANT, text, number % 2 == 1) for number, text in enumerate(texts)]
    return Conversation(tuple(turns))


_THOUGHTS = _answers("one?", "<think>\nfirst\n</think>\n\nA.", "two?", "<think>\nsecond\n</think>\n\nB.")
_ODD = _answers(" {{ q }}\n", "  a\n\n", "q\n\n\nq", "</think>", "tool_response", "User: c\nAssistant: ", "last?", "d")
_PROBES = [
    *(probe for plain in (_PROBE, _THOUGHTS, _ODD) for probe in (plain, Conversation(plain.turns, "a system text"))),
    *(Conversation(plain.turns[:-1], "be\n\nbrief ") for plain in (_PROBE, _THOUGHTS, _ODD)),
]


# What a template sees of a conversation.


def messages_of(conversation: Conversation, tokenizer: Tokenizer, units: UnitText) -> list[dict[str, Any]]:
    """Return the messages of a conversation, in whose texts no token arises that only the template may write."""
    plain = tokenizer.plain_text
    system = [{"role": "system", "content": plain(conversation.system)}] if conversation.system else []
    return system + [_message(turn, tokenizer, units) for turn in conversation.turns]


def _message(turn: Turn, tokenizer: Tokenizer, units: UnitText) -> dict[str, Any]:
    content = tokenizer.answer_text if turn.role == ASSISTANT else tokenizer.plain_text
    if turn.units_and_texts:
        message: dict[str, Any] = {"role": turn.role, "content": content_text(turn, content, units)}
    elif turn.clips:
        message = {"role": turn.role, "content": [_part(part, content) for part in turn.parts]}
    elif turn.fields is None:
        message = {"role": turn.role, "content": content(turn.content)}
    else:
        fields = {
            name: _guarded(value, content if name == "content" else tokenizer.plain_text)
            for name, value in turn.fields.items()
        }
        message = {"role": turn.role, **fields}
    return {**message, "reasoning_content": tokenizer.plain_text(turn.thoughts)} if turn.thoughts else message


def _part(part: str | Clip, guard: Callable[[str], str]) -> dict[str, Any]:
    """Return a part of a content as templates of models that listen expect it, without the recording's path."""
    return {"type": "text", "text": guard(part)} if isinstance(part, str) else dict(_AUDIO_PART)


def _guarded(value: Any, guard: Callable[[str], str]) -> Any:
    """Return a JSON value whose texts have gone through `guard`."""
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, Mapping):
        return {guard(name) if isinstance(name, str) else name: _guarded(item, guard) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_guarded(item, guard) for item in value]
    return value
