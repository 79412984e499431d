"""`erniekit import omnivoice | vall-e FILE...`: convert another program's configuration to one of ours."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from erniekit.config.imports import omnivoice, vall_e
from erniekit.errors import ConfigurationError
from erniekit.terminal import escape_control_characters

FILES = {"omnivoice": 2, "vall-e": 1}  # program -> how many files its configuration has


def run(arguments: list[str]) -> int:
    """Print the configuration of ours that is the same as another program's, or write it to a file."""
    parser = argparse.ArgumentParser(
        prog="erniekit import",
        description="Convert the configuration of another program that trains speech models to a YAML file of "
        "ERNIEKit. Its comments say what became of each key; an unknown key is an error, and so is what is not built.",
        epilog="Example: erniekit import omnivoice train_config.json data_config.json --output tts.yaml",
    )
    parser.add_argument("program", choices=[*FILES], help="whose files they are")
    parser.add_argument(
        "words",
        nargs="+",
        metavar="FILE | KEY=VALUE",
        help="omnivoice: the training's and the data's JSON file; vall-e: the YAML file. KEY=VALUE replaces a value of "
        "the first one, such as hyperparameters.optimizer=Adamw",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the YAML file here (default: print it)")
    parser.add_argument(
        "--model-folder",
        type=Path,
        metavar="DIR",
        help="vall-e: write the model's shape into DIR/config.json, and DIR as model_name_or_path (default: print the "
        "shape as a comment)",
    )
    options = parser.parse_intermixed_args(arguments)
    overrides = [word for word in options.words if "=" in word and not os.path.exists(word)]
    files = [Path(word) for word in options.words if word not in overrides]
    if len(files) != FILES[options.program]:
        wanted = "two files, TRAIN.json and DATA.json" if FILES[options.program] == 2 else "one file, CONFIG.yaml"
        parser.error(f"{options.program} takes {wanted}, not {len(files)}")
    if options.model_folder and options.program != "vall-e":
        parser.error("--model-folder is for vall-e; a model of omnivoice begins with the folder of a language model")
    text, shape = _converted(options, files, overrides)
    _refuse_present(options.output, options.model_folder and options.model_folder / "config.json")
    if shape is not None:
        _write(options.model_folder / "config.json", json.dumps(shape, indent=2) + "\n")
    if options.output:
        _write(options.output, text)
        told = f"{options.output}: written; `erniekit validate {options.output}` checks it"
        print(escape_control_characters(told))
    else:
        sys.stdout.write(escape_control_characters(text))
    return 0


def _converted(options: argparse.Namespace, files: list[Path], overrides: list[str]) -> tuple[str, dict | None]:
    """Return the YAML text, and the shape of the model where it is to be a file."""
    words = [options.program, *map(str, files), *overrides]
    if options.program == "omnivoice":
        training, data = files
        return omnivoice.convert(training, data, overrides).yaml(omnivoice.head(words)), None
    result = vall_e.convert(files[0], overrides, folder=options.model_folder)
    written = options.model_folder is not None
    return result.yaml(vall_e.head(words, result, written=written)), vall_e.model_shape(result) if written else None


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be written: {error.strerror or error}") from None


def _refuse_present(*files: Path | None) -> None:
    for file in files:
        if file is not None and file.exists():
            raise ConfigurationError(f"{file}: exists; remove it, or name another file")
