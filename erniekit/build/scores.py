"""Put a score in the place of the head that predicts tokens, in stages that train one. Needs no Paddle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from erniekit.config import Config
from erniekit.errors import ModelFileError
from erniekit.json_files import read_json_object
from erniekit.model.architectures.model_config import CONFIG_FILE, ModelConfig, WrappedDecoder
from erniekit.model.architectures.scores import can_score, is_scored


def with_score(config: Config, model_config: ModelConfig, folder: Path | str) -> ModelConfig:
    """Return the shape of the model that the stage trains: in stage RM one that gives a score, which is drawn where the
    files in `folder` have none.

    Raises:
        ModelFileError: another stage would train a score, or the family has none.
    """
    if not config.stage.trains_score:
        if model_config.scored:
            raise ModelFileError(
                f"model_name_or_path: {folder} is a reward model, which gives a text a score and predicts no tokens\n"
                f"  Write stage: RM to train it, or another model for stage {config.stage.name}."
            )
        return model_config
    if model_config.scored:
        return model_config
    if not can_score(model_config.architecture):
        raise ModelFileError(
            f"model_name_or_path: {folder}: {model_config.model_type} is no plain decoder, and transformers has "
            "no class in which it gives a score\n  Start from a model of text alone."
        )
    plain = replace(model_config, num_nextn_predict_layers=0)
    return replace(plain, scored=True, wrapped=WrappedDecoder(plain, config.training.seed))


def holds_score(folder: Path) -> bool:
    """Return whether the weights in a folder are those of a model that gives a score."""
    path = folder / CONFIG_FILE
    return path.is_file() and is_scored(read_json_object(path))
