"""Check that the folders and files which a configuration names are there, and can be what they are to be.

Needs neither Paddle nor NumPy. `erniekit.build.preflight` says which command needs which of these checks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from erniekit.config import Config
from erniekit.config.object_urls import is_url, url_problem
from erniekit.config.parameter import ConfigBuilder
from erniekit.config.registry import PARAMETERS
from erniekit.config.sections.codes import FITTED
from erniekit.config.sections.rewards import files_of
from erniekit.config.stages import STAGES
from erniekit.data.formats.table import is_hub_dataset
from erniekit.environment import is_importable
from erniekit.errors import ConfigurationError, ModelFileError
from erniekit.hub.cache import HUBS, chosen_hub, find_local_folder, hub_hint
from erniekit.hub.object_store import lacking_package
from erniekit.json_files import read_json_object


def missing_paths(values: Mapping[str, Any] | Config, verb: str) -> Iterator[tuple[str, str]]:
    """Yield (parameter, what is wrong) for each folder or file that a command would read and that does not exist.

    A model of a hub may be missing, since it can be downloaded, and so may a data set of one. Of a URL it is looked
    whether the packages for it are installed; no store is asked.
    """
    reads_hub = verb == "codes" or not STAGES[values["stage"]].reads_codes  # hubs have no data sets of codes
    named = read_paths(values, verb)
    named |= {name: tuple(filter(is_url, of)) for name, of in _written_or_beside(values).items()}
    for name, paths in named.items():
        for path in filter(None, paths):
            if is_url(path):
                if not url_problem(path) and (lacking := lacking_package(path)):
                    yield name, f"{path}: {lacking}"
                continue
            if os.path.exists(os.path.expanduser(path)) or (
                name.endswith("dataset_path") and reads_hub and is_hub_dataset(path)
            ):
                continue
            inside = "" if path.startswith(("/", "~")) else f" in the current folder, {Path.cwd()}"
            yield name, f"{path} does not exist{inside}" + hub_hint(path) * (name in ("model_name_or_path", "codec"))


def _written_or_beside(values: Mapping[str, Any] | Config) -> dict[str, tuple[str, ...]]:
    return {"output_dir": (values["output_dir"],), "media_dir": values["media_dir"]}


def read_paths(values: Mapping[str, Any] | Config, verb: str) -> dict[str, tuple[str, ...]]:
    """Return the files, folders and models that a command would read, by parameter."""
    trains, evaluates = values["do_train"], values["do_eval"]
    read: dict[str, tuple[str, ...]] = {}
    by_hub = any(values[hub.parameter] for hub in HUBS)
    if verb == "codes":
        read["train_dataset_path"] = values["train_dataset_path"]
        folders = {"codec": FITTED, "codec_features": ("log_mel",)}
        read |= {name: (values[name],) for name, words in folders.items() if values[name] not in words and not by_hub}
        if values["codec"] == "kmeans":
            read["codec_centroids"] = (values["codec_centroids"],)
    elif not by_hub:
        read["model_name_or_path"] = (values["model_name_or_path"],)
        if STAGES[values["stage"]].needs_reference:
            read["ref_model_name_or_path"] = (values["ref_model_name_or_path"],)
        if values["stage"] == "DISTILL":
            read["teacher_model_name_or_path"] = (values["teacher_model_name_or_path"],)
    holds_out = verb == "train" and evaluates and values["eval_split"]
    if trains or verb == "preview" or holds_out:
        read["train_dataset_path"] = values["train_dataset_path"]
    if verb == "train" and evaluates and (values["evaluation_strategy"] != "no" or not trains):
        read["eval_dataset_path"] = values["eval_dataset_path"]
    if verb == "train" and values["stage"] in PARAMETERS["rewards"].stages:
        read["rewards"] = tuple(files_of(values["rewards"]))
    if verb == "train":
        read["init_from_checkpoint"] = (values["init_from_checkpoint"],)
        if isinstance(values["resume_from_checkpoint"], str):
            read["resume_from_checkpoint"] = (values["resume_from_checkpoint"],)
        if values["lora"]:
            read["lora_path"] = (values["lora_path"],)
    return read


def report_missing_paths(builder: ConfigBuilder) -> None:
    """Add what `missing_paths` finds to the other problems of a configuration, which the user then sees together."""
    if builder.verb not in ("train", "preview", "codes"):
        return
    broken = set(builder.broken)
    for name, what in missing_paths(builder, builder.verb):
        if name not in broken:
            builder.problem(name, what)


def check_paths(config: Config) -> None:
    """Raise ConfigurationError if the run would read a folder or a file that does not exist."""
    lines = [f"{config.origin(name)}: `{name}`: {what}" for name, what in missing_paths(config, config.verb)]
    if lines:
        raise ConfigurationError("\n".join(lines))


def check_codec(config: Config) -> None:
    """Check the folders of `codec` and `codec_features` as far as they are here, and that recordings can be read.

    Raises:
        UserError: a folder has no `config.json` that names its `model_type`, or a package is missing.
    """
    if not is_importable("soundfile"):
        raise ConfigurationError("to read recordings, install soundfile: pip install 'erniekit[audio]'")
    section = config.codes
    named = {"codec": section.codec not in FITTED}
    named["codec_features"] = section.codec == "kmeans" and section.codec_features != "log_mel"
    for name in (name for name, is_folder in named.items() if is_folder):
        folder = find_local_folder(config[name], chosen_hub(config))
        if folder is None or not folder.exists():  # a hub's that is not here, or `check_paths` says it
            continue
        if not (folder / "config.json").is_file():
            raise ModelFileError(
                f"{config.origin(name)}: `{name}`: {folder} has no config.json, so it is no folder of a model"
            )
        if not isinstance(read_json_object(folder / "config.json").get("model_type"), str):
            raise ModelFileError(f"{folder / 'config.json'}: model_type: expected the name of a codec, got none")


def check_shard_paths(config: Config) -> None:
    """Raise ConfigurationError if `data.lst`, whose columns are separated by spaces, cannot name the shards."""
    folder = str(config.output_dir.absolute())
    if config.codes.codes_format == "shards" and any(character.isspace() for character in folder):
        raise ConfigurationError(
            f"{config.origin('output_dir')}: `output_dir`: {folder} contains a space, and the index of shards, "
            "data.lst, has spaces between its columns; choose another folder"
        )
