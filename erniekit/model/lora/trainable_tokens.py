"""The ids of new tokens in `adapter_config.json`, in PEFT's form of trainable tokens. Needs neither Paddle nor NumPy.

`"trainable_token_indices": {"embed_tokens": [...]}` names them; an untied head has an entry of its own (`"lm_head"`).
Their rows are in the file of the adapters (`new_row_files.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from erniekit.errors import ModelFileError
from erniekit.json_files import read_json_object
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.lora.folder import ADAPTER_CONFIG_FILE
from erniekit.model.vocabulary import MEAN, GrownVocabulary, grow, grown_vocabulary, vocabulary_weights

IDS_KEY = "trainable_token_indices"


def adapter_vocabulary(folder: Path | str, config: ModelConfig) -> GrownVocabulary | None:
    """Return how the adapters in `folder` grow the vocabulary of their base model; None if they have no rows of tokens.

    Args:
        config: of the base model's files.

    Raises:
        ModelFileError: `adapter_config.json` cannot be read, or its ids are not consecutive or leave a gap.
    """
    path = Path(folder) / ADAPTER_CONFIG_FILE
    ids = trainable_token_ids(path)
    if not ids:
        return None
    if ids[0] == 0:
        raise ModelFileError(f"{path}: {IDS_KEY}: begins at id 0, so it trains tokens of the base model, not new ones")
    if ids[0] > config.vocab_size:
        raise ModelFileError(
            f"{path}: {IDS_KEY}: the first id, {ids[0]:,}, does not follow on the {config.vocab_size:,} rows of "
            "the base"
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
    return {name.removesuffix(".weight").rpartition(".")[2]: ids for name in vocabulary_weights(config)}


def check_token_ids(path: Path, ids: Sequence[int], config: ModelConfig) -> None:
    """Raise ModelFileError if the ids of adapters are not those of the grown model; no ids are fine."""
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


def trainable_token_ids(path: Path) -> list[int]:
    """Return the ids of trainable tokens, consecutive; none if there are none."""
    value = read_json_object(path).get(IDS_KEY) if path.is_file() else None
    lists: list[Any] = list(value.values()) if isinstance(value, dict) else [value] if value else []
    if not any(lists):
        return []
    ids = lists[0]
    if not all(
        isinstance(each, list) and all(type(number) is int and number >= 0 for number in each) for each in lists
    ):
        raise ModelFileError(f"{path}: {IDS_KEY}: expected lists of token ids")
    if any(each != ids for each in lists):
        raise ModelFileError(f"{path}: {IDS_KEY}: embedding and head name other tokens, which is not available")
    if ids != list(range(ids[0], ids[0] + len(ids))):
        raise ModelFileError(
            f"{path}: {IDS_KEY}: only tokens with consecutive ids are available here, as added tokens have them; "
            f"these have {len(ids):,} ids from {min(ids)} to {max(ids)}"
        )
    return ids
