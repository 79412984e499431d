"""Models of hubs as far as they are on this machine: names, caches, what is missing. No network, no hub's library."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from erniekit.config import Config
from erniekit.data.tokenizers.files import TOKENIZER_FILES
from erniekit.errors import ModelFileError
from erniekit.model.storage.model_folder import read_shard_index

MODEL_CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
DESCRIPTION_FILES = (
    MODEL_CONFIG, "generation_config.json", *TOKENIZER_FILES, WEIGHTS_INDEX, ADAPTER_CONFIG, "lora_config.json",
)  # fmt: skip
WEIGHT_FILES = "*.safetensors"
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)


@dataclass(frozen=True)
class Hub:
    """A hub that models can be fetched from.

    Attributes:
        parameter: the one that chooses it.
        page: where a person finds the files of "{repo}".
        revision: what is taken where the name says none.
        cache: the folder in which its library keeps models.
        snapshots: the folders in which a model may be cached, the likeliest first.
    """

    parameter: str
    title: str
    page: str
    revision: str
    cache: Callable[[], Path]
    snapshots: Callable[[HubModel], list[Path]]


@dataclass(frozen=True)
class HubModel:
    """A model of a hub at a revision: a branch, a tag or a commit."""

    hub: Hub
    repo: str
    revision: str


def _env_path(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value).expanduser() if value else None


def _hugging_face_cache() -> Path:
    chosen = _env_path("HF_HUB_CACHE") or _env_path("HUGGINGFACE_HUB_CACHE")
    if chosen is not None:
        return chosen
    user_cache = _env_path("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (_env_path("HF_HOME") or user_cache / "huggingface") / "hub"


def _hugging_face_snapshots(model: HubModel) -> list[Path]:
    folder = _hugging_face_cache() / f"models--{model.repo.replace('/', '--')}"
    reference = folder / "refs" / model.revision
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else model.revision
    return [folder / "snapshots" / commit]


def _model_scope_cache() -> Path:
    return _env_path("MODELSCOPE_CACHE") or Path.home() / ".cache/modelscope"


def _model_scope_snapshots(model: HubModel) -> list[Path]:
    base = _model_scope_cache()
    owner, name = model.repo.split("/")
    old = f"{owner}/{name.replace('.', '___')}"  # how libraries before 1.38 named it
    new = base / "models" / f"{owner}--{name}" / "snapshots" / model.revision
    return [base / "models" / old, base / "hub/models" / old, new]  # its library prefers an old one, too


def _ai_studio_cache() -> Path:
    return (_env_path("AISTUDIO_CACHE_HOME") or Path.home()) / ".cache/aistudio"


def _ai_studio_snapshots(model: HubModel) -> list[Path]:
    # the library's own folders are one for each file's last commit, so a model is linked together in one of ours
    return [_ai_studio_cache() / "snapshots" / model.repo / model.revision]


HUGGING_FACE = Hub(
    "from_hf_hub", "the Hugging Face Hub", "https://huggingface.co/{repo}", "main",
    _hugging_face_cache, _hugging_face_snapshots,
)  # fmt: skip
AI_STUDIO = Hub(
    "from_aistudio", "Baidu AI Studio", "http://git.aistudio.baidu.com/{repo}", "master",
    _ai_studio_cache, _ai_studio_snapshots,
)  # fmt: skip
MODEL_SCOPE = Hub(
    "from_modelscope", "ModelScope", "https://www.modelscope.cn/models/{repo}", "master",
    _model_scope_cache, _model_scope_snapshots,
)  # fmt: skip
HUBS = (HUGGING_FACE, AI_STUDIO, MODEL_SCOPE)


def chosen_hub(config: Config) -> Hub | None:
    """The hub that a configuration fetches its model from."""
    section = config.basic
    asked = (
        (HUGGING_FACE, section.from_hf_hub),
        (AI_STUDIO, section.from_aistudio),
        (MODEL_SCOPE, section.from_modelscope),
    )
    return next((hub for hub, chosen in asked if chosen), None)


def parse_name(name: str, hub: Hub) -> HubModel:
    """The model that "organisation/name" or "organisation/name@revision" names.

    Raises:
        ModelFileError: it is no such name.
    """
    match = _NAME.fullmatch(name)
    if match is None or {".", ".."} & set(re.split("[/@]", name)):
        raise ModelFileError(
            f"{name} is neither a folder here nor the name of a model on {hub.title} ({hub.parameter}).\n"
            "  Write organisation/name, or organisation/name@revision for a branch, a tag or a commit."
        )
    return HubModel(hub, match["repo"], match["revision"] or hub.revision)


def hub_hint(name: str) -> str:
    """What a name may mean that is no folder, where no hub is chosen; "" where it cannot be a hub's."""
    if not _NAME.fullmatch(name):
        return ""
    switches = ", ".join(f"{hub.parameter}: true" for hub in HUBS)
    return f"\n  If it is a model of a hub, write of which: one of {switches}."


def missing_files(folder: Path, *, weights: bool) -> list[str]:
    """What a model's or an adapter's folder still lacks: its configuration, and where they are wanted its weights."""
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
    """The folder of a complete cached copy, or None."""
    folders = (folder for folder in model.hub.snapshots(model) if not missing_files(folder, weights=weights))
    return next(folders, None)


def local_model_folder(config: Config) -> Path | None:
    """Where `model_name_or_path` lies without fetching anything; None for a hub's model that is not cached.

    Raises:
        ModelFileError: the name is not one that its hub could know.
    """
    name, hub = config.basic.model_name_or_path, chosen_hub(config)
    folder = Path(name).expanduser()
    if hub is None or folder.is_dir():
        return folder
    return cached_snapshot(parse_name(name, hub), weights=False)
