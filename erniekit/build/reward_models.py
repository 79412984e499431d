"""Find the models that give texts a score: their folders and shapes, before anything of them is loaded. Needs no
Paddle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from erniekit.build.checks import answering_folders
from erniekit.config import Config
from erniekit.config.sections.rewards import read_reward
from erniekit.errors import ModelFileError
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.lora.folder import ADAPTER_CONFIG_FILE
from erniekit.model.lora.score import scored_by_adapters


class FoundRewardModel(NamedTuple):
    """A reward model on disk.

    Attributes:
        folder: of the model, or of the base of its adapters.
        adapters: their folder; None: there are none.
        shape: of the model with its score.
    """

    folder: Path
    adapters: Path | None
    shape: ModelConfig


def find_reward_model(path: str | Path, ignored_keys: Sequence[str] = ()) -> FoundRewardModel:
    """Find the model in a folder: an `output_dir` or a checkpoint of stage RM, adapters included, or one that
    transformers has saved.

    Args:
        ignored_keys: keys of `config.json` that change nothing (`ignore_config_keys`).

    Raises:
        ModelFileError: there is no such folder, or the model gives no score.
    """
    folder, adapters = answering_folders(Path(path).expanduser(), None)
    shape = scored_by_adapters(ModelConfig.from_folder(folder, ignored_keys), adapters, ADAPTER_CONFIG_FILE)
    if not shape.scored:
        raise ModelFileError(
            f"{path}: the model predicts tokens and gives no score: it is no reward model\n  Train one with stage: RM."
        )
    return FoundRewardModel(folder, adapters, shape)


def check_reward_models(config: Config) -> None:
    """Check the reward models among `rewards`.

    Raises:
        ModelFileError: one of them is none.
    """
    for text in config.rewards.rewards:
        declared = read_reward(text)
        if declared.kind == "reward_model" and Path(declared.argument).expanduser().exists():  # else told of its path
            try:
                find_reward_model(declared.argument)
            except ModelFileError as error:
                raise ModelFileError(f"rewards: {error}") from None
