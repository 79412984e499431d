"""Which model an evaluation on its own measures, and with which settings. Needs no Paddle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from erniekit.errors import ConfigurationError
from erniekit.parameters import Config
from erniekit.runners.adapters import starts_from_adapters
from erniekit.runners.trained_model import PARAMETERS_FILE, find_trained_model

# defaults of a training, which the configuration that it leaves writes out, and what an evaluation on its own takes
_DEFAULTS = {"max_evaluate_steps": (1, -1), "eval_answers": (0, 100)}
_NO_HUB = ("from_hf_hub=false", "from_aistudio=false", "from_modelscope=false")
_MODEL_PARAMETERS = ("model_name_or_path", "init_from_checkpoint", "lora_path")


def evaluation_config(named: Path, overrides: Sequence[str]) -> Config:
    """What `erniekit eval NAMED` evaluates: the model that a run has left, with the data and settings of the run.

    Args:
        named: the configuration of a run, its output_dir or a checkpoint. Where a word of the command line chooses a
            model, that model is evaluated.

    Raises:
        UserError: the configuration cannot be used, or the run has not left a model.
    """
    file = named / PARAMETERS_FILE if named.is_dir() else named
    if not file.is_file():
        what = (
            f"holds no {PARAMETERS_FILE}, so it says nothing of held-out data" if named.is_dir() else "does not exist"
        )
        raise ConfigurationError(f"{named}: {what}\n  Name the configuration of the run: erniekit eval CONFIG")
    words = ["do_train=false", "do_eval=true", *overrides]
    if any(word.startswith("model_name_or_path=") for word in overrides):  # whose weights are meant, not random ones
        words.insert(0, "continue_training=true")
    if named.is_dir():  # nothing of how that run began is meant
        words = ["resume_from_checkpoint=false", *words]
    config = _load(file, words)
    if named.is_dir():
        words = [*_own_defaults(config), *words]
        config = _load(file, words)
    if any(config.origin(name) == "command line" and config[name] for name in _MODEL_PARAMETERS):
        return config
    # output_dir on the command line is where results go; the model is where the run has left it
    run_config = _load(file, [word for word in words if not word.startswith("output_dir=")])
    trained = find_trained_model(named, run_config)
    if trained.is_adapter:
        other_weights = config.checkpoint.init_from_checkpoint and not starts_from_adapters(config)
        words.append("init_from_checkpoint=")
        if other_weights:
            words += [f"model_name_or_path={trained.base}", "continue_training=true", *_NO_HUB]
        return _load(file, [*words, "lora=true", f"lora_path={trained.folder}"])
    own_weights = config.basic.model_name_or_path if config.basic.continue_training else ""
    start = config.checkpoint.init_from_checkpoint or own_weights
    words += [f"model_name_or_path={trained.folder}", "lora=false", "lora_path=", "continue_training=true"]
    words += [*_NO_HUB, "init_from_checkpoint="]
    if config.basic.stage == "DPO" and not config.dpo.ref_model_name_or_path and start:
        words.append(f"ref_model_name_or_path={start}")
    return _load(file, words)


def _own_defaults(config: Config) -> list[str]:
    """Words for what `config`, as a training has left it, does not say otherwise."""
    names = [name for name, (trainings, _) in _DEFAULTS.items() if config[name] == trainings]
    if config.basic.stage == "PT":
        names = [name for name in names if name != "eval_answers"]  # there are no dialogues
    return [f"{name}={_DEFAULTS[name][1]}" for name in names]


def _load(file: Path, words: Sequence[str]) -> Config:
    """The configuration with words of which the last of a name counts."""
    last = {word.partition("=")[0]: word for word in words}
    return Config.load(file, list(last.values()), verb="train")
