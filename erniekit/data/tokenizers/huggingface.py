"""The tokenizer backend for tokenizer.json, read by the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Library

from erniekit.data.tokenizers.files import TOKENIZER_FILE
from erniekit.errors import ModelFileError


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

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode with several threads (one with TOKENIZERS_PARALLELISM=false)."""
        return [encoding.ids for encoding in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._library.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._library.token_to_id(token)
