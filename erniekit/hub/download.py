"""Fetch models of hubs with the hubs' own libraries into their own caches.

Only what a model needs is fetched: configurations, the tokenizer's files, chat templates and safetensors; never code
and never pickles. Weights are fetched only when they are needed, so a preview of the data does not wait for them. A
process fetches a model once; on the Hugging Face Hub its weights come from the same commit as its other files.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path

from erniekit.config import Config
from erniekit.config.object_urls import is_url
from erniekit.data.tokenizers.files import ADDITIONAL_TEMPLATES
from erniekit.errors import ModelFileError
from erniekit.hub.cache import (
    ADAPTER_CONFIG,
    AI_STUDIO,
    DESCRIPTION_FILES,
    HUGGING_FACE,
    MODEL_CONFIG,
    MODEL_SCOPE,
    WEIGHT_FILES,
    WEIGHTS_INDEX,
    Hub,
    HubModel,
    cached_snapshot,
    chosen_hub,
    hub_hint,
    missing_files,
    parse_name,
)
from erniekit.hub.fetched import fetch_model
from erniekit.model.storage.model_folder import read_shard_index

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0  # to hear from a hub at all; ModelScope's library tries for about a minute
STALL_TIMEOUT_S = 60.0  # between two pieces of a file
COMMIT = re.compile(r"[0-9a-f]{40}")
SUBFOLDER_FILES = f"*/{WEIGHT_FILES}"  # such as those of another format
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "lora_model_state.safetensors")
_fetched_folders: dict[tuple[HubModel, bool], Path] = {}  # (model, with its weights) -> folder
_reported: set[str] = set()


class _FetchError(Exception):
    """A hub did not give a model; the message is a clause that says why."""


def model_folder(config: Config, *, weights: bool = False) -> Path:
    """Return the local folder of `model_name_or_path`, which is fetched where a hub is chosen.

    Args:
        weights: fetch the weights, too; otherwise only the small files.

    Raises:
        ModelFileError: there is no such folder or model.
    """
    return find_model_folder(config.basic.model_name_or_path, chosen_hub(config), weights=weights)


def find_model_folder(
    name: str, hub: Hub | None, *, weights: bool = True, parameter: str = "model_name_or_path"
) -> Path:
    """Return the local folder of a model that is named by a path, a URL or, where a hub is chosen, its name there.

    A folder that exists is taken before any hub is asked. Without a network a complete cached copy is used.

    Args:
        weights: fetch the weights, too.
        parameter: the parameter or option that holds the name, for messages.

    Raises:
        ModelFileError: there is no such folder or model; says what to download and where to put it.
    """
    if is_url(name):
        return fetch_model(name, weights=weights)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if hub is not None:
            _log_once(f"model: {folder} is a local folder, so {hub.parameter} is not used")
        return folder
    if hub is None:
        raise ModelFileError(
            f"{parameter}: {folder} is not a folder here ({folder.absolute()}).{hub_hint(name)}\n"
            "  Write the path of a folder that holds config.json, the tokenizer's files and *.safetensors."
        )
    model = parse_name(name, hub)
    if (model, weights) not in _fetched_folders:
        _fetched_folders[model, weights] = _fetch_model(model, weights, parameter)
    return _fetched_folders[model, weights]


def _fetch_model(model: HubModel, weights: bool, parameter: str) -> Path:
    hub = model.hub
    first = _fetched_folders.get((model, False))
    fetch = {HUGGING_FACE: _from_hugging_face, AI_STUDIO: _from_ai_studio, MODEL_SCOPE: _from_model_scope}[hub]
    if weights:
        logger.info(f"model: the weights of {model.repo} from {hub.title} ...")
    try:
        folder = fetch(model, weights, first)
        lacking = missing_files(folder, weights=weights)
        if lacking:
            raise _FetchError(f"the repository holds no {', '.join(lacking)}")
        origin = hub.title
    except _FetchError as error:
        cached = cached_snapshot(model, weights=weights)
        if cached is None:
            raise ModelFileError(_download_instructions(model, parameter, str(error))) from None
        folder, origin = cached, f"the cache of {hub.title}, since {error}"
    commit = f", commit {folder.name}" if COMMIT.fullmatch(folder.name) else ""
    _log_once(f"model: {model.repo} (revision {model.revision}{commit}) from {origin}, in {folder}")
    return folder


def _log_once(line: str) -> None:
    if line not in _reported:
        _reported.add(line)
        logger.info(line)


def _download_instructions(model: HubModel, parameter: str, reason: str) -> str:
    folder = f"models/{model.repo.split('/')[1]}"
    partial = model.hub.snapshot(model)
    lacking = ""
    if partial is not None and partial.is_dir() and any(partial.iterdir()):
        lacking = f"\n  The cached copy in {partial} lacks {', '.join(missing_files(partial, weights=True))}."
    return (
        f"{parameter}: {model.repo} (revision {model.revision}) cannot be fetched from {model.hub.title}: {reason}."
        + lacking
        + f"\n  Where there is a network, download from {model.hub.page.format(repo=model.repo)} into {folder}:"
        "\n    config.json (of an adapter adapter_config.json) and generation_config.json,"
        "\n    tokenizer.json or tokenizer.model, tokenizer_config.json, special_tokens_map.json, chat_template.jinja,"
        "\n    model.safetensors, or model.safetensors.index.json with all the *.safetensors it names"
        f"\n  as far as they are there, bring that folder here and use it as {parameter}."
    )


def _patterns(weights: bool) -> list[str]:
    small = [*DESCRIPTION_FILES, f"{ADDITIONAL_TEMPLATES}/*.jinja"]
    return [*small, WEIGHT_FILES] if weights else small


def _from_hugging_face(model: HubModel, weights: bool, first: Path | None) -> Path:
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if constants.HF_HUB_OFFLINE:
        raise _FetchError("HF_HUB_OFFLINE forbids asking it")
    endpoint = os.environ.get("HF_ENDPOINT") or None
    revision = model.revision if first is None else first.name
    try:
        # ask first with a time limit, because snapshot_download's own first question has none
        huggingface_hub.HfApi(endpoint=endpoint).model_info(model.repo, revision=revision, timeout=TIMEOUT_S)
        folder = huggingface_hub.snapshot_download(
            model.repo, revision=revision, allow_patterns=_patterns(weights), ignore_patterns=[SUBFOLDER_FILES],
            cache_dir=model.hub.cache(), endpoint=endpoint,
        )  # fmt: skip
    except GatedRepoError:
        raise _FetchError("its terms must be accepted on its page, and HF_TOKEN must be set") from None
    except RepositoryNotFoundError:
        raise _FetchError("there is no such repository, or it is private and needs HF_TOKEN") from None
    except RevisionNotFoundError:
        raise _FetchError(f"it has no revision {revision}") from None
    except connection_errors() as error:
        raise _FetchError(_short_reason(error, model.hub)) from None
    return Path(folder)


def _from_model_scope(model: HubModel, weights: bool, first: Path | None) -> Path:
    try:
        import modelscope_hub
    except ModuleNotFoundError:
        raise _FetchError("its library is not installed (pip install 'erniekit[modelscope]')") from None
    from modelscope_hub.errors import AuthenticationError, HubError, NotExistError, PermissionDeniedError

    try:
        folder = modelscope_hub.HubApi(endpoint=os.environ.get("MODELSCOPE_ENDPOINT") or None).download_repo(
            model.repo, "model", revision=model.revision, cache_dir=model.hub.cache(),
            allow_patterns=_patterns(weights), ignore_patterns=[SUBFOLDER_FILES],
        )  # fmt: skip
    except NotExistError:
        raise _FetchError(f"there is no such repository, or it has no revision {model.revision}") from None
    except (AuthenticationError, PermissionDeniedError):
        raise _FetchError("it needs a login that may read it (MODELSCOPE_API_TOKEN)") from None
    except (HubError, OSError, ValueError) as error:
        raise _FetchError(_short_reason(error, model.hub)) from None
    return Path(folder)


def _from_ai_studio(model: HubModel, weights: bool, first: Path | None) -> Path:
    """Fetch file by file: AI Studio's library cannot list a repository, so it is asked for every possible file."""
    try:
        from aistudio_sdk.hub import Hub as Client
        from aistudio_sdk.requests import hub as transport
    except ModuleNotFoundError:
        raise _FetchError("its library is not installed (pip install 'erniekit[aistudio]')") from None

    transport.CONNECTION_TIMEOUT = TIMEOUT_S  # instead of 30 s
    transport.CONNECTION_TIMEOUT_DOWNLOAD = STALL_TIMEOUT_S  # instead of an hour
    client, folder = Client(), model.hub.snapshot(model)
    assert folder is not None

    def fetch(name: str) -> bool:
        """Fetch a file into the folder; return whether the repository has it."""
        with redirect_stdout(sys.stderr):  # the library prints about each file
            answer = client.download(repo_id=model.repo, filename=name, revision=model.revision, cache_dir=str(folder))
        if "path" in answer:
            return True
        if answer.get("biz_code") == 404:
            return False
        message = str(answer.get("error_msg") or "no answer").strip()
        raise _FetchError(f"{name}: {message} (a private repository needs AISTUDIO_ACCESS_TOKEN)")

    try:
        with _without_broken_blobs(model):
            if first is None:
                if not any([fetch(MODEL_CONFIG), fetch(ADAPTER_CONFIG)]):
                    raise _FetchError(f"there is no such repository, or it holds no {MODEL_CONFIG}")
                for name in DESCRIPTION_FILES:
                    if name not in (MODEL_CONFIG, ADAPTER_CONFIG):
                        fetch(name)
            if weights:
                _fetch_shards(folder, fetch)
    except (OSError, ValueError, KeyError) as error:
        raise _FetchError(_short_reason(error, model.hub)) from None
    return folder


def _fetch_shards(folder: Path, fetch: Callable[[str], bool]) -> None:
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        names = _shards_named(index)
    elif (folder / ADAPTER_CONFIG).is_file():
        names = list(ADAPTER_WEIGHTS)
    else:
        names = ["model.safetensors"]
    for name in names:
        if fetch(name) and not _is_complete(folder / name):
            (folder / name).resolve().unlink()
            (folder / name).unlink()
            raise _FetchError(f"{name} was cut off on the way and is removed again; the next attempt fetches it anew")


def _shards_named(index: Path) -> list[str]:
    try:
        return sorted(set(read_shard_index(index)[0].values()))
    except ModelFileError as error:
        raise _FetchError(str(error)) from None


def _is_complete(path: Path) -> bool:
    """Whether a safetensors file has the length that its header says; AI Studio's library keeps what was cut off."""
    from erniekit.model.storage.safetensors import SafetensorsFile  # with NumPy

    try:
        SafetensorsFile(path)
    except ModelFileError:
        return False
    return True


@contextmanager
def _without_broken_blobs(model: HubModel) -> Iterator[None]:
    """Remove what a download that ends early leaves: AI Studio's library would take it for a complete file."""
    blobs = model.hub.cache() / "models" / model.repo.split("/")[1] / "blobs"
    before = set(blobs.glob("*"))

    def remove_unlinked() -> None:
        folder = model.hub.snapshot(model)
        assert folder is not None
        links = folder.glob("*")
        for path in set(blobs.glob("*")) - before - {link.resolve() for link in links}:
            path.unlink(missing_ok=True)

    with ExitStack() as undo:
        undo.callback(remove_unlinked)
        yield
        undo.pop_all()


def _short_reason(error: Exception, hub: Hub) -> str:
    """Return a library's error in a few words."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"no space is left for its cache {hub.cache()}"
    if isinstance(error, PermissionError):
        return f"its cache {hub.cache()} cannot be written"
    name, text = type(error).__name__, " ".join(str(error).split())
    if "Timeout" in name:
        return f"it did not answer in time ({name})"
    if "Connect" in name or "Network" in name or "Proxy" in name:
        return f"there is no connection to it ({name})"
    return f"{name}: {text[:200]}"


def connection_errors() -> tuple[type[Exception], ...]:
    """Return what huggingface_hub raises when it cannot reach the Hub, or the Hub refuses."""
    errors: list[type[Exception]] = [OSError, ValueError]  # version 0 uses requests, whose errors are OSErrors
    for name in ("httpx", "httpx2"):  # versions 1 and 2
        if name in sys.modules:
            errors.append(sys.modules[name].HTTPError)
    return tuple(errors)
