"""`erniekit eval CONFIG|FOLDER [name=value ...]`: evaluate a trained model on held-out data."""

from __future__ import annotations

import argparse
from pathlib import Path

from erniekit.cli.ranks import add_rank_options, parse_with_overrides, run_on_ranks
from erniekit.environment import import_paddle


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="erniekit eval",
        description="Evaluate a trained model on held-out data: loss, perplexity and accuracy of its tokens, or the "
        "rewards of pairs, and the answers it gives. Results go to eval_results.json in the run's output_dir.",
        epilog="Example: erniekit eval examples/configs/quickstart/sft.yaml eval_answers=50",
    )
    parser.add_argument(
        "model", type=Path, help="the configuration of a run, its output_dir, or one of its checkpoints"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="name=value", help="parameters that override the run's"
    )
    add_rank_options(parser)
    options = parse_with_overrides(parser, arguments)
    from erniekit.runners.evaluate import evaluation_config

    config = evaluation_config(options.model.expanduser(), options.overrides)
    code = run_on_ranks(config, options, ("eval", str(options.model), *options.overrides))
    if code is not None:
        return code
    import_paddle()
    from erniekit.runners.evaluate import run_evaluation

    run_evaluation(config)
    return 0
