"""Tekken vocabularies (`tekken.json`) of Mistral's models, read as mistral-common 1.13 reads them.

The file lists byte sequences by rank, the special tokens, and a pattern that cuts a text into words. Special tokens
have the first ids, so the id of a byte sequence is its rank plus their number. The `tiktoken` library joins the bytes
of a word. In a text it finds no special token; `AddedTokens` does, in what a template has written.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from erniekit.data.tokenizers.files import TEKKEN_FILE, AddedToken, AddedTokens
from erniekit.environment import usable_cores
from erniekit.errors import ModelFileError
from erniekit.json_files import read_json_object

SINGLE_BYTES = 256  # the first ranks, in this order
LAST_VERSION_WITHOUT_LIST = 7  # files up to this version may leave out their list of special tokens
DEFAULT_SPECIAL_TOKENS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
MAX_SPECIAL_TOKENS = 100_000  # published files have 1,000
MIN_TEXTS_FOR_THREADS = 256  # fewer are encoded before threads would have started
_PROBE = "Six ducks: 12\u00bd\t\u4eca\u5929\n\n  \U0001f986!\u0301\r \x00"  # characters of many kinds
_RESERVED = re.compile(r"<SPECIAL_\d+>")  # a place that no text and no template uses


class TekkenBackend:
    """See tokenizer.Backend.

    Reserved tokens such as `<SPECIAL_40>` have ids and can be decoded, but no text is encoded to them.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / TEKKEN_FILE
        values = read_json_object(path)
        try:
            pattern, self.size, specials, ranks = _checked(values)
        except _FieldError as error:
            raise ModelFileError(f"{path}: {error}") from None
        self._offset = len(specials)
        self._model = _load(path, pattern, ranks)
        if self._model.decode(self._model.encode_ordinary(_PROBE)) != _PROBE:
            raise ModelFileError(f"{path}: config.pattern: {pattern!r:.80} leaves out characters of a text")
        self._tokens = [AddedToken(text, number, True) for number, text in enumerate(specials)]
        self._ids = {token.content: token.id for token in self._tokens}
        self._added = AddedTokens(token for token in self._tokens if not _RESERVED.fullmatch(token.content))
        self._verbatim = dict(enumerate(self._tokens))
        self.control_tokens, self.structural_tokens = self._added.special, self._added.structural
        self.added_tokens = tuple(self._tokens)
        self.default_tokens = {name: text for name, text in NAMES.items() if text in self._ids}
        self.document_prefix: tuple[int, ...] = (self._ids[NAMES["bos_token"]],)
        self.files: tuple[Path, ...] = (path,)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._added.encode_batch([self._added.split(text) for text in texts], self._encode)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [number for number in ids if 0 <= number < self.size]
        return self._added.decode(known, skip_special_tokens, self._decode, self._verbatim)

    def token_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        threads = usable_cores() if len(texts) >= MIN_TEXTS_FOR_THREADS else 1
        if threads == 1:
            encoded = [self._model.encode_ordinary(text) for text in texts]
        else:
            encoded = self._model.encode_ordinary_batch(texts, num_threads=threads)
        return [[number + self._offset for number in ids] for ids in encoded]

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode([number - self._offset for number in ids])


def dialogue_version(folder: Path) -> int | None:
    """Return the version of Mistral's dialogue format that a folder's tekken.json names, such as 13 for "v13"; None
    without this file.

    Raises:
        ModelFileError: the file names no version.
    """
    path = folder / TEKKEN_FILE
    if not path.is_file():
        return None
    try:
        return _version(read_json_object(path))
    except _FieldError as error:
        raise ModelFileError(f"{path}: {error}") from None


class _FieldError(Exception):
    """A field of the file has another value than expected; the text says which."""


def _checked(values: dict[str, Any]) -> tuple[str, int, list[str], dict[bytes, int]]:
    """Return the pattern, the number of tokens, the special tokens in the order of their ids, and the ranks."""
    config, vocabulary = values.get("config"), values.get("vocab")
    if not isinstance(config, dict) or not isinstance(vocabulary, list):
        raise _FieldError("not a Tekken tokenizer: expected `config`, an object, and `vocab`, a list")
    pattern = config.get("pattern")
    if not isinstance(pattern, str) or not pattern:
        raise _FieldError(f"config.pattern: expected a regular expression, got {pattern!r}")
    size, special = (_count(config, name) for name in ("default_vocab_size", "default_num_special_tokens"))
    if special > MAX_SPECIAL_TOKENS:
        raise _FieldError(f"config.default_num_special_tokens: {special:,} are more than {MAX_SPECIAL_TOKENS:,}")
    if not SINGLE_BYTES <= size - special <= len(vocabulary):
        raise _FieldError(
            f"config.default_vocab_size: expected {special:,} special tokens and {SINGLE_BYTES} to "
            f"{len(vocabulary):,} entries of `vocab`, together, got {size:,}"
        )
    return pattern, size, _special_tokens(values, special), _ranks(vocabulary[: size - special])


def _version(values: dict[str, Any]) -> int:
    config = values.get("config")
    version = config.get("version") if isinstance(config, dict) else None
    if not isinstance(version, str) or not re.fullmatch(r"v\d{1,4}", version):
        raise _FieldError(f'config.version: expected a version such as "v7", got {version!r:.80}')
    return int(version[1:])


def _count(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _FieldError(f"config.{name}: expected a number of tokens, got {value!r}")
    return value


def _special_tokens(values: dict[str, Any], number: int) -> list[str]:
    """Return the texts of the special tokens; the places that the file does not name are reserved."""
    listed = values.get("special_tokens")
    if listed is None:
        if _version(values) > LAST_VERSION_WITHOUT_LIST:
            raise _FieldError(
                f"special_tokens: missing, which only files up to v{LAST_VERSION_WITHOUT_LIST} may leave out"
            )
        texts: list[Any] = list(DEFAULT_SPECIAL_TOKENS)
    elif isinstance(listed, list):
        texts = [item.get("token_str") if isinstance(item, dict) else None for item in listed]
        for place, (item, text) in enumerate(zip(listed, texts, strict=True)):
            if not isinstance(text, str) or not text or item.get("rank") != place:
                raise _FieldError(
                    f"special_tokens[{place}]: expected `token_str`, a text, and `rank` {place}: {item!r:.80}"
                )
    else:
        raise _FieldError("special_tokens: expected a list")
    if len(texts) > number:
        raise _FieldError(f"special_tokens: {len(texts)} are more than config.default_num_special_tokens, {number}")
    texts += [f"<SPECIAL_{place}>" for place in range(len(texts), number)]
    if len(set(texts)) < len(texts):
        twice = next(text for text, count in Counter(texts).items() if count > 1)
        raise _FieldError(f"special_tokens: {twice!r} is there twice")
    for name in ("bos_token", "eos_token"):
        if NAMES[name] not in texts:
            raise _FieldError(f"special_tokens: {NAMES[name]!r} is missing")
    return texts


def _ranks(vocabulary: list[Any]) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for place, item in enumerate(vocabulary):
        try:
            token = base64.b64decode(item["token_bytes"], validate=True)
            rank = item["rank"]
        except (KeyError, TypeError, ValueError, binascii.Error):
            raise _FieldError(f"vocab[{place}]: expected `rank` and `token_bytes` in base64: {item!r:.80}") from None
        if rank != place or isinstance(rank, bool):
            raise _FieldError(f"vocab[{place}]: expected rank {place}, got {rank!r}")
        if not token or token in ranks:
            reason = f"the same bytes as vocab[{ranks[token]}]" if token else "no bytes"
            raise _FieldError(f"vocab[{place}]: token_bytes: {reason}")
        if place < SINGLE_BYTES and token != bytes([place]):
            raise _FieldError(f"vocab[{place}]: expected the byte {place}, got {token!r:.40}")
        ranks[token] = place
    return ranks


def _load(path: Path, pattern: str, ranks: dict[bytes, int]) -> Any:
    try:
        import tiktoken
    except ModuleNotFoundError:
        raise ModelFileError(f"{path}: reading it needs the tiktoken library: pip install 'erniekit[audio]'") from None
    try:
        return tiktoken.Encoding(name=path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except (ValueError, KeyError, OverflowError) as error:
        raise ModelFileError(f"{path}: config.pattern: not a regular expression that tiktoken reads: {error}") from None
