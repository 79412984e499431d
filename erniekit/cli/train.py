"""`erniekit train CONFIG [name=value ...]`: fine-tune a model as a YAML file says."""

from __future__ import annotations

import argparse
from pathlib import Path

from erniekit.cli.overrides import parse_with_overrides
from erniekit.environment import import_paddle
from erniekit.parameters import Config


def run(arguments: list[str]) -> int:
    parser = train_parser(
        "train",
        "Fine-tune a model as a YAML (or JSON) file says.",
        "Example: erniekit train examples/configs/quickstart/sft.yaml max_steps=20 learning_rate=1e-3",
    )
    options = parse_with_overrides(parser, arguments)
    return train(Config.load(options.config, options.overrides, verb="train"), try_one=options.try_one_sample)


def train_parser(verb: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """The words of a verb that trains."""
    parser = argparse.ArgumentParser(prog=f"erniekit {verb}", description=description, epilog=epilog)
    parser.add_argument("config", type=Path, help="YAML or JSON file of parameters")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="name=value", help="parameters that override the file"
    )
    parser.add_argument(
        "--try",
        dest="try_one_sample",
        action="store_true",
        help="check the configuration: overfit one sample of the data in under a minute, and write nothing",
    )
    return parser


def train(config: Config, *, try_one: bool) -> int:
    """Run what the configuration says, and give the exit code."""
    import_paddle()
    if try_one:
        from erniekit.runners.try_one import try_one_sample

        return 0 if try_one_sample(config) else 1
    if not config.basic.do_train:
        from erniekit.runners.evaluate import run_evaluation

        run_evaluation(config)
        return 0
    from erniekit.runners.train import run_training

    return run_training(config).exit_code
