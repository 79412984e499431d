"""SentencePiece models without tokenizer.json, such as those of ERNIE-4.5's Paddle folders.

The `sentencepiece` library is used directly and not through paddlenlp's tokenizers, for two reasons. paddlenlp drops
the white space next to special tokens: it gives "left. <|end_of_sentence|>" the ids of "left.<|end_of_sentence|>",
while transformers keeps the space. And it knows neither ERNIE-4.5's class nor the file tokenizer.model.

Everything around the model follows transformers' LlamaTokenizer, ids included. `legacy` (the default, and ERNIE's way)
encodes each stretch between added tokens as a separate text, so a model with a dummy prefix adds one to each; `legacy:
false` adds one to the beginning of the text only. In our dialogues each segment is such a text, as upstream tokenises
them. Decoding is the inverse of encoding; transformers' decoding adds spaces next to added tokens and drops one at the
beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from erniekit.data.tokenizers.files import (
    ADDED_TOKENS_FILE,
    CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    AddedToken,
    AddedTokens,
    TextChunk,
    added_tokens,
    special_tokens,
    text_tokens,
)
from erniekit.environment import usable_cores
from erniekit.errors import ModelFileError

SPACE = "\u2581"  # how SentencePiece writes a space
ERNIE_DEFAULTS = {
    "cls_token": "<|begin_of_sentence|>",
    "sep_token": "<|end_of_sentence|>",
    "mask_token": "<mask:1>",
}
WITHOUT_DUMMY_PREFIX = b"\x1a\x02\x18\x00"  # ModelProto.normalizer_spec (3) { add_dummy_prefix (3): false }
MIN_TEXTS_FOR_THREADS = 256  # fewer are encoded before threads would have started
CLASSES_WITH_BOS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")  # unless add_bos_token is false


class SentencePieceBackend:
    """See tokenizer.Backend."""

    def __init__(self, folder: Path, model_file: str, settings: dict[str, Any], template_text: str = "") -> None:
        path = folder / model_file
        legacy = settings.get("legacy") is not False
        self._model = _load(path, b"" if legacy else WITHOUT_DUMMY_PREFIX)
        self.default_tokens = self._defaults(str(settings.get("tokenizer_class", "")))
        settings = {**self.default_tokens, **settings}
        self._legacy = legacy
        self._adds_prefix = not legacy and settings.get("add_prefix_space") is not False
        self._unknown = special_tokens(settings).get("unk_token", "<unk>")
        tokens = added_tokens(folder, settings, self._piece_id).values()
        self._added = AddedTokens(tokens, self._piece_id, self._model.unk_id(), template_text, text_tokens(settings))
        self.added_tokens = tuple(self._added.by_text.values())
        self.control_tokens, self.structural_tokens = self._added.special, self._added.structural
        pieces = self._model.get_piece_size()
        controls = (number for number in range(pieces) if self._model.is_control(number))
        self._verbatim = {
            number: AddedToken(self._model.id_to_piece(number), number, True) for number in controls
        } | self._added.by_id
        self.size = max(pieces, 1 + max(self._added.by_id, default=0))
        names = (CONFIG_FILE, SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE)
        self.document_prefix = self._bos_of_llama(settings)
        self.files: tuple[Path, ...] = (path, *(folder / name for name in names if (folder / name).is_file()))

    def _bos_of_llama(self, settings: dict[str, Any]) -> tuple[int, ...]:
        """Return the BOS token if the class is one of transformers' that put it before a text; ERNIE's does not."""
        class_name = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
        bos = special_tokens(settings).get("bos_token")
        if class_name not in CLASSES_WITH_BOS or settings.get("add_bos_token") is False or bos is None:
            return ()
        number = self.token_id(bos)
        return () if number is None else (number,)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._added.encode_batch([self._split(text) for text in texts], self._encode)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        pieces = self._model.get_piece_size()
        # An unknown character is inside a stretch: removing it here does not end the stretch.
        hidden = self._model.unk_id() if skip_special_tokens else None
        known = [number for number in ids if number != hidden and (number < pieces or number in self._verbatim)]
        text = self._added.decode(known, skip_special_tokens, self._model.decode, self._verbatim)
        begins_with_text = bool(known) and known[0] not in self._verbatim
        return text[1:] if self._adds_prefix and begins_with_text and text.startswith(" ") else text

    def token_id(self, token: str) -> int | None:
        added = self._added.by_text.get(token)
        return self._piece_id(token) if added is None else added.id

    def _split(self, text: str) -> list[TextChunk]:
        if self._legacy or not text:
            return self._added.split(text)
        text = text.replace(SPACE, " ")
        chunks = self._added.split(SPACE + text if self._adds_prefix else text)
        begins_with_special = len(chunks) > 1 and isinstance(chunks[1], AddedToken) and chunks[1].special
        return chunks[1:] if chunks[0] in (SPACE, " ") and begins_with_special else chunks

    def _encode(self, texts: list[str]) -> list[list[int]]:
        threads = usable_cores() if len(texts) >= MIN_TEXTS_FOR_THREADS else 1
        if self._legacy:
            return self._model.encode(texts, num_threads=threads) if texts else []
        # The library may strip leading spaces; behind a word that is removed again they are safe.
        shielded = [self._unknown + text if text.startswith((SPACE, " ")) else text for text in texts]
        encoded = self._model.encode(shielded, num_threads=threads) if texts else []
        shield = len(self._model.encode(self._unknown))
        return [
            ids[shield:] if longer is not text else ids
            for ids, longer, text in zip(encoded, shielded, texts, strict=True)
        ]

    def _piece_id(self, token: str) -> int | None:
        number = self._model.piece_to_id(token)
        return number if self._model.id_to_piece(number) == token else None  # unknown pieces get the id of <unk>

    def _defaults(self, tokenizer_class: str) -> dict[str, str]:
        """Return the named tokens that a configuration may omit: the model's own, and those of ERNIE's class."""
        numbers = {"bos_token": self._model.bos_id(), "eos_token": self._model.eos_id()}
        numbers["unk_token"] = self._model.unk_id()
        named = {name: self._model.id_to_piece(number) for name, number in numbers.items() if number >= 0}
        if tokenizer_class.startswith("Ernie4_5"):
            named |= {name: text for name, text in ERNIE_DEFAULTS.items() if self._piece_id(text) is not None}
        return named


def _load(path: Path, proto_override: bytes) -> Any:
    """Load a model file; `proto_override`, appended to its message, overrides fields as Protocol Buffers do."""
    try:
        import sentencepiece
    except ModuleNotFoundError:
        raise ModelFileError(f"{path}: reading it needs the sentencepiece library: pip install sentencepiece") from None
    try:
        content = path.read_bytes()
        model = sentencepiece.SentencePieceProcessor(model_proto=content + proto_override)
    except (OSError, RuntimeError) as error:  # the library raises RuntimeError for everything that is not a model
        raise ModelFileError(f"{path}: not a SentencePiece model: {error}") from None
    if not content:
        raise ModelFileError(f"{path}: not a SentencePiece model: the file is empty")
    return model
