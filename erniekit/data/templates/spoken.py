"""The spoken-dialogue template: what is heard as units, its transcript, the answer's text, and the answer as units.

For models without a chat template, as "Paralinguistics-Aware Speech-Empowered Large Language Models for Natural
Conversation" (Kim et al., 2024) has it; USDM is that paper's model. U and V stand for tokens of units:

    Below is a conversation between the user and the agent. Each turn ...

    ### User
    UUU<|correspond|>what is said
    ### Agent
    the answer<|correspond|>VVV
    </s>

Trained are the transcript with its line end, and the answer with its units, in all turns. `spoken` also trains the line
end behind them, at which generation stops; `usdm` has the labels of the published script, which does not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from functools import partial
from typing import NamedTuple

from erniekit.data.conversation import ASSISTANT, USER, Conversation, Part, Turn
from erniekit.data.templates.ernie import Segment, TemplateRefusedError, refuse_tokens_in, rendered_or_refused
from erniekit.data.templates.speech import UnitText
from erniekit.data.templates.transcription import Speech
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.data.unit_tokens import NUMBER
from erniekit.data.units import Units
from erniekit.errors import ModelFileError

SPOKEN, USDM = "spoken", "usdm"
INSTRUCTION = (
    "Below is a conversation between the user and the agent. Each turn includes the user's speech and its "
    "corresponding transcript, along with the agent's response text and the corresponding speech."
)
USER_HEADER, AGENT_HEADER = "\n### User\n", "### Agent\n"
LINES = 5  # line ends of a turn; one more stands behind the instruction
_PROBE = "a.\n\n### User\n?<C>b!\n### Agent\n1.<C>c\n\n### User\n"


class SpokenTurn(NamedTuple):
    """A question and its answer; texts are ready to be encoded.

    Attributes:
        transcript: None where the model is to write it.
        answer: the text and the units; None where the model is to give them.
        trained: of transcript, answer text and answer units.
    """

    heard: str
    transcript: str | None
    answer: tuple[str, str] | None
    trained: tuple[bool, bool, bool] = (False, False, False)


class SpokenTemplate:
    """See ernie.Template. The system text of a dialogue takes the place of the instruction.

    Where the line ends of the template are tokens of their own, a dialogue is encoded as one text, and the places of
    its line ends say what is trained, as in the published script. Other tokenizers join them to full stops: then each
    part is encoded on its own.

    Raises:
        ConfigurationError: an added token is in what the template writes.
        ModelFileError: the tokenizer has no token `correspond_token`.
    """

    end_of_turn_target: int | None = None
    variable_names: Set[str] = frozenset()

    def __init__(self, tokenizer: Tokenizer, speech: Speech) -> None:
        refuse_tokens_in((INSTRUCTION, USER_HEADER, AGENT_HEADER), tokenizer, "spoken dialogues")
        self._tokenizer, self._speech = tokenizer, speech
        self._units = UnitText(tokenizer, speech.unit_token)
        number = tokenizer.token_id(speech.correspond_token)
        if number is None:
            raise ModelFileError(
                f"dialogue_template {speech.dialogue_template}: the tokenizer has no token {speech.correspond_token}: "
                f'write added_tokens: ["{speech.correspond_token}"], or name its own token as correspond_token'
            )
        self._correspond_id = number
        self._newline_id = tokenizer.encode("\n")[-1]
        self._prefix = tokenizer.decode(tokenizer.document_prefix, skip_special_tokens=False)
        probe = _PROBE.replace("<C>", speech.correspond_token)
        self._counts_lines = tokenizer.encode(probe).count(self._newline_id) == probe.count("\n")
        self._trains_end = speech.dialogue_template != USDM
        unit = re.escape(speech.unit_token).replace(re.escape(NUMBER), r"(\d{1,6})")
        self._written_units = re.compile(f"(?:{unit})+", re.ASCII)
        self._unit = re.compile(unit, re.ASCII)
        self.stop_token_ids = tuple(dict.fromkeys((tokenizer.eos_id, self._newline_id)))
        self.fingerprint = f"spoken 1{speech.key}"

    def render(self, conversation: Conversation) -> list[Segment]:
        turns = self._turns(conversation)
        instruction = self._text(conversation.system or INSTRUCTION)
        prefix = [Segment(self._prefix, False)] if self._prefix else []
        end = self._tokenizer.special_tokens["eos_token"] if turns[-1].answer is not None else ""
        if not self._counts_lines:
            parts = [part for turn in turns for part in self._parts(turn)]
            return [*prefix, Segment(f"{instruction}\n", False), *parts, *([Segment(end, False)] if end else [])]
        text = f"{instruction}\n" + "".join(part.text for turn in turns for part in self._parts(turn)) + end
        return [*prefix, Segment(text, True, select=partial(self._targets, turns))]

    def render_many(self, conversations: Sequence[Conversation]) -> list[list[Segment] | TemplateRefusedError]:
        return rendered_or_refused(self, conversations)

    def continuation(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """Return what stands between a transcript, which `answer` is, and the answer to it, from the line end on; empty
        where the prompt asks for no transcript."""
        if not prompt or prompt[-1] != self._correspond_id:
            return []
        if not self._counts_lines:
            return [*self._tokenizer.encode("\n"), *self._tokenizer.encode(AGENT_HEADER)]
        header = self._tokenizer.encode(f"\n{AGENT_HEADER}")
        return header[header.index(self._newline_id) :]

    def _parts(self, turn: SpokenTurn) -> list[Segment]:
        """Return a turn as parts that are encoded on their own."""
        mark = self._speech.correspond_token
        of_transcript, of_text, of_units = turn.trained
        parts = [Segment(f"{USER_HEADER}{turn.heard}{mark}", False)]
        if turn.transcript is not None:
            parts += [Segment(turn.transcript, of_transcript), Segment("\n", of_transcript)]
            parts.append(Segment(AGENT_HEADER, False))
        if turn.answer is not None:
            text, units = turn.answer
            parts += [Segment(text, of_text), Segment(f"{mark}{units}", of_units)]
            parts.append(Segment("\n", of_units and self._trains_end))
        return parts

    def _targets(self, turns: Sequence[SpokenTurn], ids: Sequence[int]) -> list[bool]:
        """Return which tokens of a dialogue are targets: those between certain line ends and marks.

        Raises:
            TemplateRefusedError: a text has a line end or a mark of its own.
        """
        targets = [False] * len(ids)
        complete = [turn for turn in turns if turn.answer is not None]
        if len(complete) < len(turns):  # a prompt
            return targets
        lines = [place for place, token in enumerate(ids) if token == self._newline_id]
        marks = [place for place, token in enumerate(ids) if token == self._correspond_id]
        if len(lines) != 1 + LINES * len(turns) or len(marks) != 2 * len(turns):
            raise TemplateRefusedError(f"a text with a line break or {self._speech.correspond_token} in it")
        for number, turn in enumerate(turns):
            before_agent, before_answer, end = lines[LINES * number + 3 : LINES * number + 6]
            heard, said = marks[2 * number : 2 * number + 2]
            of_transcript, of_text, of_units = turn.trained
            spans = (
                (heard + 1, before_agent + 1, of_transcript),
                (before_answer + 1, said, of_text),
                (said, end + self._trains_end, of_units),
            )
            for start, stop, trained in spans:
                targets[start:stop] = [trained] * (stop - start)
        return targets

    # What a dialogue has to be.

    def _turns(self, conversation: Conversation) -> list[SpokenTurn]:
        if conversation.uses_tools or conversation.transcribes or any(turn.thoughts for turn in conversation.turns):
            raise TemplateRefusedError("tools, thoughts or a request for a transcript, which spoken dialogues have not")
        questions, answers = conversation.turns[::2], conversation.turns[1::2]
        in_turn = all(turn.role == USER for turn in questions) and all(turn.role == ASSISTANT for turn in answers)
        if not in_turn:
            raise TemplateRefusedError("two messages of the user one after the other")
        turns = [self._turn(*pair) for pair in zip(questions, answers, strict=False)]
        if len(questions) > len(answers):
            turns.append(SpokenTurn(*self._question(questions[-1]), None))
        if any(turn.transcript is None for turn in turns if turn.answer is not None):
            raise TemplateRefusedError("a message of the user without the transcript of its units, in a part `text`")
        return turns

    def _turn(self, question: Turn, answer: Turn) -> SpokenTurn:
        heard, transcript = self._question(question)
        parts = answer.units_and_texts or self._read(answer)
        if len(parts) != 2 or not isinstance(parts[0].value, str) or not isinstance(parts[1].value, Units):
            raise TemplateRefusedError('an answer that is not two parts, {"text": ...} and {"units": ...}')
        (text, of_text), (units, of_units) = parts
        assert isinstance(text, str) and isinstance(units, Units)
        trained = (answer.trained, answer.trained and of_text, answer.trained and of_units)
        return SpokenTurn(heard, transcript, (self._text(text), self._units.of(units)), trained)

    def _question(self, turn: Turn) -> tuple[str, str | None]:
        parts = turn.units_and_texts or self._read(turn)
        units = parts[0].value if parts else None
        text = parts[1].value if len(parts) == 2 else None
        if not isinstance(units, Units) or len(parts) > 2 or (len(parts) == 2 and not isinstance(text, str)):
            raise TemplateRefusedError(
                'a message of the user that is not {"units": ...} and its transcript, {"text": ...}'
            )
        return self._units.of(units), self._text(text) if isinstance(text, str) else None

    def _read(self, turn: Turn) -> tuple[Part, ...]:
        """Return the parts of a message that writes its units as their tokens, as a user of `erniekit chat` does and as
        models answer."""
        parts: list[Part] = []
        place = 0
        for found in self._written_units.finditer(turn.content):
            parts.append(Part(turn.content[place : found.start()]))
            parts.append(Part(Units(tuple(int(code) for code in self._unit.findall(found.group())))))
            place = found.end()
        parts.append(Part(turn.content[place:]))
        mark = self._speech.correspond_token
        cut = [Part(part.value.replace(mark, "")) if isinstance(part.value, str) else part for part in parts]
        return tuple(part for part in cut if isinstance(part.value, Units) or str(part.value).strip())

    def _text(self, text: str) -> str:
        if "\n" in text or "\r" in text:
            raise TemplateRefusedError("a line break in a text: in spoken dialogues a line end is the end of a text")
        if self._speech.correspond_token in text:
            raise TemplateRefusedError(f"{self._speech.correspond_token} in a text")
        return self._tokenizer.plain_text(text)
