"""Vocabularies that only paddlenlp's tokenizers read: vocab.json with merges.txt (GPT-2, Qwen2), vocab.txt, others.

paddlenlp splits plain text and maps it to ids. `AddedTokens` finds added tokens, because paddlenlp drops the white
space next to them, which transformers keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from erniekit.data.tokenizers.files import (
    CONFIG_FILE,
    TOKENIZER_FILES,
    AddedTokens,
    added_tokens,
    read_json,
    text_tokens,
)
from erniekit.environment import import_paddlenlp
from erniekit.errors import ModelFileError

MAX_CACHED_WORDS = 200_000  # paddlenlp's byte-pair tokenizers cache every word they ever split
PADDLENLP_CLASS_NAMES = {"GPT2Tokenizer": "GPTTokenizer"}  # transformers' name -> paddlenlp's
CLASS_OF_MODEL = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "gpt2": "GPTTokenizer"}


class PaddlenlpBackend:
    """See tokenizer.Backend."""

    def __init__(self, folder: Path, settings: dict[str, Any], template_text: str = "") -> None:
        name = _class_name(folder, settings)
        transformers = import_paddlenlp(f"{folder} has no tokenizer.json").transformers
        tokenizer_class = getattr(transformers, name, None)
        if tokenizer_class is None:
            raise ModelFileError(
                f"{folder / CONFIG_FILE}: tokenizer_class {name}: paddlenlp knows no such tokenizer.\n"
                "  Convert the tokenizer to tokenizer.json "
                "(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))."
            )
        try:
            self._tokenizer = tokenizer_class.from_pretrained(str(folder))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise ModelFileError(f"{folder}: paddlenlp's {name} cannot load these files: {error}") from None
        vocabulary = self._tokenizer.get_vocab()
        tokens = added_tokens(folder, settings, vocabulary.get).values()
        words = vocabulary.keys() - self._tokenizer.added_tokens_encoder.keys()
        unknown_id = getattr(self._tokenizer, "unk_token_id", None)
        self._added = AddedTokens(
            tokens,
            lambda text: vocabulary[text] if text in words else None,
            unknown_id,
            template_text,
            text_tokens(settings),
        )
        self.added_tokens = tuple(self._added.by_text.values())
        self._ids = {**vocabulary, **{text: token.id for text, token in self._added.by_text.items()}}
        self._known = frozenset(vocabulary.values())
        self.control_tokens, self.structural_tokens = self._added.special, self._added.structural
        self.size = max(self._ids.values()) + 1
        self.files = tuple(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())
        self.default_tokens: dict[str, str] = {}
        text = [-1]  # stands for the ids of a text
        whole = list(self._tokenizer.build_inputs_with_special_tokens(text))
        self.document_prefix = tuple(int(number) for number in whole[: whole.index(-1)])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._added.encode_batch([self._added.split(text) for text in texts], self._encode)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [number for number in ids if number in self._known or number in self._added.by_id]
        return self._added.decode(known, skip_special_tokens, self._decode)

    def token_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        tokenizer = self._tokenizer
        if len(getattr(tokenizer, "cache", ())) > MAX_CACHED_WORDS:
            tokenizer.cache.clear()
        return [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text, split_special_tokens=True)) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.convert_tokens_to_string(self._tokenizer.convert_ids_to_tokens(ids))


def _class_name(folder: Path, settings: dict[str, Any]) -> str:
    """Return paddlenlp's name of the folder's tokenizer class."""
    name = settings.get("tokenizer_class") or CLASS_OF_MODEL.get(
        str(read_json(folder / "config.json").get("model_type"))
    )
    if not isinstance(name, str):
        raise ModelFileError(
            f"{folder / CONFIG_FILE}: tokenizer_class is missing, and config.json has no known model_type"
        )
    name = name.removesuffix("Fast")
    return PADDLENLP_CLASS_NAMES.get(name, name)
