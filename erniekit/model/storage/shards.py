"""The weight files of a model folder: one safetensors file, or shards with an index. Needs no Paddle."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from erniekit.errors import ModelFileError
from erniekit.model.architectures.registry import ARCHITECTURES
from erniekit.model.storage.model_folder import read_shard_index
from erniekit.model.storage.safetensors import SafetensorsFile, StoredTensor, write_stored

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_FILES = "model-*-of-*.safetensors"
_SHOWN_PROBLEMS = 20
_PICKLE_CONVERTER = (
    'python -c "import sys; from {library}.transformers import AutoModelForCausalLM; '
    'AutoModelForCausalLM.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2], safe_serialization=True)" '
    "{source} {target}"
)


def open_weight_files(folder: Path) -> dict[str, SafetensorsFile]:
    """Return every stored tensor's name, in the order of the files, with the open file that contains it.

    Raises:
        ModelFileError: there are no weights, a shard is missing, or a file is damaged.
    """
    index_path = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file():
        file = SafetensorsFile(folder / WEIGHTS_FILE)
        return dict.fromkeys(file.names(), file)
    if not index_path.is_file():
        raise ModelFileError(_no_weights(folder))
    weight_map, _ = read_shard_index(index_path)
    shard_names = sorted(set(weight_map.values()))
    missing = [f"{name}: no such file" for name in shard_names if not (folder / name).is_file()]
    if missing:
        raise ModelFileError(format_problems(f"{index_path}: shards cannot be opened:", missing))
    shards = {name: SafetensorsFile(folder / name, shard_names) for name in shard_names}
    held = {shard: set(file.names()) for shard, file in shards.items()}
    absent = [f"{name}: not in {shard}" for name, shard in weight_map.items() if name not in held[shard]]
    if absent:
        raise ModelFileError(format_problems(f"{index_path}: the index does not match its shards:", absent))
    return {name: shards[shard] for name, shard in weight_map.items()}


def _no_weights(folder: Path) -> str:
    """Return the error for a folder without safetensors, whose weights may be pickled."""
    if any(folder.glob("*.pdparams")):
        target = folder.with_name(f"{folder.name}-safetensors")
        library = _paddle_library(folder)
        paths = {"source": shlex.quote(str(folder)), "target": shlex.quote(str(target))}
        command = _PICKLE_CONVERTER.format(library=library, **paths)
        return (
            f"{folder}: the weights are pickled (.pdparams), and reading a pickle can run any program hidden in it.\n"
            f"  If you trust their source, convert them where {library} is installed, then use the new folder:\n"
            f"    {command}\n"
            f"  and copy the tokenizer's files into {target}."
        )
    if any(folder.glob("pytorch_model*.bin")):
        return (
            f"{folder}: the weights are pickled (pytorch_model.bin), and reading a pickle can run any program hidden "
            "in it.\n  If you trust their source, save the model again with transformers: "
            "model.save_pretrained(folder, safe_serialization=True)"
        )
    return f"{folder}: contains neither {WEIGHTS_FILE} nor {INDEX_FILE}"


def _paddle_library(folder: Path) -> str:
    """Return the library that opens Paddle's pickled weights of the model; paddlenlp if it is unknown."""
    try:
        model_type = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return "paddlenlp"
    architecture = ARCHITECTURES.get(str(model_type))
    return architecture.paddle_files.library if architecture and architecture.paddle_files else "paddlenlp"


def write_weight_files(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    contents: Iterable[tuple[str, Iterable[Any]]],
    max_shard_bytes: int,
    metadata: Mapping[str, str] | None = None,
    index_metadata: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write `model.safetensors`, or an index and shards of at most `max_shard_bytes` (or one larger tensor).

    One tensor at a time is in memory. Weight files of an earlier write into the folder are replaced.

    Args:
        contents: each tensor's name and its bytes, in blocks; in the order of `tensors`.
        index_metadata: further entries of the index in addition to `total_size`.

    Returns:
        The files written.
    """
    shards = split_into_shards({name: tensor.nbytes for name, tensor in tensors.items()}, max_shard_bytes)
    remaining = iter(contents)
    written = []
    for number, names in enumerate(shards, start=1):
        file_name = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path = folder / file_name
        write_stored(path, {name: tensors[name] for name in names}, islice(remaining, len(names)), metadata)
        written.append(path)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {
            "metadata": {**(index_metadata or {}), "total_size": total},
            "weight_map": {name: path.name for path, names in zip(written, shards, strict=True) for name in names},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        written.append(folder / INDEX_FILE)
    for path in weight_files(folder):
        if path not in written:
            path.unlink()  # of an earlier save with other shards; it would be loaded instead
    return written


def weight_files(folder: Path) -> Iterator[Path]:
    """Yield the files in `folder` that loading would take weights from."""
    candidates = [folder / WEIGHTS_FILE, folder / INDEX_FILE, *sorted(folder.glob(SHARD_FILES))]
    yield from (path for path in candidates if path.is_file())


def split_into_shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Group names in order into shards of at most `max_bytes`; a tensor is never cut."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def format_problems(title: str, problems: list[str]) -> str:
    """Return a title and a line for each problem, up to twenty."""
    shown = [f"  {problem}" for problem in problems[:_SHOWN_PROBLEMS]]
    if len(problems) > _SHOWN_PROBLEMS:
        shown.append(f"  ... and {len(problems) - _SHOWN_PROBLEMS} more")
    return "\n".join([title, *shown])
