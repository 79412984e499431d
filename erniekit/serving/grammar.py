"""Answers that follow a JSON schema: which tokens may come next, by the library llguidance (extra `server`).

It builds its grammar in Rust without a gradient library, needs 8 MB, takes the tokenizer.json of a model folder, and
computes a mask in well below a millisecond for most schemas.
"""

from __future__ import annotations

import importlib
import json
from functools import cached_property
from typing import Any

import numpy as np

from erniekit.data.tokenizers.files import TOKENIZER_FILE
from erniekit.inference.engine import ChatModel
from erniekit.serving.errors import RefusedError

LONGEST_SCHEMA = 100_000  # characters
# As models mostly write JSON. Free white space would let an unsure model write nothing else.
FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Makes the constraints of requests to one model."""

    def __init__(self, model: ChatModel) -> None:
        self._model = model

    def of_schema(self, schema: Any) -> JsonConstraint:
        """Return a constraint to JSON texts of a schema.

        Raises:
            RefusedError: the schema is none that can be followed, or the model's tokenizer is of another kind.
        """
        library, tokenizer = self._library, self._tokenizer
        text = json.dumps(schema)
        if len(text) > LONGEST_SCHEMA:
            raise RefusedError(
                f"response_format: the schema has {len(text):,} characters, and {LONGEST_SCHEMA:,} are read at most",
                param="response_format",
            )
        try:
            grammar = library.LLMatcher.grammar_from_json_schema(text, defaults=FORM)
        except ValueError as error:
            raise RefusedError(f"response_format: {error}"[:500], param="response_format") from None
        matcher = library.LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().strip().splitlines()[0]
            raise RefusedError(f"response_format: {reason}"[:500], param="response_format")
        return JsonConstraint(matcher, self._model.decoder.config.vocab_size)

    @cached_property
    def _library(self) -> Any:
        try:
            return importlib.import_module("llguidance")
        except ImportError:
            raise RefusedError(
                "response_format: this server has no llguidance, which holds answers to a schema: pip install "
                "'erniekit[server]'",
                status=501,
                param="response_format",
            ) from None

    @cached_property
    def _tokenizer(self) -> Any:
        path = self._model.tokenizer.folder / TOKENIZER_FILE
        if not path.is_file():
            raise RefusedError(
                "response_format: schemas need a model folder with tokenizer.json, and this one has another tokenizer",
                status=501,
                param="response_format",
            )
        ends = list(dict.fromkeys((self._model.tokenizer.eos_id, *self._model.template.stop_token_ids)))
        size = max(self._model.decoder.config.vocab_size, self._model.tokenizer.vocab_size)
        return self._library.LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=size, eos_token=ends)


class JsonConstraint:
    """See `scheduler.Constraint`."""

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher, self._size = matcher, size

    def allowed(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little").astype(bool)
        mask = np.zeros(self._size, bool)
        mask[: len(allowed)] = allowed[: self._size]
        return mask

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
