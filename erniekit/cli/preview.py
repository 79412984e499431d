"""`erniekit preview CONFIG`: show the first samples as the model sees them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from erniekit.build.local_paths import with_local_paths
from erniekit.cli.ranks import at_least_one, parse_with_overrides
from erniekit.config import Config


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="erniekit preview",
        description="Show the first packs as the model sees them: which tokens are trained, where documents begin, "
        "what the chat template adds.",
    )
    parser.add_argument("config", type=Path, help="YAML or JSON file of parameters")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="name=value", help="parameters that override the file"
    )
    parser.add_argument("--rows", type=at_least_one, default=1, help="how many packs to show (default 1)")
    parser.add_argument("--documents", type=at_least_one, default=8, help="how many documents of each pack (default 8)")
    parser.add_argument("--no-color", action="store_true", help="mark trained tokens with [[ ]] instead of a colour")
    parser.add_argument("--json", action="store_true", help="write the packs as one JSON object, for programs")
    options = parse_with_overrides(parser, arguments)
    config = with_local_paths(Config.load(options.config, options.overrides, verb="preview"))
    from erniekit.runners.preview import preview, preview_data

    if options.json:
        print(json.dumps(preview_data(config, rows=options.rows, documents=options.documents)))
        return 0

    color = sys.stdout.isatty() and not options.no_color and "NO_COLOR" not in os.environ
    print(preview(config, rows=options.rows, documents=options.documents, color=color))
    return 0
