"""Units of speech in dialogues: their tokens in a rendered text, and the parts of an answer that are trained or not."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from erniekit.data.conversation import Conversation, Turn
from erniekit.data.templates.ernie import Segment, TemplateRefusedError
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.data.unit_tokens import NUMBER, unit_ids
from erniekit.data.units import Units

_MARK = secrets.token_hex(16)  # made anew by every process, so no text contains it
TRAINED_FROM, READ_FROM = f"{_MARK}+", f"{_MARK}-"  # stand in an answer where its training begins, and where it ends


@dataclass(frozen=True)
class UnitText:
    """The tokens of units, as a text.

    Attributes:
        unit_token: the text of the token of a unit, with `{}` for its number.
    """

    tokenizer: Tokenizer
    unit_token: str = "<|unit{}|>"

    @cached_property
    def known(self) -> int:
        """The number of units for which the tokenizer has a token."""
        return len(unit_ids(self.tokenizer, self.unit_token))

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """The tokens of units that the tokenizer leaves out of a text as control tokens."""
        control = {self.tokenizer.token_id(token) for token in self.tokenizer.control_tokens}
        return frozenset(number for number in unit_ids(self.tokenizer, self.unit_token) if number in control)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, in which units are their tokens, also where these are control tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=self._special_ids.isdisjoint(ids))

    def of(self, units: Units) -> str:
        """Return the tokens of units, one after the other.

        Raises:
            TemplateRefusedError: the tokenizer has no token for one of them.
        """
        largest = max(units.codes)
        if largest >= self.known:
            token, whole = (self.unit_token.replace(NUMBER, each) for each in (str(largest), f"{{0..{largest}}}"))
            raise TemplateRefusedError(
                f"unit {largest:,}, for which the tokenizer has no token {token}: write `added_token_ranges: "
                f'["{whole}"]`, or as many as the codebook has codes (unit_token names the tokens of units)'
            )
        return "".join(self.unit_token.replace(NUMBER, str(code)) for code in units.codes)


def content_text(turn: Turn, guard: Callable[[str], str], units: UnitText) -> str:
    """Return a content with units as one text, with a mark wherever training begins or ends in an answer.

    Args:
        guard: keeps a text from becoming control tokens; see `Tokenizer.plain_text`.

    Raises:
        TemplateRefusedError: a unit has no token; or the content has a recording, too.
    """
    text, trained = "", True
    for part in turn.units_and_texts:
        if part.value is None:
            raise TemplateRefusedError("a recording and units in one message: write the recording's units in its place")
        if part.trained != trained:
            text += TRAINED_FROM if part.trained else READ_FROM
            trained = part.trained
        text += units.of(part.value) if isinstance(part.value, Units) else guard(part.value)
    return text


def refused_units(conversation: Conversation, units: UnitText) -> TemplateRefusedError | None:
    """Return why the units of a dialogue cannot be rendered; None where they can be, or where there are none."""
    try:
        for turn in conversation.turns:
            content_text(turn, str, units)
    except TemplateRefusedError as error:
        return error
    return None


def split_at_marks(segment: Segment) -> list[Segment]:
    """Return the parts of a rendered answer; an answer without marks as it is."""
    if _MARK not in segment.text:
        return [segment]
    first, *others = segment.text.split(_MARK)
    pieces = [(first, True), *((each[1:], each[0] == TRAINED_FROM[-1]) for each in others)]
    parts = [Segment(text, segment.trained and trained, ends_turn=False) for text, trained in pieces]
    *earlier, last = [part for part in parts if part.text]
    return [*earlier, replace(last, ends_turn=True)]
