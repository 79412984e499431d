"""`erniekit export CONFIG|FOLDER [--output DIR]`: write a trained model to a folder that others can load."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from erniekit.cli.ranks import model_argument, parse_with_overrides
from erniekit.config import Config
from erniekit.config.object_urls import is_url
from erniekit.environment import cache_folder, import_paddle
from erniekit.errors import ConfigurationError
from erniekit.hub.fetched import FOLDER

EXPORT_FOLDER = "export"  # in output_dir, as in the original
FORMATS = ("hf", "inference", "onnx")
DTYPES = ("float32", "bfloat16", "float16")


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="erniekit export",
        description="Write a trained model to a folder that others can load, with a model card. "
        "Adapters are merged into their base model.",
        epilog="Example: erniekit export examples/configs/quickstart/sft.yaml --output my-model max_shard_size=2",
    )
    parser.add_argument(
        "model", type=model_argument, help="the configuration of a run, its output_dir, or a checkpoint"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="name=value",
        help="parameters: max_shard_size, overwrite_output_dir, weight_quantize_algo (quantize linear weights), ...",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="the folder to write (default: export inside the run's output_dir)"
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="hf",
        help="hf: safetensors for transformers and erniekit (default); inference: a program of Paddle's inference "
        "engine; onnx",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="type of the weights with --format hf (default: the type of the base model)"
    )
    parser.add_argument("--push", metavar="REPO", help="upload the folder to this repository of the Hugging Face Hub")
    options = parse_with_overrides(parser, arguments)
    if options.format != "hf" and options.dtype not in (None, "float32"):
        parser.error(f"--format {options.format} computes in float32; drop --dtype {options.dtype}")
    named = options.model.expanduser()
    pushed = [f"hf_hub_id={options.push}"] if options.push else []
    config = Config.load(named if named.is_file() else None, [*options.overrides, *pushed], verb="export")
    output = options.output or _default_output(named, config)
    os.environ.setdefault("GLOG_minloglevel", "2")  # Paddle logs its own work while it records a program
    import_paddle()
    from erniekit.export.export import export_model

    export_model(named, output.expanduser(), config, form=options.format, dtype=options.dtype)
    return 0


def _default_output(named: Path, config: Config) -> Path:
    """Return the folder that an export is written to where --output does not name one."""
    if not named.exists():
        raise ConfigurationError(f"{named}: there is no such file or folder")
    folder = named if named.is_dir() else config.output_dir
    if folder.name.startswith("checkpoint-"):
        folder = folder.parent
    if not (named.is_dir() or config.basic.output_dir):
        raise ConfigurationError(f"{named}: it has no output_dir; name the folder to write with --output DIR")
    fetched = named.is_dir() and cache_folder() / FOLDER in named.absolute().parents
    if fetched or (not named.is_dir() and is_url(config.basic.output_dir)):
        raise ConfigurationError("the model is in an object store; name the folder to write with --output DIR")
    return folder / EXPORT_FOLDER
