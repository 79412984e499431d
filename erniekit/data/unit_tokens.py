"""The tokens of units: which token of the vocabulary each unit of speech is, and those that mark segments."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, takewhile

from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.errors import ConfigurationError

NUMBER = "{}"  # of a unit, in the parameter unit_token


@dataclass(frozen=True, slots=True)
class UnitTokens:
    """The ids of units and of their marks in one vocabulary.

    Attributes:
        ids: of the units 0, 1, 2, ...; there are as many units as the vocabulary has tokens without a gap.
        continue_id: between segments where the kind changes.
        correspond_id: between a segment and the same words in the other kind.
        unit_token: the text of a unit's token, with `{}` for its number; for messages.
    """

    ids: tuple[int, ...]
    continue_id: int
    correspond_id: int
    unit_token: str


def unit_tokens(tokenizer: Tokenizer, unit_token: str, continue_token: str, correspond_token: str) -> UnitTokens:
    """Look the tokens up in the vocabulary; it takes about 10 ms for 10,000 units.

    Raises:
        ConfigurationError: the vocabulary lacks one of the three; the message has the lines that add them.
    """
    ids = tuple(unit_ids(tokenizer, unit_token))
    marks = {token: tokenizer.token_id(token) for token in (continue_token, correspond_token)}
    missing = [token for token, number in marks.items() if number is None]
    first = unit_token.replace(NUMBER, "0")
    if missing or not ids:
        lines = [f"  added_tokens: [{', '.join(map(_quoted, missing))}]"] if missing else []
        if not ids:
            unit_range = _quoted(unit_token.replace(NUMBER, "{0..9999}"))
            lines.append(f"  added_token_ranges: [{unit_range}]  # as many as the codebook has codes")
        names = ", ".join([*([] if ids else [first]), *missing])
        raise ConfigurationError(
            f"units of speech: the tokenizer of model_name_or_path has no token {names}\n  Add to the configuration\n"
            + "\n".join(lines)
            + "\n  or name the tokens that it has as unit_token, continue_token and correspond_token."
        )
    continue_id, correspond_id = (number for number in marks.values() if number is not None)
    return UnitTokens(ids, continue_id, correspond_id, unit_token)


def unit_ids(tokenizer: Tokenizer, unit_token: str) -> list[int]:
    """Return the ids of the tokens of units 0, 1, 2, ... up to the first number that the vocabulary lacks."""
    found = (tokenizer.token_id(unit_token.replace(NUMBER, str(number))) for number in count())
    return [number for number in takewhile(lambda number: number is not None, found) if number is not None]


def _quoted(token: str) -> str:
    return '"' + token.replace("\\", "\\\\").replace('"', '\\"') + '"'
