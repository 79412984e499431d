"""The dialogue format of Mistral's models with Tekken vocabularies, and Voxtral's recordings in it.

These models publish no jinja template: mistral-common, which this module follows (1.13), writes their dialogues. A
recording is one placeholder token here, which becomes as many as the encoder has states when the dialogue is encoded.

    <s>[SYSTEM_PROMPT]...[/SYSTEM_PROMPT][INST][BEGIN_AUDIO][AUDIO]What is said?[/INST]Six ducks.</s>
    <s>[INST][BEGIN_AUDIO][AUDIO][/INST]lang:en[TRANSCRIBE]six ducks</s>
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from itertools import groupby

from erniekit.data.conversation import ASSISTANT, USER, Conversation, Turn
from erniekit.data.templates.ernie import RewritesTurnsError, Segment, TemplateRefusedError, rendered_or_refused
from erniekit.data.templates.speech import UnitText, content_text, split_at_marks
from erniekit.data.templates.transcription import DEFAULT_SPEECH, LANGUAGES, Request, Speech
from erniekit.data.tokenizers.files import TEKKEN_FILE
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.errors import DataError, ModelFileError

BEGIN, END = "<s>", "</s>"
BEGIN_USER, END_USER = "[INST]", "[/INST]"
BEGIN_SYSTEM, END_SYSTEM = "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"
BEGIN_AUDIO, AUDIO, TRANSCRIBE = "[BEGIN_AUDIO]", "[AUDIO]", "[TRANSCRIBE]"
VERSIONS = (3, 7, 11, 13)
FIRST_WITH_SYSTEM_TURN = 7  # before, the system text stands in the last question
FIRST_WITH_SYSTEM_AND_AUDIO = 13
BETWEEN_TURNS = "\n\n"  # of one speaker


class MistralTemplate:
    """See ernie.Template.

    Args:
        request: how transcripts are asked for; Voxtral's request has no words, but it may name the language.
        speech: how units of speech are written.

    Raises:
        ModelFileError: tekken.json has a version whose dialogues this module does not know, or lacks a token of them.
        DataError: the language of the request is none that Voxtral's requests take.
    """

    end_of_turn_target: int | None = None
    variable_names: Set[str] = frozenset()

    def __init__(self, tokenizer: Tokenizer, request: Request, speech: Speech = DEFAULT_SPEECH) -> None:
        assert tokenizer.tekken_version is not None
        self._version = tokenizer.tekken_version
        if self._version not in VERSIONS:
            known = ", ".join(f"v{version}" for version in VERSIONS)
            raise ModelFileError(
                f"{TEKKEN_FILE}: config.version: the dialogues of v{self._version} are not known here, only those of "
                f"{known}: put the chat template into chat_template.jinja in the model's folder"
            )
        self._tokenizer = tokenizer
        self._request = request
        self._units = UnitText(tokenizer, speech.unit_token)
        needed = [BEGIN, END, BEGIN_USER, END_USER]
        needed += [BEGIN_SYSTEM, END_SYSTEM] if self._version >= FIRST_WITH_SYSTEM_TURN else []
        lacking = [token for token in needed if token not in tokenizer.control_tokens]
        if lacking:
            raise ModelFileError(f"{TEKKEN_FILE}: special_tokens: {lacking[0]} is missing, which dialogues need")
        self.stop_token_ids: tuple[int, ...] = (tokenizer.eos_id,)
        if request.language and request.language not in LANGUAGES:
            raise DataError(f"asr_language: {_not_two_letters(request.language)}")
        language = f" {request.language}" if request.language else ""
        self.fingerprint = f"mistral v{self._version}{language}{speech.key}"

    def render(self, conversation: Conversation) -> list[Segment]:
        self._check(conversation)
        text = BEGIN
        system = self._tokenizer.plain_text(conversation.system)
        if system and self._version >= FIRST_WITH_SYSTEM_TURN:
            text += BEGIN_SYSTEM + system + END_SYSTEM
        segments: list[Segment] = []
        last_question = _last_question(conversation)
        groups = [(role, list(turns)) for role, turns in groupby(conversation.turns, key=lambda turn: turn.role)]
        for number, (role, turns) in enumerate(groups):
            if role == ASSISTANT:
                answer = self._text(turns[0], self._tokenizer.answer_text).rstrip(" ")
                segments += [Segment(text, False), *split_at_marks(Segment(answer + END, turns[0].trained))]
                text = ""
                continue
            text += BEGIN_USER
            if system and self._version < FIRST_WITH_SYSTEM_TURN and number == last_question:
                text += system + BETWEEN_TURNS
            text += self._question(turns) + END_USER
            if conversation.transcribes:
                language = self._request.language_of(conversation)
                text += (f"lang:{language}" if language else "") + TRANSCRIBE
        return [*segments, Segment(text, False)] if text else segments

    def render_many(self, conversations: Sequence[Conversation]) -> list[list[Segment] | TemplateRefusedError]:
        return rendered_or_refused(self, conversations)

    def _question(self, turns: Iterable[Turn]) -> str:
        """Return the content of user turns; texts of two turns that follow each other have an empty line between."""
        text, follows_text = "", False
        for turn in turns:
            if turn.units_and_texts:
                text += (BETWEEN_TURNS if follows_text else "") + self._text(turn, self._tokenizer.plain_text)
                follows_text = True
                continue
            next_of_other_turn = follows_text
            for part in turn.parts:
                follows_text = isinstance(part, str)
                if isinstance(part, str):
                    text += (BETWEEN_TURNS if next_of_other_turn else "") + self._tokenizer.plain_text(part)
                else:
                    text += BEGIN_AUDIO + AUDIO
                next_of_other_turn = False
        return text

    def _text(self, turn: Turn, guard: Callable[[str], str]) -> str:
        return content_text(turn, guard, self._units) if turn.units_and_texts else guard(turn.content)

    def _check(self, conversation: Conversation) -> None:
        if conversation.uses_tools or any(turn.thoughts for turn in conversation.turns):
            raise TemplateRefusedError(
                "tools or reasoning_content, for which the template of Tekken vocabularies has no place here: put a "
                "chat_template.jinja that takes them into the model's folder, or remove these records"
            )
        if conversation.clips or conversation.transcribes:
            self._check_audio(conversation)
        elif conversation.system and self._version < FIRST_WITH_SYSTEM_TURN and _trains_before_last(conversation):
            raise RewritesTurnsError(
                f"the dialogues of Tekken v{self._version} show a system text only in the last question, so only one "
                "answer of a sample can be marked as a target"
            )

    def _check_audio(self, conversation: Conversation) -> None:
        needed = (BEGIN_AUDIO, AUDIO, *((TRANSCRIBE,) if conversation.transcribes else ()))
        lacking = [token for token in needed if token not in self._tokenizer.control_tokens]
        if lacking or self._version < FIRST_WITH_SYSTEM_TURN:
            reason = f"its tokenizer lacks {lacking[0]}" if lacking else f"Tekken v{self._version} has no place for one"
            raise TemplateRefusedError(f"a recording, which the model does not take: {reason}")
        if conversation.language and conversation.language not in LANGUAGES:
            raise TemplateRefusedError(f"language: {_not_two_letters(conversation.language)}")
        if any(turn.clips for turn in conversation.turns if turn.role != USER):
            raise TemplateRefusedError("a recording in an answer: only a user's turn may hold one")
        if conversation.system and (conversation.transcribes or self._version < FIRST_WITH_SYSTEM_AND_AUDIO):
            where = "a request for a transcript" if conversation.transcribes else f"Tekken v{self._version}"
            raise TemplateRefusedError(f"a system text beside a recording, for which {where} has no place: remove it")


def _not_two_letters(language: str) -> str:
    return f"{language!r} is no two-letter code of ISO 639-1, such as en, which Voxtral's requests take"


def _last_question(conversation: Conversation) -> int:
    """Return the number of the last group of user turns, where groups of users and single answers take turns."""
    roles = [role for role, _ in groupby(turn.role for turn in conversation.turns)]
    return len(roles) - 1 - roles[::-1].index(USER)


def _trains_before_last(conversation: Conversation) -> bool:
    return conversation.rounds > 1 and any(turn.trained for turn in conversation.turns[:-1])
