"""Build the adapters of a run from its configuration: their settings, and the folder that they come from.

Needs no Paddle.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from erniekit.build.parts import refuse_adapters_of_frozen_parts
from erniekit.config import Config
from erniekit.config.object_urls import is_url
from erniekit.errors import CheckpointError, ConfigurationError, ModelFileError
from erniekit.hub.download import model_folder
from erniekit.hub.fetched import fetch_model
from erniekit.model.lora.config import PISSA, LoraSettings, adapter_targets
from erniekit.model.lora.folder import base_model_of, is_adapter_folder
from erniekit.training.checkpoint.sharded import WEIGHTS, sharded_kinds

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig


logger = logging.getLogger(__name__)

_ADAPTER_PARAMETERS = ("lora", "lora_rank", "lora_alpha", "rslora", "dora", "lora_init", "lora_target_modules")


@dataclass(frozen=True)
class AdapterPlan:
    """The adapters that a run trains.

    Attributes:
        settings: rank, alpha, targets and so on.
        folder: the folder that they are loaded from; None for new adapters.
    """

    settings: LoraSettings
    folder: Path | None


def adapter_plan(config: Config, model_config: ModelConfig, checkpoint: Path | None = None) -> AdapterPlan | None:
    """Return the adapters that the run trains, or None if it trains all weights.

    Args:
        checkpoint: the checkpoint that the run resumes from.

    Raises:
        ConfigurationError: parameters contradict the adapters that the run starts from, or match no layer of the model.
        CheckpointError: the checkpoint has a full model although adapters are trained, or the reverse.
        ModelFileError: a folder of adapters is missing or damaged.
    """
    if checkpoint is not None and is_adapter_folder(checkpoint) != config.lora.lora:
        held, trained = ("adapters", "all weights") if not config.lora.lora else ("a full model", "adapters")
        raise CheckpointError(
            f"cannot resume from {checkpoint}: it has {held}, but this run trains {trained}.\n"
            f"  Write lora: {str(not config.lora.lora).lower()} as in the run that wrote it, or choose another "
            "output_dir."
        )
    if not config.lora.lora:
        return None
    first = initial_adapters(config)
    folder = checkpoint or first
    settings = lora_settings(config)
    if folder is None:
        _check_new_adapters(config, settings, model_config)
        return AdapterPlan(settings, None)
    stored = _stored_settings(folder, model_config)
    refuse_adapters_of_frozen_parts(config, model_config, stored.target_modules, named=False, folder=folder)
    _check_agreement(config, stored, model_config, folder, everything=checkpoint is not None and first is None)
    return AdapterPlan(replace(stored, dropout=settings.dropout), folder)


def _check_new_adapters(config: Config, settings: LoraSettings, model_config: ModelConfig) -> None:
    """Raise ConfigurationError if a pattern names no layer, or one of a frozen part, or PiSSA's rank exceeds the
    singular values of one."""
    linears, targets = model_config.linear_shapes(), adapter_targets(model_config, settings.target_modules)
    refuse_adapters_of_frozen_parts(config, model_config, targets, named=bool(settings.target_modules))
    smallest = min(min(linears[path]) for path in targets)
    if settings.init == PISSA and settings.rank > smallest:
        raise ConfigurationError(
            f"lora_rank {settings.rank}: the smallest adapted layer has only {smallest} singular values, and "
            f"lora_init: pissa needs as many as the rank.\n  Set lora_rank: {smallest} or less, or lora_init: kaiming."
        )


def refuse_other_checkpoint(config: Config, model_config: ModelConfig, checkpoint: Path) -> None:
    """Check that a run trains the kind of weights that its checkpoint holds.

    Raises:
        CheckpointError, ConfigurationError: it does not.
    """
    if WEIGHTS in sharded_kinds(checkpoint):
        plan = adapter_plan(config, model_config)
        refuse_other_adapters(checkpoint, resolved_parameters(config, plan, model_config))
    else:
        adapter_plan(config, model_config, checkpoint)


def initial_adapters(config: Config) -> Path | None:
    """Return the folder of adapters that a new run starts from; None if they are new or if all weights are trained.

    Raises:
        ModelFileError: the folder is missing or has no adapters.
    """
    if starts_from_adapters(config):
        return Path(config.checkpoint.init_from_checkpoint).expanduser()
    if not (config.lora.lora and config.lora.lora_path):
        return None
    folder = Path(config.lora.lora_path).expanduser()
    if not is_adapter_folder(folder):
        what = "is not a folder of adapters: it has no adapter_config.json" if folder.is_dir() else "is not a folder"
        raise ModelFileError(f"lora_path: {folder} {what}")
    return folder


def starts_from_adapters(config: Config) -> bool:
    """Return whether init_from_checkpoint names adapters, so that the base weights come from the model's folder.

    Raises:
        ConfigurationError: it names adapters, but `lora` is false.
    """
    folder = config.checkpoint.init_from_checkpoint
    if not folder or not is_adapter_folder(Path(folder).expanduser()):
        return False
    if not config.lora.lora:
        raise ConfigurationError(
            f"{config.origin('init_from_checkpoint')}: `init_from_checkpoint`: {folder} holds adapters, but lora is "
            "false.\n  Write lora: true to train them, or merge them (erniekit export) to train all weights."
        )
    return True


def lora_settings(config: Config) -> LoraSettings:
    """Return the settings of new adapters from section 2.2; alpha -1 is 2 x rank, or 4 with rsLoRA."""
    section = config.lora
    usual = 4.0 if section.rslora else 2.0 * section.lora_rank
    return LoraSettings(
        rank=section.lora_rank,
        alpha=usual if section.lora_alpha == -1 else section.lora_alpha,
        rslora=section.rslora,
        dropout=section.lora_dropout,
        dora=section.dora,
        init=section.lora_init,
        target_modules=tuple(section.lora_target_modules),
    )


def base_name(config: Config) -> str:
    """Return the base that the adapters of this run name: the folder of the frozen weights, or a model id of a hub."""
    start = config.urls.get("init_from_checkpoint", config.checkpoint.init_from_checkpoint)
    own = start if not starts_from_adapters(config) else ""
    name = own or config.basic.model_name_or_path
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name


def base_folder(adapters: Path) -> Path:
    """Return the local folder of the base model of a folder of adapters; download it if it is a model of a hub.

    Raises:
        ModelFileError: the adapters name no base model, or it is missing.
    """
    name = base_model_of(adapters)
    if name is None:
        raise ModelFileError(f"{adapters}: the adapters do not name their base model (base_model_name_or_path)")
    hub = {} if Path(name).expanduser().exists() else _hub_of(adapters)
    if not hub:
        logger.info(f"adapters: {adapters}, on top of their base model in {name}")
    try:
        return model_folder(Config.from_mapping({"model_name_or_path": name, **hub}, verb="generate"), weights=True)
    except ModelFileError as error:
        raise ModelFileError(f"{adapters}: the base model of these adapters is missing.\n  {error}") from None


def _hub_of(adapters: Path) -> dict[str, bool]:
    """Return the parameter that selects the hub of the base model: that of the run, or Hugging Face as PEFT assumes."""
    path = adapters / "training_config.yaml"
    stored = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    own = [name for name in ("from_aistudio", "from_modelscope") if stored.get(name)]
    return {own[0] if own else "from_hf_hub": True}


def check_adapters(folder: Path, model_config: ModelConfig) -> None:
    """Raise ModelFileError if adapters are damaged or do not fit the model; their headers are read.

    Args:
        model_config: of the base model; adapters may have rows of new tokens.
    """
    from erniekit.model.lora.trainable_tokens import grown_by_adapters

    _stored_settings(folder, grown_by_adapters(model_config, folder))


def _stored_settings(folder: Path, model_config: ModelConfig) -> LoraSettings:
    from erniekit.model.lora.peft_files import read_adapters

    return read_adapters(folder, model_config).settings


def _check_agreement(
    config: Config, stored: LoraSettings, model_config: ModelConfig, folder: Path, *, everything: bool
) -> None:
    """Raise ConfigurationError if parameters differ from the adapters in `folder`.

    Args:
        everything: also compare the parameters that the user has not set.
    """
    lines = []
    for name, (wanted, found) in _differences(config, stored, model_config).items():
        if everything or not config.origin(name).startswith("default"):
            shown = "other layers" if name == "lora_target_modules" else f"{found}, not {wanted}"
            lines.append(f"{config.origin(name)}: `{name}`: the adapters in {folder} have {shown}")
    if lines:
        raise ConfigurationError(
            "\n".join(lines) + "\n  Remove these parameters, or give them the values of the adapters."
            if not everything
            else "\n".join(lines) + "\n  Put the old values back to resume, or choose another output_dir."
        )


def resolved_parameters(config: Config, plan: AdapterPlan | None, model_config: ModelConfig) -> dict[str, Any]:
    """Return every parameter with its value in the run; adapters that it continues to train determine theirs."""
    resolved = config.resolved()
    if plan is None or plan.folder is None:
        return resolved
    found = {name: value for name, (_, value) in _differences(config, plan.settings, model_config).items()}
    return resolved | {name: sorted(value) if isinstance(value, set) else value for name, value in found.items()}


def parent_adapters(adapters: Path) -> Path | None:
    """Return the adapters from which the run that wrote `adapters` started; None if they were new, or if unknown."""
    path = adapters / "training_config.yaml"
    stored = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for name in filter(None, (stored.get("init_from_checkpoint"), stored.get("lora_path"))):
        folder = fetch_model(name, weights=True) if is_url(name) else Path(name).expanduser()
        if is_adapter_folder(folder):
            return folder
    return None


def refuse_other_adapters(checkpoint: Path, resolved: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the adapter settings of a run differ from those of the run that wrote a checkpoint.

    Args:
        checkpoint: a sharded checkpoint, which has no model files to compare with.
        resolved: every parameter with its value in this run.
    """
    path = checkpoint / "training_config.yaml"
    stored = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    lines = []
    for name in _ADAPTER_PARAMETERS:
        own = list(resolved[name]) if isinstance(resolved[name], tuple) else resolved[name]
        if stored.get(name, own) != own:
            lines.append(f"  - {name} was {stored[name]}, is {own}")
    if lines:
        raise CheckpointError(
            f"cannot resume from {checkpoint}: this run trains other weights than the one that wrote it.\n"
            + "\n".join(lines)
            + "\n  Put the old values back to resume, or choose another output_dir."
        )


def _differences(config: Config, stored: LoraSettings, model_config: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return the parameters that differ from stored adapters: name -> (value in the configuration, stored value)."""
    own = lora_settings(config)
    compared: dict[str, tuple[Any, Any]] = {
        "lora_rank": (own.rank, stored.rank),
        "lora_alpha": (own.alpha, stored.alpha),
        "rslora": (own.rslora, stored.rslora),
        "dora": (own.dora, stored.dora),
        "lora_init": (own.init, stored.init),
        "lora_target_modules": (
            set(adapter_targets(model_config, own.target_modules)),
            set(stored.target_modules),
        ),
    }
    return {name: (wanted, found) for name, (wanted, found) in compared.items() if wanted != found}
