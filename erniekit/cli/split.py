"""`erniekit split FOLDER --output DIR max_shard_size=GB`: write a model's weights in shards of another size."""

from __future__ import annotations

import argparse
from pathlib import Path

from erniekit.cli.ranks import parse_with_overrides
from erniekit.config import Config
from erniekit.terminal import escape_control_characters


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="erniekit split",
        description="Copy a model folder and write its weight files in another size. Tensors are copied byte for byte.",
        epilog="Example: erniekit split models/ERNIE-4.5-21B --output models/ERNIE-4.5-21B-2GB max_shard_size=2",
    )
    parser.add_argument("folder", type=Path, help="a folder with model.safetensors, or shards and their index")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="name=value", help="max_shard_size (GB), overwrite_output_dir"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the folder to write")
    options = parse_with_overrides(parser, arguments)
    config = Config.load(None, options.overrides, verb="split")
    from erniekit.export.split import split_model

    for line in config.messages:
        print(escape_control_characters(line))
    split_model(
        options.folder.expanduser(),
        options.output.expanduser(),
        int(config.checkpoint.max_shard_size * 10**9),
        overwrite=config.basic.overwrite_output_dir,
    )
    return 0
