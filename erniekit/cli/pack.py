"""`erniekit pack CONFIG --output DIR`: tokenise and pack the training data once, for training runs to replay."""

from __future__ import annotations

import argparse
from pathlib import Path

from erniekit.build.local_paths import with_local_paths
from erniekit.cli.ranks import parse_with_overrides
from erniekit.config import Config


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="erniekit pack",
        description="Tokenise and pack the training data of a configuration into a folder, in the row order of the "
        "first epoch. Training replays the folder with train_dataset_type: packed.",
        epilog="Example: erniekit pack examples/configs/quickstart/sft.yaml --output data/sft-packed",
    )
    parser.add_argument("config", type=Path, help="YAML or JSON file of parameters")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="name=value", help="parameters that override the file"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the folder to write; new or empty")
    options = parse_with_overrides(parser, arguments)
    config = with_local_paths(Config.load(options.config, options.overrides, verb="preview"))
    from erniekit.runners.pack import pack_data

    pack_data(config, options.output.expanduser())
    return 0
