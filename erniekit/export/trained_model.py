"""Find the trained model that the user names by a run's configuration, its output_dir, or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from erniekit.build.adapters import base_folder
from erniekit.build.checks import check_tokenizer, has_tokenizer
from erniekit.config import Config
from erniekit.config.object_urls import is_url
from erniekit.errors import CheckpointError, ConfigurationError, ModelFileError, UserError
from erniekit.hub.cache import local_model_folder
from erniekit.hub.fetched import fetch_model
from erniekit.json_files import read_json_object
from erniekit.manifest import problems
from erniekit.model.architectures.model_config import CONFIG_FILE, ModelConfig
from erniekit.model.lora.folder import ADAPTER_CONFIG_FILE, base_model_of, is_adapter_folder
from erniekit.model.lora.score import scored_by_adapters
from erniekit.model.lora.trainable_tokens import grown_by_adapters
from erniekit.model.storage.layouts import locate_weights
from erniekit.model.storage.model_folder import refuse_half_written, refuse_sharded_checkpoint
from erniekit.training.callbacks.files import RESULT_FILES
from erniekit.training.checkpoint.atomic_folder import checkpoint_folders

PARAMETERS_FILE = "training_config.yaml"
STATE_FILE = "trainer_state.json"
MAX_RESULT_BYTES = 1 << 20
_MODEL_SOURCE_PARAMETERS = ("model_name_or_path", "from_hf_hub", "from_aistudio", "from_modelscope")


@dataclass(frozen=True)
class TrainedModel:
    """A complete model on disk, or adapters together with the base model they belong to.

    Attributes:
        folder: contains the weights or the adapters.
        is_adapter: whether the folder contains adapters.
        base: folder of the model that was trained; None if it is unknown or no longer there.
        base_name: path or hub id of that model, as the run or the adapters record it; "" if it is unknown.
        parameters: the run's parameters by name; empty if they are unknown.
        results: the run's metrics by name.
    """

    folder: Path
    is_adapter: bool
    base: Path | None
    base_name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model_folder(self) -> Path:
        """The folder with `config.json` and the full weights."""
        if not self.is_adapter:
            return self.folder
        assert self.base is not None, "find_trained_model has found it"
        return self.base

    def file(self, name: str) -> Path | None:
        """Return the path of a file in the trained folder, else in the base folder; None if neither has it."""
        folders = [self.folder, self.base] if self.base else [self.folder]
        return next((folder / name for folder in folders if (folder / name).is_file()), None)


def check_export(named: Path, config: Config) -> None:
    """Check that `erniekit export NAMED` finds a model whose files fit each other; values are not read.

    Raises:
        UserError: as for `find_trained_model`, or the weights or the tokenizer do not fit `config.json`.
    """
    model = find_trained_model(named, config)
    locate_weights(trained_config(model), model.model_folder)
    own_tokenizer = next((folder for folder in (model.folder, model.base) if folder and has_tokenizer(folder)), None)
    check_tokenizer(own_tokenizer or model.folder, None, with_template=False)


def trained_config(model: TrainedModel) -> ModelConfig:
    """Return the shape of a trained model, with the rows of new tokens that its adapters have.

    Raises:
        ModelFileError: `config.json` or `adapter_config.json` cannot be used.
    """
    config = ModelConfig.from_folder(model.model_folder, ignored_config_keys(model.parameters))
    if not model.is_adapter:
        return config
    return grown_by_adapters(scored_by_adapters(config, model.folder, ADAPTER_CONFIG_FILE), model.folder)


def find_trained_model(named: Path, config: Config) -> TrainedModel:
    """Find the model of a run's configuration file (`config` is its content) or of a folder.

    Raises:
        ConfigurationError: the run has not been trained, or there is no such file or folder.
        ModelFileError, CheckpointError: the folder has no complete model, or the base model of adapters is missing.
    """
    if named.is_file():
        if not config.basic.output_dir:
            raise ConfigurationError(f"{named}: `output_dir` is missing, so the trained model cannot be found; set it")
        url = config.basic.output_dir
        folder = fetch_model(url, weights=True) if is_url(url) else config.output_dir
    elif named.is_dir():
        folder = named
    else:
        raise ConfigurationError(f"{named}: there is no such file or folder")
    _check_complete(folder, named, config)
    parameters = run_parameters(folder)
    start = str(parameters.get("model_name_or_path") or "")
    if is_adapter_folder(folder):
        base = base_folder(folder)
        return TrainedModel(folder, True, base, start or str(base_model_of(folder)), parameters, _results(folder))
    return TrainedModel(folder, False, _local_base_folder(parameters), start, parameters, _results(folder))


def _local_base_folder(parameters: Mapping[str, Any]) -> Path | None:
    """Return the folder of the model that a run started from; nothing is downloaded for it."""
    known = {name: parameters[name] for name in _MODEL_SOURCE_PARAMETERS if parameters.get(name)}
    if "model_name_or_path" not in known:
        return None
    try:
        folder = local_model_folder(Config.from_mapping(known, verb="export"))
    except UserError:
        return None
    return folder if folder is not None and folder.is_dir() else None


def _check_complete(folder: Path, named: Path, config: Config) -> None:
    refuse_half_written(folder)
    if not (folder / CONFIG_FILE).is_file() and not is_adapter_folder(folder):
        refuse_sharded_checkpoint(folder)
        checkpoints = [path for path in checkpoint_folders(folder) if not problems(path, hashes=False)]
        if checkpoints:
            refuse_sharded_checkpoint(checkpoints[-1])
            raise CheckpointError(
                f"{folder}: the run has not finished, so it has no final model.\n"
                f"  Name its newest checkpoint, {checkpoints[-1]}, or let the run finish."
            )
        if named.is_file():
            trains = config.training.train_dataset_path
            raise ConfigurationError(
                f"{named}: this run has not been trained: {folder} contains no model.\n  "
                + (f"Train it first: erniekit train {named}" if trains else "Write the output_dir of a finished run.")
            )
        raise ModelFileError(f"{folder}: neither {CONFIG_FILE} nor {ADAPTER_CONFIG_FILE}: this is not a model folder")


def run_parameters(folder: Path) -> Mapping[str, Any]:
    """Return the parameters of the run that wrote this folder; empty if they are unknown. Raises ModelFileError."""
    path = folder / PARAMETERS_FILE
    if not path.is_file():
        return {}
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ModelFileError(f"{path}: cannot be read: {error}") from None
    return values if isinstance(values, dict) else {}


def ignored_config_keys(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of `config.json` that a run with these parameters was told to leave out."""
    names = parameters.get("ignore_config_keys") or ()
    return tuple(map(str, names)) if isinstance(names, (list, tuple)) else (str(names),)


def _results(folder: Path) -> Mapping[str, Any]:
    """Return the metrics of a finished run, or the step and epoch of a checkpoint."""
    results: dict[str, Any] = {}
    state = folder / STATE_FILE
    if state.is_file():
        stored = read_json_object(state)
        return {name: stored[name] for name in ("step", "epoch") if stored.get(name) is not None}
    for name in RESULT_FILES:
        if (folder / name).is_file() and (folder / name).stat().st_size < MAX_RESULT_BYTES:
            results |= read_json_object(folder / name)
    return results
