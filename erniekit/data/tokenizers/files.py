"""Read a tokenizer's configuration from a model folder, and find added tokens in texts. Needs no Paddle or NumPy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from erniekit.data.tokenizers.breaks import BREAK, encode_without, longest_of
from erniekit.errors import ModelFileError
from erniekit.json_files import read_json_object

TOKENIZER_FILE = "tokenizer.json"
TEKKEN_FILE = "tekken.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
SENTENCEPIECE_FILES = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model")
VOCABULARY_FILES = ("vocab.json", "merges.txt", "vocab.txt")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
ADDITIONAL_TEMPLATES = "additional_chat_templates"
TEXT_TOKENS_KEY = "erniekit_added_tokens"  # of CONFIG_FILE: added tokens that are read in texts; others ignore the key
TOKENIZER_FILES = (
    TOKENIZER_FILE, CONFIG_FILE, SPECIAL_TOKENS_FILE, *TEMPLATE_FILES, ADDED_TOKENS_FILE, *SENTENCEPIECE_FILES,
    *VOCABULARY_FILES, TEKKEN_FILE,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is searched for in a text before the vocabulary is used.

    Attributes:
        special: controls the model; left out of decoded answers.
        lstrip, rstrip: it absorbs the white space on that side.
        single_word: it matches only between spaces.
    """

    content: str
    id: int
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


def needs_paddlenlp(folder: Path) -> bool:
    """Return whether only paddlenlp, which imports Paddle, reads the vocabulary in `folder`."""
    others = (TOKENIZER_FILE, TEKKEN_FILE, *SENTENCEPIECE_FILES)
    if any((folder / name).is_file() for name in others):
        return False
    return any((folder / name).is_file() for name in VOCABULARY_FILES)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; {} if there is no such file."""
    return read_json_object(path) if path.exists() else {}


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the tokenizer's configuration, completed from special_tokens_map.json."""
    return {**read_json(folder / SPECIAL_TOKENS_FILE), **read_json(folder / CONFIG_FILE)}


def special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return name -> text of `bos_token`, `eos_token`, ...; the value is a string, or an object
    with the string inside."""
    named = {name: _content(value) for name, value in settings.items() if name.endswith("_token")}
    return {name: text for name, text in named.items() if text is not None}


def text_tokens(settings: dict[str, Any]) -> frozenset[str]:
    """Return the added tokens that a run has declared to be text: they are read wherever a text holds them.

    Raises:
        ModelFileError: they are not a list of texts.
    """
    listed = settings.get(TEXT_TOKENS_KEY, [])
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise ModelFileError(f"{CONFIG_FILE}: {TEXT_TOKENS_KEY}: expected a list of tokens")
    return frozenset(listed)


def added_tokens(folder: Path, settings: dict[str, Any], base_id: Callable[[str], int | None]) -> dict[str, AddedToken]:
    """Return the added tokens of a folder without tokenizer.json, by text, as transformers' slow tokenizers find them.

    Ids come from `added_tokens_decoder` of the configuration, else from added_tokens.json, else from the vocabulary.

    Args:
        base_id: returns the id of a token of the vocabulary, or None.

    Raises:
        ModelFileError: a file is malformed, or a named token has no id anywhere.
    """
    values = [*(settings[name] for name in special_tokens(settings)), *_listed_special_tokens(folder, settings)]
    special: dict[str, Any] = {text: value for value in values if (text := _content(value)) is not None}
    found: dict[str, AddedToken] = {}
    try:
        for key, value in (settings.get("added_tokens_decoder") or {}).items():
            found[value["content"]] = _added(value, int(key), bool(value.get("special")) or value["content"] in special)
        if not found:
            for text, number in read_json(folder / ADDED_TOKENS_FILE).items():
                found[text] = _added(special.get(text, text), int(number), text in special)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelFileError(f"{folder}: added tokens: expected text, id and flags of each: {error!r}") from None
    for text, value in special.items():
        number = found[text].id if text in found else base_id(text)
        if number is None:
            raise ModelFileError(
                f"{folder / CONFIG_FILE}: the special token {text!r} is neither in the vocabulary nor in "
                f"added_tokens_decoder or {ADDED_TOKENS_FILE}"
            )
        found.setdefault(text, _added(value, number, True))
    return found


def chat_templates_of(folder: Path, config: dict[str, Any]) -> tuple[dict[str, str], Path | None]:
    """Return the jinja texts by name, `default` among them, and their file; both are empty if there is none.

    A separate file takes precedence over the tokenizer's configuration. Beside chat_template.jinja, further templates
    are in additional_chat_templates/NAME.jinja.
    """
    jinja_file, json_file = (folder / name for name in TEMPLATE_FILES)
    if jinja_file.is_file():
        further = sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja"))
        return {"default": _read_text(jinja_file)} | {path.stem: _read_text(path) for path in further}, jinja_file
    if json_file.is_file():
        return _named_templates(read_json(json_file).get("chat_template"), json_file), json_file
    templates = _named_templates(config.get("chat_template"), folder / CONFIG_FILE)
    return templates, folder / CONFIG_FILE if templates else None


def _listed_special_tokens(folder: Path, settings: dict[str, Any]) -> list[Any]:
    listed = settings.get("additional_special_tokens") or []
    extra = settings.get("extra_special_tokens") or {}
    if not isinstance(listed, list) or not isinstance(extra, dict):
        raise ModelFileError(f"{folder / CONFIG_FILE}: additional_special_tokens: expected a list of tokens")
    return [*listed, *extra.values()]


def _content(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _added(value: Any, number: int, special: bool) -> AddedToken:
    flags = value if isinstance(value, dict) else {}
    content = _content(value)
    if content is None:
        raise ValueError(f"no text for {number}")
    sides = {name: bool(flags.get(name)) for name in ("lstrip", "rstrip", "single_word")}
    return AddedToken(content, number, special, **sides)


def _named_templates(value: object, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        templates = {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
        if "default" in templates:
            return templates
    raise ModelFileError(f"{path}: chat_template: expected a string, or a list with a template named 'default'")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ModelFileError(f"{path}: cannot be read: {reason}") from None


def structural_tokens(
    tokens: Iterable[AddedToken],
    base_id: Callable[[str], int | None],
    template_text: str,
    declared_text: frozenset[str] = frozenset(),
) -> frozenset[str]:
    """Return the texts of the tokens that give a dialogue its structure: special ones, and others such as `<tool_call>`
    that the chat template writes or that are no words of the vocabulary.

    Other added tokens are text: runs of white space, words of the vocabulary that are only listed again, and those
    that a run has declared to be text (`text_tokens`).
    """
    declared = {text for text in declared_text if text not in template_text}
    return frozenset(
        token.content
        for token in tokens
        if token.special
        or (
            token.content not in declared
            and token.content.strip(" \t\r\n\u2581")
            and (base_id(token.content) != token.id or token.content in template_text)
        )
    )


# Finding added tokens in a text, as transformers' slow tokenizers do, around any vocabulary.

TextChunk = str | AddedToken


class AddedTokens:
    """The added tokens of a folder, and tokenising around them.

    Attributes:
        by_text, by_id: the tokens.
        special: the texts of those that control the model.
        structural: the texts of those that give a dialogue its structure, see `structural_tokens`.
        structural_ids: their ids, without `unknown_id`, which stands for characters that the vocabulary lacks.
    """

    def __init__(
        self,
        tokens: Iterable[AddedToken],
        base_id: Callable[[str], int | None] = lambda text: None,
        unknown_id: int | None = None,
        template_text: str = "",
        declared_text: frozenset[str] = frozenset(),
    ) -> None:
        self.by_text = {token.content: token for token in tokens}
        self.by_id = {token.id: token for token in self.by_text.values()}
        self.special = frozenset(text for text, token in self.by_text.items() if token.special)
        self.structural = structural_tokens(self.by_text.values(), base_id, template_text, declared_text)
        self.structural_ids = frozenset(self.by_text[text].id for text in self.structural) - {unknown_id}
        pattern = longest_of(self.by_text)
        self._pattern = re.compile(f"(?<!{BREAK})({pattern})") if pattern else None

    def split(self, text: str) -> list[TextChunk]:
        """Split a text into added tokens and the stretches between them; no stretch is empty."""
        if self._pattern is None:
            return [text] if text else []
        chunks = self._pattern.split(text)  # stretches at even indices, tokens at odd ones
        for index in range(1, len(chunks), 2):
            token = self.by_text[chunks[index]]
            if token.rstrip:
                chunks[index + 1] = chunks[index + 1].lstrip()
            if token.lstrip:
                chunks[index - 1] = chunks[index - 1].rstrip()
            before, after = chunks[index - 1], chunks[index + 1]
            if token.single_word and ((before and before[-1] != " ") or (after and after[0] != " ")):
                return self._merge_into_word(chunks, index)
        return [self.by_text[chunk] if index % 2 else chunk for index, chunk in enumerate(chunks) if chunk]

    def _merge_into_word(self, chunks: list[str], index: int) -> list[TextChunk]:
        """Return the chunks if the token at `index` is inside a word and belongs to it."""
        word = "".join(chunks[index - 1 : index + 2])
        before: list[TextChunk] = [
            self.by_text[chunk] if i % 2 else chunk for i, chunk in enumerate(chunks[: index - 1])
        ]
        rest = self.split("".join(chunks[index + 2 :]))
        return [chunk for chunk in (*before, word, *rest) if chunk]

    def encode_batch(
        self, chunked_texts: Sequence[Sequence[TextChunk]], encode: Callable[[list[str]], list[list[int]]]
    ) -> list[list[int]]:
        """Return the ids of texts that were split; `encode` returns those of the stretches between added tokens, in one
        call. No structural token arises within a stretch."""
        stretches = [chunk for chunks in chunked_texts for chunk in chunks if isinstance(chunk, str)]
        encoded_chunks = iter(encode_without(self.structural_ids, stretches, encode))
        return [
            [number for chunk in chunks for number in (next(encoded_chunks) if isinstance(chunk, str) else (chunk.id,))]
            for chunks in chunked_texts
        ]

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool,
        decode: Callable[[list[int]], str],
        verbatim: Mapping[int, AddedToken] | None = None,
    ) -> str:
        """Decode ids: added tokens as written, and `decode` for each run of other ids between them."""
        tokens = self.by_id if verbatim is None else verbatim
        texts: list[str] = []
        pending: list[int] = []
        for number in ids:
            token = tokens.get(number)
            if token is None:
                pending.append(number)
                continue
            if pending:
                texts.append(decode(pending))
                pending = []
            if not (skip_special_tokens and token.special):
                texts.append(token.content)
        if pending:
            texts.append(decode(pending))
        return "".join(texts)
