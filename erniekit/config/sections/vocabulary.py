"""2.6 Added tokens: texts that become tokens of the model, such as the units of speech."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, parameter, rule, section, when
from erniekit.config.values import TEXTS, format_value

MAX_ADDED_TOKENS = 500_000  # published codebooks have up to 262,144 codes; more is a slip
MAX_TOKEN_LENGTH = 200  # characters
MOST_NAMED = 3  # tokens in a message
_RANGE = re.compile(r"\{([^{}]*)\.\.([^{}]*)\}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class VocabularyParameters:
    """Texts that become tokens of their own: the units of speech, or marks of a task."""

    added_tokens: tuple[str, ...] = parameter(
        (),
        "Texts that become tokens. Those that the tokenizer has already keep their ids; the others follow on its "
        "largest id, in the order written here, and the embedding and the head of the model grow by their rows. "
        "Wherever a text of the data holds one, it is read as this token, unlike the control tokens of a chat "
        "template. `output_dir` holds a tokenizer that knows them, so later commands need not name them again. Tokens "
        "with commas must be items of a YAML list.",
        kind=TEXTS,
        example="<|continue|>,<|correspond|>",
    )
    added_token_ranges: tuple[str, ...] = parameter(
        (),
        "The same for numbered tokens: `<|unit{0..9999}|>` stands for the 10,000 tokens from `<|unit0|>` to "
        "`<|unit9999|>`. They follow on those of `added_tokens`.",
        kind=TEXTS,
        example="<|unit{0..9999}|>",
    )
    new_token_init: str = parameter(
        "normal",
        "How the rows of new tokens begin in embedding and head: drawn at random like the weights of a new model "
        "(`normal`: the family's initializer range, from `seed`), or as the mean of the rows of all earlier tokens "
        "(`mean`), from which a pretrained model gives each new token the probability of an average one.",
        choices=("normal", "mean"),
        needs=(when("added_tokens"), when("added_token_ranges")),
        verbs=("train",),
        example="mean",
    )
    train_added_tokens: bool = parameter(
        True,
        "With adapters: train the rows of new tokens in embedding and head beside them, and save them in the folder of "
        "the adapters, in PEFT's format. All other rows stay frozen. When false the new rows are saved as they began.",
        needs=when("lora"),
        verbs=("train",),
        example=False,
    )


def expand_range(text: str) -> list[str]:
    """Return the tokens that an item of `added_token_ranges` stands for.

    Example: `<|unit{0..2}|>` stands for `<|unit0|>`, `<|unit1|>` and `<|unit2|>`.

    Raises:
        ValueError: the text has no range, several, or one that cannot be read; the message says which.
    """
    ranges = list(_RANGE.finditer(text))
    if not ranges:
        raise ValueError("has no range such as `{0..9999}`; tokens without one belong into `added_tokens`")
    if len(ranges) > 1:
        raise ValueError("has more than one range; write an item for each value of the first one")
    found = ranges[0]
    for number in found.groups():
        if not _NUMBER.fullmatch(number):
            raise ValueError(f"`{number}` is no number of a range, which begins at 0 or above, without leading zeros")
    first, last = map(int, found.groups())
    if first > last:
        raise ValueError(f"the range runs backwards, from {first} to {last}")
    if last - first >= MAX_ADDED_TOKENS:
        raise ValueError(f"{last - first + 1:,} tokens are more than {MAX_ADDED_TOKENS:,}")
    before, after = text[: found.start()], text[found.end() :]
    return [f"{before}{number}{after}" for number in range(first, last + 1)]


def expanded_tokens(added_tokens: Sequence[str], added_token_ranges: Iterable[str]) -> list[str]:
    """Return the tokens of both parameters, in the order of their ids.

    Raises:
        ValueError: see `expand_range`.
    """
    return [*added_tokens, *(token for text in added_token_ranges for token in expand_range(text))]


def token_problem(text: str) -> str:
    """Return why a text cannot be a token, or "" if it can."""
    if not text:
        return "is empty"
    if len(text) > MAX_TOKEN_LENGTH:
        return f"has {len(text):,} characters, more than {MAX_TOKEN_LENGTH}"
    if text != text.strip():
        return "begins or ends with white space, which tokenizers change"
    for character in text:
        number, category = ord(character), unicodedata.category(character)
        if category == "Cs":
            return f"holds U+{number:04X}, half of a character, which no text can hold"
        if category == "Cc" or 0xFDD0 <= number <= 0xFDEF or number & 0xFFFE == 0xFFFE:
            return f"holds U+{number:04X}, which is no printable character"
    return ""


@rule("added_tokens")
def tokens_can_be_written(builder: ConfigBuilder) -> None:
    """Every item of `added_tokens` is a printable text without a range and without white space around it."""
    for text in builder["added_tokens"]:
        if what := token_problem(text):
            builder.problem("added_tokens", f"{format_value(text)} {what}")
        elif _RANGE.search(text):
            builder.problem("added_tokens", f"{format_value(text)} is a range", "write it into `added_token_ranges`")


@rule("added_tokens", "added_token_ranges")
def ranges_can_be_expanded(builder: ConfigBuilder) -> None:
    """Every item of `added_token_ranges` has one range `{first..last}`; no token is named twice, and both parameters
    together name 500,000 tokens at most."""
    tokens = list(builder["added_tokens"])
    for text in builder["added_token_ranges"]:
        try:
            expanded = expand_range(text)
        except ValueError as error:
            builder.problem("added_token_ranges", f"{format_value(text)}: {error}", "write it as `<|unit{0..9999}|>`")
            return
        if what := token_problem(expanded[-1]):
            builder.problem("added_token_ranges", f"{format_value(text)}: {format_value(expanded[-1])} {what}")
            return
        tokens += expanded
    name = "added_token_ranges" if builder["added_token_ranges"] else "added_tokens"
    twice = [token for token, count in Counter(tokens).items() if count > 1]
    if twice:
        more = f" and {len(twice) - MOST_NAMED:,} more" if len(twice) > MOST_NAMED else ""
        named = ", ".join(format_value(token) for token in twice[:MOST_NAMED])
        builder.problem(name, f"{named}{more}: named more than once", "name every token once")
    elif len(tokens) > MAX_ADDED_TOKENS:
        builder.problem(name, f"{len(tokens):,} tokens are more than {MAX_ADDED_TOKENS:,}")


@rule("train_added_tokens", "lora", "added_tokens", "added_token_ranges", verbs=("train",))
def rows_of_no_tokens_are_not_trained(builder: ConfigBuilder) -> None:
    """`train_added_tokens` has an effect where tokens are added."""
    adds_tokens = builder["added_tokens"] or builder["added_token_ranges"]
    if builder.is_set("train_added_tokens") and builder["lora"] and not adds_tokens:
        builder.no_effect("train_added_tokens", "without added_tokens or added_token_ranges")


SECTION = section(
    VocabularyParameters,
    key="vocabulary",
    title="2.6 Added tokens",
    verbs=("train", "eval", "preview"),
    rules=(tokens_can_be_written, ranges_can_be_expanded, rows_of_no_tokens_are_not_trained),
)
