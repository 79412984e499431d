"""The tokenizer backend for tokenizer.json, read by the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Library

from erniekit.data.tokenizers.files import TOKENIZER_FILE
from erniekit.errors import ModelFileError

_PROBE = "a"  # any text that leaves a token


class TokenizersBackend:
    """See tokenizer.Backend."""

    def __init__(self, folder: Path) -> None:
        path = folder / TOKENIZER_FILE
        try:
            self._library = Library.from_buffer(path.read_bytes())
        except OSError as error:
            raise ModelFileError(f"{path}: {error.strerror or error}; a model folder needs its tokenizer") from None
        except Exception as error:  # the library raises bare Exceptions from its Rust side
            raise ModelFileError(f"{path}: not a tokenizer that the tokenizers library can read: {error}") from None
        # A saved tokenizer may contain the truncation and padding of the process that saved it.
        self._library.no_truncation()
        self._library.no_padding()
        self.size = max(self._library.get_vocab(with_added_tokens=True).values()) + 1
        added = self._library.get_added_tokens_decoder().values()
        self.control_tokens = frozenset(token.content for token in added if token.special)
        self.files: tuple[Path, ...] = (path,)
        self.default_tokens: dict[str, str] = {}
        self.document_prefix = self._find_document_prefix()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode with several threads (one with TOKENIZERS_PARALLELISM=false)."""
        return [encoding.ids for encoding in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._library.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def _find_document_prefix(self) -> tuple[int, ...]:
        """Return the ids that the post-processor of tokenizer.json puts before a text."""
        encoding = self._library.encode(_PROBE, add_special_tokens=True)
        first = next((number for number, sequence in enumerate(encoding.sequence_ids) if sequence is not None), 0)
        return tuple(encoding.ids[:first])

    def token_id(self, token: str) -> int | None:
        return self._library.token_to_id(token)
