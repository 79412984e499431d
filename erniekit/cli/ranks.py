"""Options and command-line parsing shared by the verbs that run on several ranks."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from erniekit.config import Config
from erniekit.config.object_urls import is_url
from erniekit.hub.fetched import fetch_model


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the launcher."""
    parser.add_argument(
        "--nproc",
        type=_positive,
        metavar="N",
        help="run on N ranks of this machine; default: all visible GPUs, or on a CPU what the layout needs. On several "
        "machines paddle.distributed.launch or the cluster's launcher starts the ranks (docs/parallelism.md)",
    )
    parser.add_argument(
        "--rank-logs",
        type=Path,
        metavar="DIR",
        help="the folder for the output of each rank; default: rank_logs in output_dir",
    )


def run_on_ranks(config: Config, options: argparse.Namespace, command: tuple[str, ...]) -> int | None:
    """Launch `erniekit COMMAND` on several ranks if the layout needs them and this process is not a rank itself.

    Returns:
        The exit code of the job; None if this process should do the work itself.
    """
    from erniekit.launch.external import adopt_rank
    from erniekit.launch.job import plan_job, run_job

    adopt_rank(os.environ, gpu=config.basic.device != "cpu")
    logs = None if options.rank_logs is None else options.rank_logs.expanduser()
    job = plan_job(config, (sys.executable, "-m", "erniekit", *command), nproc=options.nproc, logs=logs)
    return None if job is None else run_job(job)


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word} is not a number of ranks: write 1 or more")
    return int(word)


def parse_with_overrides(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Parse options and `name=value` parameters in any order; say so if a parameter is written as an option."""
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown[0], arguments)}")
    return options


def model_argument(word: str) -> Path:
    """Parse the path of a model, of a run or of its configuration; what a URL names is fetched first.

    Raises:
        UserError: it cannot be fetched. It passes through argparse.
    """
    return fetch_model(word, weights=True) if is_url(word) else Path(word)


def at_least_one(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return int(text)


def _hint(option: str, arguments: list[str]) -> str:
    from erniekit.config.registry import ALIASES, PARAMETERS

    name, _, value = option.lstrip("-").partition("=")
    name = name.replace("-", "_")
    if name not in PARAMETERS and name not in ALIASES:
        return ""
    following = arguments[arguments.index(option) + 1 :] if option in arguments else []
    value = value or (following[0] if following and "=" not in following[0] else "VALUE")
    return f"; parameters are written name=value: {name}={value}"
