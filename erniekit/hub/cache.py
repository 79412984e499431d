"""Name models of hubs, and find the copies that the hubs' own libraries have cached. Nothing here asks a network.

A library is imported only when a configuration names its hub.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from erniekit.config import Config
from erniekit.config.object_urls import is_url
from erniekit.data.tokenizers.files import TOKENIZER_FILES
from erniekit.environment import cache_folder
from erniekit.errors import ModelFileError
from erniekit.hub.fetched import fetched
from erniekit.model.processor_files import PROCESSOR_FILES
from erniekit.model.storage.model_folder import read_shard_index

MODEL_CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
DESCRIPTION_FILES = (
    MODEL_CONFIG, "generation_config.json", *TOKENIZER_FILES, WEIGHTS_INDEX, ADAPTER_CONFIG, "lora_config.json",
    *PROCESSOR_FILES,
)  # fmt: skip
WEIGHT_FILES = "*.safetensors"
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)


@dataclass(frozen=True)
class Hub:
    """A hub that models can be fetched from.

    Attributes:
        parameter: the parameter that chooses it.
        page: the web page of "{repo}".
        revision: the default revision.
        cache: returns the folder in which its library keeps models.
        snapshot: returns the folder of a model's cached copy, which may be incomplete, or None.
    """

    parameter: str
    title: str
    page: str
    revision: str
    cache: Callable[[], Path]
    snapshot: Callable[[HubModel], Path | None]


@dataclass(frozen=True)
class HubModel:
    """A model of a hub at a revision, which is a branch, a tag or a commit."""

    hub: Hub
    repo: str
    revision: str


def _env_path(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value).expanduser() if value else None


def _hugging_face_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _hugging_face_snapshot(model: HubModel) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    for name in (MODEL_CONFIG, ADAPTER_CONFIG):
        path = try_to_load_from_cache(model.repo, name, cache_dir=_hugging_face_cache(), revision=model.revision)
        if isinstance(path, str):  # otherwise it is not cached, or known not to exist
            return Path(path).parent
    return None


def _model_scope_cache() -> Path:
    return _env_path("MODELSCOPE_CACHE") or Path.home() / ".cache/modelscope"


def _model_scope_snapshot(model: HubModel) -> Path | None:
    try:
        from modelscope_hub import HubApi
        from modelscope_hub.errors import HubError
    except ModuleNotFoundError:
        return None
    try:
        return Path(
            HubApi().download_repo(
                model.repo, "model", revision=model.revision, cache_dir=_model_scope_cache(), local_files_only=True
            )
        )
    except HubError:
        return None


def _ai_studio_cache() -> Path:
    return (_env_path("AISTUDIO_CACHE_HOME") or Path.home()) / ".cache/aistudio"


def _ai_studio_snapshot(model: HubModel) -> Path:
    # the library keeps one folder for each file's last commit, so hub/download.py links a model together in this one
    return _ai_studio_cache() / "snapshots" / model.repo / model.revision


HUGGING_FACE = Hub(
    "from_hf_hub", "the Hugging Face Hub", "https://huggingface.co/{repo}", "main",
    _hugging_face_cache, _hugging_face_snapshot,
)  # fmt: skip
AI_STUDIO = Hub(
    "from_aistudio", "Baidu AI Studio", "http://git.aistudio.baidu.com/{repo}", "master",
    _ai_studio_cache, _ai_studio_snapshot,
)  # fmt: skip
MODEL_SCOPE = Hub(
    "from_modelscope", "ModelScope", "https://www.modelscope.cn/models/{repo}", "master",
    _model_scope_cache, _model_scope_snapshot,
)  # fmt: skip
HUBS = (HUGGING_FACE, AI_STUDIO, MODEL_SCOPE)


def chosen_hub(config: Config) -> Hub | None:
    """Return the hub that a configuration fetches its model from, or None."""
    section = config.basic
    asked = (
        (HUGGING_FACE, section.from_hf_hub),
        (AI_STUDIO, section.from_aistudio),
        (MODEL_SCOPE, section.from_modelscope),
    )
    return next((hub for hub, chosen in asked if chosen), None)


def parse_name(name: str, hub: Hub) -> HubModel:
    """Parse "organisation/name" or "organisation/name@revision".

    Raises:
        ModelFileError: the name has another form.
    """
    match = _NAME.fullmatch(name)
    if match is None or {".", ".."} & set(re.split("[/@]", name)):
        raise ModelFileError(
            f"{name} is neither a folder here nor the name of a model on {hub.title} ({hub.parameter}).\n"
            "  Write organisation/name, or organisation/name@revision for a branch, a tag or a commit."
        )
    return HubModel(hub, match["repo"], match["revision"] or hub.revision)


def hub_hint(name: str) -> str:
    """Return a hint for a name that is no folder while no hub is chosen; "" where no hub could know the name."""
    if not _NAME.fullmatch(name):
        return ""
    switches = ", ".join(f"{hub.parameter}: true" for hub in HUBS)
    return f"\n  If it is a model of a hub, name the hub: write one of {switches}."


def missing_files(folder: Path, *, weights: bool) -> list[str]:
    """Return the files that the folder of a model or an adapter lacks: its configuration, and with `weights` those."""
    if not any((folder / name).is_file() for name in (MODEL_CONFIG, ADAPTER_CONFIG)):
        return [MODEL_CONFIG]
    if not weights:
        return []
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        try:
            shards = set(read_shard_index(index)[0].values())
        except ModelFileError:
            return [WEIGHTS_INDEX]
        return sorted(name for name in shards if not (folder / name).is_file())
    return [] if any(folder.glob(WEIGHT_FILES)) else ["model.safetensors"]


def cached_snapshot(model: HubModel, *, weights: bool) -> Path | None:
    """Return the folder of a complete cached copy, or None."""
    folder = model.hub.snapshot(model)
    return None if folder is None or missing_files(folder, weights=weights) else folder


def is_fetched(config: Config) -> bool:
    """Return whether the model of a configuration is one of a hub or of an object store."""
    return chosen_hub(config) is not None or is_url(config.basic.model_name_or_path)


def local_model_folder(config: Config) -> Path | None:
    """Return the folder of `model_name_or_path` without fetching anything; None for one elsewhere that is not cached.

    Raises:
        ModelFileError: the name cannot be one of its hub.
    """
    return find_local_folder(config.basic.model_name_or_path, chosen_hub(config))


def find_local_folder(name: str, hub: Hub | None) -> Path | None:
    """Return the folder of a model, whether it exists or not; None for one of a hub or of a store that is not cached.

    Raises:
        ModelFileError: the name cannot be one of its hub.
    """
    if is_url(name):
        return fetched(name, cache_folder())
    folder = Path(name).expanduser()
    if hub is None or folder.is_dir():
        return folder
    return cached_snapshot(parse_name(name, hub), weights=False)
