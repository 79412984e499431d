"""A model folder's tokenizer: text to token ids and back, whatever kind of files defines it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from erniekit.data.tokenizers.breaks import break_inserter, longest_of
from erniekit.data.tokenizers.files import (
    ADDITIONAL_TEMPLATES,
    CONFIG_FILE,
    SENTENCEPIECE_FILES,
    TEKKEN_FILE,
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    AddedToken,
    chat_templates_of,
    needs_paddlenlp,
    read_json,
    read_settings,
    special_tokens,
    text_tokens,
)
from erniekit.data.tokenizers.tekken import TekkenBackend, dialogue_version
from erniekit.errors import ModelFileError
from erniekit.manifest import refuse_changed


class Backend(Protocol):
    """A library that implements a vocabulary and the added tokens around it.

    Attributes:
        size: the largest token id + 1.
        added_tokens, control_tokens, structural_tokens: see Tokenizer.
        files: the files that determine the ids of a text; their contents make the fingerprint.
        default_tokens: named tokens for folders that do not name them.
        document_prefix: see Tokenizer.
    """

    size: int
    added_tokens: tuple[AddedToken, ...]
    control_tokens: frozenset[str]
    structural_tokens: frozenset[str]
    files: tuple[Path, ...]
    default_tokens: dict[str, str]
    document_prefix: tuple[int, ...]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See Tokenizer; no structural token spans a break, and none arises from text that does not write it."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def token_id(self, token: str) -> int | None: ...


THOUGHT_MARKERS = frozenset({"<think>", "</think>"})  # which an answer itself writes


class Tokenizer:
    """Encodes without adding tokens; control tokens written in the text (`</s>`) become their ids.

    Text of others goes through `plain_text` or `answer_text` first, which keep it from becoming control tokens.

    Attributes:
        folder: where its files lie.
        bos_id, eos_id, pad_id: ids; `bos_id` is None if the model has none, `pad_id` falls back to unk, then eos.
        vocab_size: the largest token id + 1.
        added_tokens: the tokens that are searched for in a text before the vocabulary is used.
        text_tokens: those that a run has declared to be text (`extend.py`); they are read in any text.
        control_tokens: the texts of the tokens that control the model, such as `<|end_of_sentence|>`.
        structural_tokens: these, and other added tokens such as `<tool_call>` that only a chat template may write.
        plain_text: puts breaks into a text of users, tools or systems, so that no structural token is read in it.
        answer_text: the same for an assistant's text, which may mark thoughts and use tokens that are not special.
        special_tokens: name -> text as the folder declares them, for jinja templates (`bos_token`, ...).
        chat_templates: the folder's jinja templates by name, `default` among them; `template_path` is their file.
        files: the files to copy into the folder of a trained model.
        fingerprint: hex digest of everything that determines the ids of a text.
        document_prefix: the ids that transformers' `tokenizer(text)` puts before a text, mostly none or the BOS token.
            They begin plain documents and raw prompts; in dialogues the chat template writes such tokens.
    """

    def __init__(self, folder: Path) -> None:
        refuse_changed(folder)
        settings = read_settings(folder)
        self.chat_templates, self.template_path = chat_templates_of(folder, read_json(folder / CONFIG_FILE))
        declared_text = text_tokens(settings)
        with _PanicsTold(folder):
            self._backend = _backend(folder, settings, "".join(self.chat_templates.values()))
        self.folder = folder
        self.special_tokens = {**self._backend.default_tokens, **special_tokens(settings)}
        self._check_special_tokens(folder)
        self.vocab_size = self._backend.size
        self.added_tokens = self._backend.added_tokens
        self.control_tokens = self._backend.control_tokens
        self.document_prefix = self._backend.document_prefix
        self.structural_tokens = self._backend.structural_tokens
        self.text_tokens = declared_text.intersection(token.content for token in self.added_tokens)
        self.text_tokens -= self.structural_tokens
        self.plain_text = break_inserter(self.structural_tokens)
        self.answer_text = break_inserter(self.control_tokens - THOUGHT_MARKERS)
        pattern = longest_of(self.control_tokens)
        self._control_pattern = re.compile(pattern) if pattern else None
        self.bos_id = self._named_id("bos_token")
        eos_id = self._named_id("eos_token")
        if eos_id is None:
            raise ModelFileError(f"{folder / CONFIG_FILE}: eos_token is missing; a model without it cannot stop")
        self.eos_id = eos_id
        pad_ids = (self._named_id(name) for name in ("pad_token", "unk_token"))
        self.pad_id = next((token for token in pad_ids if token is not None), eos_id)
        further_templates = sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja"))
        self.files = (*(folder / name for name in TOKENIZER_FILES if (folder / name).is_file()), *further_templates)
        digest = hashlib.blake2b(digest_size=16)
        for path in self._backend.files:
            digest.update(path.read_bytes())
        digest.update(json.dumps(self.special_tokens, sort_keys=True).encode())
        if self.structural_tokens != self.control_tokens:  # text that contains one of the others has other ids since
            digest.update(b"plain text of others")
        if self.text_tokens:
            digest.update(json.dumps(sorted(self.text_tokens)).encode())
        self.fingerprint = digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, encoded separately."""
        with _PanicsTold(self.folder):
            return self._backend.encode_batch(texts)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        with _PanicsTold(self.folder):
            return self._backend.decode(ids, skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_id(token)

    def find_control_token(self, text: str) -> str | None:
        """Return the first control token that is written in a text, or None."""
        match = self._control_pattern.search(text) if self._control_pattern else None
        return match.group() if match else None

    @cached_property
    def tekken_version(self) -> int | None:
        """The version of Mistral's dialogue format that the folder's tekken.json names; None without this file."""
        return dialogue_version(self.folder)

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_id(text)

    def _check_special_tokens(self, folder: Path) -> None:
        for name, text in self.special_tokens.items():
            if self._backend.token_id(text) is None:
                vocabulary = self._backend.files[0].name
                raise ModelFileError(f"{folder / CONFIG_FILE}: {name} is {text!r}, which is missing from {vocabulary}")


class _PanicsTold:
    """Turn a panic of a library written in Rust into ModelFileError; every other exception goes on.

    Its class, pyo3's PanicException, is in no module that could be imported.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or kind.__name__ != "PanicException":
            return
        if (self._folder / TOKENIZER_FILE).is_file():
            name, library, parts = TOKENIZER_FILE, "tokenizers", "normalizer or pre_tokenizer"
        else:
            name, library, parts = TEKKEN_FILE, "tiktoken", "config.pattern"
        raise ModelFileError(
            f"{self._folder / name}: the {library} library broke down over it: {error}\n"
            f"  Its {parts} is damaged (an empty pattern?); take the file of the original model."
        ) from None


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a model folder.

    tokenizer.json is read by the `tokenizers` library, tekken.json by `tiktoken`, a SentencePiece model by
    `sentencepiece`, and every other vocabulary by paddlenlp, whose import takes seconds. The first of these that is
    there is read: tokenizer.json needs no further package, and where both are published it was made of tekken.json and
    gives the same ids.

    Raises:
        ModelFileError: a file is missing or does not match the others.
    """
    return Tokenizer(Path(folder))


def _backend(folder: Path, settings: dict[str, Any], template_text: str) -> Backend:
    """Return the backend for the files in the folder; each library is imported only for its kind of files."""
    if not folder.is_dir():
        raise ModelFileError(f"{folder}: no such model folder")
    if not (folder / TOKENIZER_FILE).is_file():
        if (folder / TEKKEN_FILE).is_file():
            return TekkenBackend(folder)
        model_file = next((name for name in SENTENCEPIECE_FILES if (folder / name).is_file()), None)
        if model_file is not None:
            from erniekit.data.tokenizers.sentencepiece import SentencePieceBackend

            return SentencePieceBackend(folder, model_file, settings, template_text)
        if needs_paddlenlp(folder):
            from erniekit.data.tokenizers.paddlenlp import PaddlenlpBackend

            return PaddlenlpBackend(folder, settings, template_text)

    from erniekit.data.tokenizers.huggingface import TokenizersBackend

    return TokenizersBackend(folder, template_text, text_tokens(settings))
