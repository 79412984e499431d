"""`erniekit rewards CONFIG [--answers FILE]`: score answers by the rewards of a configuration, without training."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from erniekit.build.local_paths import with_local_paths
from erniekit.cli.generate import select_device
from erniekit.cli.ranks import at_least_one, parse_with_overrides
from erniekit.config import Config


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="erniekit rewards",
        description="Score answers by the rewards of a configuration, and show what each reward gives, so that rewards "
        "are tried before a run learns from them. Without --answers the reference answers of the data are scored: what "
        "does not get the best reward there is a mistake of the rewards or of the data.",
        epilog="Example: erniekit rewards examples/configs/quickstart/grpo.yaml",
    )
    parser.add_argument("config", type=Path, help="YAML or JSON file of parameters, with `rewards`")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="name=value", help="parameters that override the file"
    )
    parser.add_argument(
        "--answers",
        type=Path,
        metavar="FILE",
        help="answers to prompts of the data: rollouts.jsonl, what `erniekit generate --output` wrote, or JSON lines "
        "with `answer` and `place` or `prompt`",
    )
    parser.add_argument(
        "--count", type=at_least_one, default=100, help="how many reference answers are scored (default 100)"
    )
    parser.add_argument("--show", type=at_least_one, default=10, help="how many answers are shown (default 10)")
    parser.add_argument("--json", action="store_true", help="write every answer with its rewards as a line of JSON")
    options = parse_with_overrides(parser, arguments)
    # As for `preview`: a file for training, of which little is needed.
    config = with_local_paths(Config.load(options.config, options.overrides, verb="preview"))
    from erniekit.runners.rewards import needs_paddle, score_answers, table

    if needs_paddle(config):
        select_device(config)

    answers = options.answers.expanduser() if options.answers else None
    scored = score_answers(config, answers, options.count)
    if options.json:
        for line in scored.lines():
            print(json.dumps(line))
    else:
        print(table(scored, options.show))
    return 0
