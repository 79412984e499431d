"""What one process computes, once for all ranks and layouts that are compared with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.distributed.mesh import Mesh

Result = Mapping[str, Any]  # arrays, numbers in lists, or arrays by name


def shared_results(
    mesh: Mesh, folder: str, wanted: Sequence[Mapping[str, Any]], train: Callable[..., Result]
) -> list[dict[str, Any]]:
    """What `train` returns for each of several sets of arguments, by a single process.

    Each is computed by one rank, unless an earlier job has left it in `folder`.

    Args:
        wanted: arguments that JSON can write; some may be the same.
    """
    files = [Path(folder) / f"{sha256(json.dumps(each, sort_keys=True).encode()).hexdigest()}.npz" for each in wanted]
    for number, (file, arguments) in enumerate(dict(zip(files, wanted, strict=True)).items()):
        if number % mesh.topology.world_size == mesh.rank and not file.exists():
            _write(train(**arguments), file)
    mesh.all_gather_object(None)  # all have written theirs
    return [_read(file) for file in files]


def _write(result: Result, file: Path) -> None:
    arrays: dict[str, np.ndarray] = {}
    for part, values in result.items():
        if isinstance(values, Mapping):
            arrays |= {f"{part}:{name}": value for name, value in values.items()}
        else:
            arrays[part] = np.array(values)
    np.savez(file, **arrays)


def _read(file: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with np.load(file) as arrays:
        for key in arrays.files:
            part, _, name = key.partition(":")
            if name:
                result.setdefault(part, {})[name] = arrays[key]
            else:
                result[part] = arrays[key]
    return result
