"""`erniekit split FOLDER|CONFIG [--output DIR] max_shard_size=GB`: write weights in shards of another size."""

from __future__ import annotations

import argparse
from pathlib import Path

from erniekit.cli.ranks import parse_with_overrides
from erniekit.config import Config
from erniekit.export.split import SPLIT_FOLDER, split_model
from erniekit.terminal import escape_control_characters


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="erniekit split",
        description="Copy a model folder and write its weight files in another size. Tensors are copied byte for byte.",
        epilog="Example: erniekit split models/ERNIE-4.5-21B --output models/ERNIE-4.5-21B-2GB max_shard_size=2",
    )
    parser.add_argument(
        "folder",
        type=Path,
        help="a folder with model.safetensors, or shards and their index; or a configuration file, for its output_dir",
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="name=value", help="max_shard_size (GB), overwrite_output_dir"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help=f"the folder to write (default: {SPLIT_FOLDER} inside that folder)"
    )
    options = parse_with_overrides(parser, arguments)
    folder = options.folder.expanduser()
    file = folder if folder.is_file() else None
    config = Config.load(file, options.overrides, verb="split")
    for line in config.messages if file is None else ():  # a file has the parameters of other verbs, too
        print(escape_control_characters(line))
    if file is not None:
        folder = config.output_dir
    split_model(
        folder,
        options.output.expanduser() if options.output else folder / SPLIT_FOLDER,
        int(config.checkpoint.max_shard_size * 10**9),
        overwrite=config.basic.overwrite_output_dir,
    )
    return 0
