"""`erniekit train CONFIG [name=value ...]`: fine-tune a model from a YAML file."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from erniekit.build.input_paths import report_missing_paths
from erniekit.cli.ranks import add_rank_options, parse_with_overrides, run_on_ranks
from erniekit.config import Config
from erniekit.environment import import_paddle
from erniekit.launch.data_ahead import data_ahead
from erniekit.launch.stored_run import stored_run
from erniekit.runners.banner import first_lines
from erniekit.terminal import escape_control_characters

logger = logging.getLogger(__name__)


def run(arguments: list[str]) -> int:
    parser = train_parser(
        "train",
        "Fine-tune a model from a YAML (or JSON) configuration file.",
        "Example: erniekit train examples/configs/quickstart/sft.yaml max_steps=20 learning_rate=1e-3",
    )
    options = parse_with_overrides(parser, arguments)
    return train("train", load_config(options), options)


def train_parser(verb: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Build the argument parser of a verb that trains."""
    parser = argparse.ArgumentParser(prog=f"erniekit {verb}", description=description, epilog=epilog)
    parser.add_argument("config", type=Path, help="YAML or JSON file of parameters")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="name=value", help="parameters that override the file"
    )
    parser.add_argument(
        "--try",
        dest="overfit_check",
        action="store_true",
        help="check the configuration: overfit one sample of the data in under a minute, and write nothing but, of a "
        "model that speaks, its sound into OUTPUT_DIR-try",
    )
    parser.add_argument(
        "--shrink",
        action="store_true",
        help="the same layout logic on a tiny random model: at most 4 CPU ranks, 2 steps of shipped data, no GPU",
    )
    add_rank_options(parser)
    return parser


def load_config(options: argparse.Namespace, implied: Mapping[str, Any] | None = None) -> Config:
    """Load the configuration. With --shrink, reduce it to a tiny run and add the overrides for that to `options`."""
    inspect = None if options.shrink else report_missing_paths  # a shrunken run reads shipped data
    config = Config.load(options.config, options.overrides, verb="train", implied=implied, inspect=inspect)
    if not options.shrink:
        return config
    from erniekit.runners.shrink import shrink_overrides

    words, ranks, lines = shrink_overrides(config)
    print(escape_control_characters("\n".join(lines)), flush=True)
    overridden = {word.partition("=")[0] for word in words}
    options.overrides = [word for word in options.overrides if word.partition("=")[0] not in overridden] + words
    options.nproc = options.nproc or ranks
    return Config.load(options.config, options.overrides, verb="train", implied=implied)


def train(verb: str, config: Config, options: argparse.Namespace) -> int:
    """Run the training that the configuration describes, in this process or on several ranks; return the exit code."""
    with stored_run(config, writes=not options.overfit_check) as local:
        return _train(verb, local, options)


def _train(verb: str, config: Config, options: argparse.Namespace) -> int:
    if not options.overfit_check:
        code = run_on_ranks(config, options, (verb, str(options.config), *options.overrides))
        if code is not None:
            return code
        for line in first_lines(config):
            logger.info(line)
    if options.overfit_check:
        import_paddle()
        from erniekit.runners.overfit_check import overfit_check

        return 0 if overfit_check(config) else 1
    if not config.basic.do_train:
        import_paddle()
        from erniekit.runners.evaluate import run_evaluation

        run_evaluation(config)
        return 0
    with data_ahead(config):
        import_paddle()
        from erniekit.runners.train import run_training

        return run_training(config).exit_code
