"""Give a configuration paths of this machine where it names URLs of object stores. Needs neither Paddle nor NumPy.

Data, adapters and checkpoints to start from are downloaded into the cache; `output_dir` becomes a folder of the cache,
which `launch/stored_run.py` brings to the store. Whatever comes after this knows no URL, except of models, which
`hub/download.py` turns into folders as it does names of hubs. `Config.resolved` keeps the URLs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from erniekit.build.input_paths import read_paths
from erniekit.build.step_count import cache_folder
from erniekit.config import Config
from erniekit.config.object_urls import is_url, joined
from erniekit.hub.fetched import FOLDER, digest_of, fetch, fetch_model, fetched

_DATA = ("train_dataset_path", "eval_dataset_path", "media_dir")
_MODELS = ("init_from_checkpoint", "lora_path")
_PARAMETERS = (*_DATA, *_MODELS, "resume_from_checkpoint", "output_dir", "logging_dir")


def names_urls(config: Config) -> bool:
    """Return whether the configuration has a URL where `with_local_paths` puts a path."""
    return any(is_url(value) for name in _PARAMETERS for value in _values(config[name]))


def with_local_paths(config: Config, *, fetches: bool = True) -> Config:
    """Return the configuration with paths of this machine; what the command reads is downloaded.

    Args:
        fetches: False: ask no store, as `erniekit validate`. Data that is not in the cache stays a URL, and what a run
            would start from is left out.

    Raises:
        UserError: something is not there, or cannot be downloaded.
    """
    if not names_urls(config):
        return config
    cache, read = cache_folder(config), read_paths(config, config.verb)
    paths: dict[str, Any] = {}
    data = {name: config[name] for name in _DATA if any(map(is_url, config[name]))}
    for name, values in data.items():
        if name in read or name == "media_dir":
            paths[name] = tuple(_place(value, cache, fetch if fetches else fetched) for value in values)
    for name in _MODELS:
        if is_url(config[name]):
            paths[name] = _start(config[name], cache, wanted=name in read, fetches=fetches)
    output = config.basic.output_dir
    if is_url(output):
        paths["output_dir"] = str(staging_folder(output, cache))
    if is_url(config.basic.logging_dir):
        inside = config.basic.logging_dir.removeprefix(joined(output, "")).strip("/")
        paths["logging_dir"] = str(staging_folder(output, cache) / inside)
    resume = config.checkpoint.resume_from_checkpoint
    if is_url(resume):
        paths["resume_from_checkpoint"] = _checkpoint(str(resume), output, cache, fetches=fetches)
    return config.with_paths(paths)


def staging_folder(url: str, cache: Path) -> Path:
    """Return the local folder of a run whose output folder is one of an object store."""
    return cache / FOLDER / "runs" / digest_of(url) / joined(url, "").rpartition("/")[2]


def _values(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _place(value: str, cache: Path, find: Callable[[str, Path], Path | None]) -> str:
    if not is_url(value):
        return value
    found = find(value, cache)
    return value if found is None else str(found)


def _start(url: str, cache: Path, *, wanted: bool, fetches: bool) -> str:
    """Return the folder of weights or adapters; "" where the command does not read them, or they are not here."""
    if wanted and fetches:
        return str(fetch_model(url, weights=True))
    return str(fetched(url, cache) or "")


def _checkpoint(url: str, output: str, cache: Path, *, fetches: bool) -> str | bool:
    """Return the folder of the checkpoint to resume from; true where it is not here and may not be fetched.

    One of this run lies in the run's own folder, into which `launch/stored_run.py` brings it.
    """
    parent, _, name = joined(url, "").rpartition("/")
    if is_url(output) and parent == joined(output, ""):
        folder = staging_folder(output, cache) / name
        return str(folder) if fetches or folder.is_dir() else True
    found = fetch(url, cache) if fetches else fetched(url, cache)
    return True if found is None else str(found)
