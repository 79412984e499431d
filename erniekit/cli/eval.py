"""`erniekit eval CONFIG|FOLDER [name=value ...]`: evaluate a trained model on held-out data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from erniekit.build.adapters import starts_from_adapters
from erniekit.cli.ranks import add_rank_options, model_argument, parse_with_overrides, run_on_ranks
from erniekit.config import Config
from erniekit.environment import import_paddle
from erniekit.errors import ConfigurationError
from erniekit.export.trained_model import PARAMETERS_FILE, find_trained_model
from erniekit.launch.stored_run import stored_run


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="erniekit eval",
        description="Evaluate a trained model on held-out data: loss, perplexity and accuracy of its tokens, or the "
        "rewards of pairs, and the answers it gives. Results go to eval_results.json in the run's output_dir.",
        epilog="Example: erniekit eval examples/configs/quickstart/sft.yaml eval_answers=50",
    )
    parser.add_argument(
        "model", type=model_argument, help="the configuration of a run, its output_dir, or one of its checkpoints"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="name=value", help="parameters that override the run's"
    )
    add_rank_options(parser)
    options = parse_with_overrides(parser, arguments)
    config = evaluation_config(options.model.expanduser(), options.overrides)
    with stored_run(config) as local:
        code = run_on_ranks(local, options, ("eval", str(options.model), *options.overrides))
        if code is not None:
            return code
        import_paddle()
        from erniekit.runners.evaluate import run_evaluation

        run_evaluation(local)
    return 0


# name -> its default in training, which the configuration of a finished run writes out, and in `erniekit eval`
_DEFAULTS = {"max_evaluate_steps": (1, -1), "eval_answers": (0, 100)}
_NO_HUB = ("from_hf_hub=false", "from_aistudio=false", "from_modelscope=false")
_MODEL_PARAMETERS = ("model_name_or_path", "init_from_checkpoint", "lora_path")


def evaluation_config(named: Path, overrides: Sequence[str]) -> Config:
    """Return the configuration of `erniekit eval NAMED`: the model, the data and the settings of the run that it names.

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
    if config.stage.needs_reference and not config.dpo.ref_model_name_or_path and start:
        words.append(f"ref_model_name_or_path={start}")
    return _load(file, words)


def _own_defaults(config: Config) -> list[str]:
    """Return words for the defaults of an evaluation, where the run did not set other values."""
    names = [name for name, (trainings, _) in _DEFAULTS.items() if config[name] == trainings]
    names = [name for name in names if config.applies(name)]  # plain text has no dialogues to answer
    return [f"{name}={_DEFAULTS[name][1]}" for name in names]


def _load(file: Path, words: Sequence[str]) -> Config:
    """Load the configuration; of several words with one name the last one counts."""
    last = {word.partition("=")[0]: word for word in words}
    return Config.load(file, list(last.values()), verb="train")
