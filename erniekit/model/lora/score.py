"""The score of a reward model beside adapters, which is trained and stored as a whole: PEFT's `modules_to_save`.

The tensor `base_model.model.score.weight` [1, H] of a folder of adapters has it. Needs NumPy only to read that.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erniekit.errors import ModelFileError
from erniekit.json_files import read_json_object
from erniekit.model.architectures.model_config import ModelConfig, WrappedDecoder
from erniekit.model.architectures.scores import SCORE, can_score

if TYPE_CHECKING:
    import numpy as np

    from erniekit.model.storage.safetensors import SafetensorsFile

MODULES_KEY = "modules_to_save"
SCORE_MODULES = ("score", "classifier")  # what PEFT names for sequence classification; models have one of them
STORED_SCORE = f"base_model.model.{SCORE}"


def saves_score(values: dict[str, Any]) -> bool:
    """Return whether the keys of `adapter_config.json` say that the folder has a score."""
    modules = values.get(MODULES_KEY)
    return isinstance(modules, list) and "score" in modules and {*modules} <= {*SCORE_MODULES}


def scored_by_adapters(config: ModelConfig, folder: Path | str | None, config_file: str) -> ModelConfig:
    """Return the shape of a base model with the score that adapters bring along; what they replace is drawn.

    Args:
        folder: of the adapters; None: there are none.
        config_file: the name of the adapters' configuration.
    """
    path = Path(folder or "") / config_file
    if folder is None or config.scored or not path.is_file() or not saves_score(read_json_object(path)):
        return config
    if not can_score(config.architecture):
        raise ModelFileError(f"{path}: {MODULES_KEY}: {config.model_type} is no plain decoder, and gives no score")
    plain = replace(config, num_nextn_predict_layers=0)
    return replace(plain, scored=True, wrapped=WrappedDecoder(plain, 0))


def read_score(file: SafetensorsFile, config: ModelConfig) -> np.ndarray | None:
    """Read the score [1, H] of a file of adapters, float32; None for a model that predicts tokens.

    Raises:
        ModelFileError: it is missing, or does not fit the model.
    """
    if not config.scored:
        return None
    import numpy as np  # checks that need no numbers import this module, too

    from erniekit.model.storage.safetensors import check_finite

    if STORED_SCORE not in file.names():
        raise ModelFileError(f"{file.path}: {STORED_SCORE}: missing; these are no adapters of a reward model")
    if file.shape(STORED_SCORE) != (1, config.hidden_size):
        size = list(file.shape(STORED_SCORE))
        raise ModelFileError(f"{file.path}: {STORED_SCORE}: shape {size}, expected {[1, config.hidden_size]}")
    values = np.ascontiguousarray(file.read(STORED_SCORE), np.float32)
    check_finite(values, STORED_SCORE, file.path)
    return values
