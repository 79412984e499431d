"""Rows of new tokens in folders of adapters, in PEFT's form of trainable tokens. Needs no Paddle.

`adapter_config.json` names the ids (`trainable_tokens.py`); the tensor
`base_model.model.<path of the embedding>.token_adapter.trainable_tokens_delta` [n, H] has their rows: values, in spite
of its name, not differences. An untied head has ids and a tensor of its own (`"lm_head"`), which PEFT 0.17 cannot read.
PEFT writes the embedding of a base that was resized beside them, whole; only rows of these tokens are read of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from erniekit.errors import ModelFileError
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.lora.folder import ADAPTER_CONFIG_FILE
from erniekit.model.lora.trainable_tokens import IDS_KEY, check_token_ids, trainable_token_ids
from erniekit.model.storage.safetensors import SafetensorsFile, check_finite
from erniekit.model.vocabulary import GrownVocabulary, vocabulary_weights

_PREFIX = "base_model.model."
_ROWS = ".token_adapter.trainable_tokens_delta"
_WHOLE = (".token_adapter.base_layer.weight", ".base_layer.weight", ".weight")  # where PEFT stores a resized matrix
_INPUT = "embed_tokens"  # what PEFT means by a bare list of ids


def peft_row_tensors(new_rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of a file of adapters that have the rows of new tokens."""
    return {f"{_PREFIX}{_path(name)}{_ROWS}": rows for name, rows in new_rows.items()}


def is_row_tensor(name: str) -> bool:
    """Return whether a tensor of a file of adapters belongs to an embedding or a head; where the adapters name no new
    tokens, it is one that cannot be used."""
    return ".token_adapter." in name or name.endswith((f"{_INPUT}.weight", "lm_head.weight"))


def merge_rows(values: np.ndarray, rows: np.ndarray, first: int) -> np.ndarray:
    """Return a weight [V, H] with the rows of new tokens, whose ids begin with `first`; float32 or wider."""
    merged = values.astype(np.result_type(values, rows, np.float32))
    merged[first : first + len(rows)] = rows
    return merged


def read_new_rows(folder: Path, file: SafetensorsFile, config: ModelConfig) -> dict[str, np.ndarray]:
    """Read the rows of new tokens, by the name of the weight that they belong to.

    Adapters without new tokens have none; a run may add some to them.

    Raises:
        ModelFileError: their ids are not those of the grown model, or a tensor is missing or does not fit.
    """
    path = folder / ADAPTER_CONFIG_FILE
    ids = trainable_token_ids(path)
    check_token_ids(path, ids, config)
    if config.vocabulary is None or not ids:
        return {}
    return {name: _rows_of(file, name, config.vocabulary, config.hidden_size) for name in vocabulary_weights(config)}


def _rows_of(file: SafetensorsFile, name: str, vocabulary: GrownVocabulary, hidden: int) -> np.ndarray:
    """Return the rows of one weight, float32."""
    own, ids, names = f"{_PREFIX}{_path(name)}{_ROWS}", vocabulary.ids, set(file.names())
    whole = next((found for end in _WHOLE if (found := f"{_PREFIX}{_path(name)}{end}") in names), None)
    if own not in names and whole is None:
        raise ModelFileError(
            f"{file.path}: {own}: missing. The new tokens have rows in {_path(name)}, too, because its weight is its "
            f"own; {ADAPTER_CONFIG_FILE} has to name it in {IDS_KEY}."
        )
    stored = own if own in names else str(whole)
    size, start = file.shape(stored), 0 if stored == own else vocabulary.first
    fits = len(size) == 2 and size[1] == hidden and (size[0] > ids[-1] if start else size[0] == len(ids))
    if not fits or not file.stored(stored).is_float:
        raise ModelFileError(
            f"{file.path}: {stored}: {file.stored(stored).dtype} {list(size)}, expected floats [{len(ids)}, {hidden}]"
        )
    values = file.rows(stored, start, start + len(ids))
    check_finite(values, stored, file.path)
    return np.ascontiguousarray(values, np.float32)


def _path(name: str) -> str:
    return name.removesuffix(".weight")
