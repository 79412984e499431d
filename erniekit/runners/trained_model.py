"""What the user names when a trained model is wanted: a configuration of a run, its output_dir, or a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from erniekit.errors import CheckpointError, ConfigurationError, ModelFileError
from erniekit.model.configuration import CONFIG_FILE
from erniekit.model.model_folder import refuse_half_written
from erniekit.parameters import Config
from erniekit.training.callbacks.results import RESULT_FILES
from erniekit.training.checkpoint_folder import checkpoint_folders, problems

PARAMETERS_FILE = "training_config.yaml"
STATE_FILE = "trainer_state.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
MAX_RESULT_BYTES = 1 << 20


@dataclass(frozen=True)
class TrainedModel:
    """A complete model on disk, or adapters together with the base they belong to.

    Attributes:
        folder: holds the weights, or the adapters.
        base: the base model's folder, or None where the folder holds a whole model.
        parameters: of the run that made it, by name; empty where that is unknown.
        results: figures of that run, by name.
    """

    folder: Path
    base: str | None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Any] = field(default_factory=dict)


def find_trained_model(named: Path, config: Config) -> TrainedModel:
    """The model behind a configuration file (`config` is what it says) or a folder.

    Raises:
        ConfigurationError: the run has not been trained, or there is no such file or folder.
        ModelFileError, CheckpointError: the folder holds no complete model.
    """
    if named.is_file():
        if not config.basic.output_dir:
            raise ConfigurationError(f"{named}: `output_dir` is missing, so it does not say where the trained model is")
        folder = Path(config.basic.output_dir).expanduser()
    elif named.is_dir():
        folder = named
    else:
        raise ConfigurationError(f"{named}: there is no such file or folder")
    _check_complete(folder, named)
    adapter = folder / ADAPTER_CONFIG_FILE
    return TrainedModel(
        folder=folder,
        base=_base_of(adapter) if adapter.is_file() else None,
        parameters=_parameters(folder),
        results=_results(folder),
    )


def _check_complete(folder: Path, named: Path) -> None:
    refuse_half_written(folder)
    if not any((folder / name).is_file() for name in (CONFIG_FILE, ADAPTER_CONFIG_FILE)):
        checkpoints = [path for path in checkpoint_folders(folder) if not problems(path, hashes=False)]
        if checkpoints:
            raise CheckpointError(
                f"{folder}: the run has not finished, so it holds no final model.\n"
                f"  Name its newest checkpoint, {checkpoints[-1]}, or let the run finish."
            )
        if named.is_file():
            raise ConfigurationError(
                f"{named}: this run has not been trained: {folder} holds no model.\n"
                f"  Train it first: erniekit train {named}"
            )
        raise ModelFileError(f"{folder}: neither {CONFIG_FILE} nor {ADAPTER_CONFIG_FILE}, so this is no model folder")
    manifest = problems(folder, hashes=True)
    damaged = [line for line in manifest if ".safetensors" in line]
    if damaged:
        raise CheckpointError(f"{folder}: the weights are not those that were written: {'; '.join(damaged[:5])}")


def _base_of(adapter_config: Path) -> str:
    base = _read_json(adapter_config).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelFileError(f"{adapter_config}: base_model_name_or_path is missing: it names the adapters' base model")
    return base


def _parameters(folder: Path) -> Mapping[str, Any]:
    path = folder / PARAMETERS_FILE
    if not path.is_file():
        return {}
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ModelFileError(f"{path}: cannot be read: {error}") from None
    return values if isinstance(values, dict) else {}


def _results(folder: Path) -> Mapping[str, Any]:
    """Of a finished run its result files; of a checkpoint where the run stood."""
    results: dict[str, Any] = {}
    state = folder / STATE_FILE
    if state.is_file():
        stored = _read_json(state)
        return {name: stored[name] for name in ("step", "epoch", "best_eval_loss") if stored.get(name) is not None}
    for name in RESULT_FILES:
        if (folder / name).is_file() and (folder / name).stat().st_size < MAX_RESULT_BYTES:
            results |= _read_json(folder / name)
    return results


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelFileError(f"{path}: expected a JSON object")
    return values
