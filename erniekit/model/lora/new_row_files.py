"""Rows of new tokens in folders of adapters, in PEFT's form of trainable tokens. Needs no Paddle.

`adapter_config.json` names the ids, `"trainable_token_indices": {"embed_tokens": [...]}`; the tensor
`base_model.model.<path of the embedding>.token_adapter.trainable_tokens_delta` [n, H] has their rows: values, in spite
of its name, not differences. An untied head has ids and a tensor of its own (`"lm_head"`), which PEFT 0.17 cannot read.
PEFT writes the embedding of a base that was resized beside them, whole; only rows of these tokens are read of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.errors import ModelFileError
from erniekit.json_files import read_json_object
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.lora.folder import ADAPTER_CONFIG_FILE
from erniekit.model.storage.safetensors import SafetensorsFile, check_finite
from erniekit.model.vocabulary import MEAN, GrownVocabulary, grow, grown_vocabulary, vocabulary_weights

_PREFIX = "base_model.model."
_ROWS = ".token_adapter.trainable_tokens_delta"
_WHOLE = (".token_adapter.base_layer.weight", ".base_layer.weight", ".weight")  # where PEFT stores a resized matrix
_KEY = "trainable_token_indices"
_INPUT = "embed_tokens"  # what PEFT means by a bare list of ids


def adapter_vocabulary(folder: Path | str, config: ModelConfig) -> GrownVocabulary | None:
    """Return how the adapters in `folder` grow the vocabulary of their base model; None if they have no rows of tokens.

    Args:
        config: of the base model's files.

    Raises:
        ModelFileError: `adapter_config.json` cannot be read, or its ids are not consecutive or leave a gap.
    """
    path = Path(folder) / ADAPTER_CONFIG_FILE
    ids = _token_ids(path)
    if not ids:
        return None
    if ids[0] > config.vocab_size:
        raise ModelFileError(
            f"{path}: {_KEY}: the first id, {ids[0]:,}, does not follow on the {config.vocab_size:,} rows of the base"
        )
    return grown_vocabulary(config, ids[0], len(ids), init=MEAN)


def grown_by_adapters(config: ModelConfig, folder: Path | str | None) -> ModelConfig:
    """Return the configuration of a base model together with the new tokens of its adapters, if these have any.

    Raises:
        ModelFileError: as `adapter_vocabulary`.
    """
    if folder is None or config.vocabulary is not None:
        return config
    return grow(config, adapter_vocabulary(folder, config))


def peft_token_ids(config: ModelConfig) -> dict[str, Sequence[int]]:
    """Return what `trainable_token_indices` says of a grown model."""
    assert config.vocabulary is not None
    ids = config.vocabulary.ids
    return {_path(name).rpartition(".")[2]: ids for name in vocabulary_weights(config)}


def peft_row_tensors(new_rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of a file of adapters that have the rows of new tokens."""
    return {f"{_PREFIX}{_path(name)}{_ROWS}": rows for name, rows in new_rows.items()}


def is_row_tensor(name: str) -> bool:
    """Return whether a tensor of a file of adapters belongs to an embedding or a head."""
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
    ids = _token_ids(path)
    _check_ids(path, ids, config)
    if config.vocabulary is None or not ids:
        return {}
    return {name: _rows_of(file, name, config.vocabulary, config.hidden_size) for name in vocabulary_weights(config)}


def _check_ids(path: Path, ids: Sequence[int], config: ModelConfig) -> None:
    wanted = config.vocabulary.ids if config.vocabulary else range(0)
    if not ids or list(ids) == list(wanted):
        return
    raise ModelFileError(
        f"{path}: the vocabulary grew differently: these adapters have {_in_words(ids)}, this run asks for "
        f"{_in_words(wanted)}.\n  Write added_tokens and added_token_ranges as in the run that trained the adapters, "
        "or begin with new adapters."
    )


def _in_words(ids: Sequence[int]) -> str:
    if len(ids) < 2:
        return f"1 new token, id {ids[0]}" if ids else "no new tokens"
    return f"{len(ids):,} new tokens, ids {ids[0]} to {ids[-1]}"


def _rows_of(file: SafetensorsFile, name: str, vocabulary: GrownVocabulary, hidden: int) -> np.ndarray:
    """Return the rows of one weight, float32."""
    own, ids, names = f"{_PREFIX}{_path(name)}{_ROWS}", vocabulary.ids, set(file.names())
    whole = next((found for end in _WHOLE if (found := f"{_PREFIX}{_path(name)}{end}") in names), None)
    if own not in names and whole is None:
        raise ModelFileError(
            f"{file.path}: {own}: missing. The new tokens have rows in {_path(name)}, too, because its weight is its "
            f"own; {ADAPTER_CONFIG_FILE} has to name it in {_KEY}."
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


def _token_ids(path: Path) -> list[int]:
    """Return the ids of trainable tokens, consecutive; none if there are none."""
    value = read_json_object(path).get(_KEY) if path.is_file() else None
    lists: list[Any] = list(value.values()) if isinstance(value, dict) else [value] if value else []
    if not any(lists):
        return []
    ids = lists[0]
    if not all(
        isinstance(each, list) and all(type(number) is int and number >= 0 for number in each) for each in lists
    ):
        raise ModelFileError(f"{path}: {_KEY}: expected lists of token ids")
    if any(each != ids for each in lists):
        raise ModelFileError(f"{path}: {_KEY}: embedding and head name other tokens, which is not available")
    if ids != list(range(ids[0], ids[0] + len(ids))):
        raise ModelFileError(
            f"{path}: {_KEY}: only tokens with consecutive ids are available here, as added tokens have them; these "
            f"have {len(ids):,} ids from {min(ids)} to {max(ids)}"
        )
    return ids


def _path(name: str) -> str:
    return name.removesuffix(".weight")
