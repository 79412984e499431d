"""Tensors of files that hold a weight of all experts of a layer, as GPT-OSS stores them. Needs no Paddle.

    <path>.experts.gate_up_proj       [E, in, 2 out]   outputs of gate and up in turn
    <path>.experts.gate_up_proj_bias  [E, 2 out]
    <path>.experts.down_proj          [E, in, out]
    <path>.experts.down_proj_bias     [E, out]

The decoder has them apart, `<path>.experts.3.up_proj.weight`, because ranks divide experts.
`Architecture.stacked_experts` names each tensor with the weights whose outputs alternate in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from erniekit.errors import ModelFileError
from erniekit.model.architectures.stacked_experts import Place, Stacked, place_of
from erniekit.model.storage.safetensors import StoredTensor

if TYPE_CHECKING:
    import numpy as np


class ExpertTensor:
    """Presents one expert's part of a stacked tensor as a file, with the methods of `SafetensorsFile` for loading."""

    def __init__(self, file: Any, place: Place) -> None:
        self._file, self._place = file, place
        self.path, self.metadata = file.path, file.metadata

    def shape(self, name: str) -> tuple[int, ...]:
        *inputs, outputs = self._file.shape(self._place.stored)[1:]
        return (outputs // self._place.parts, *inputs)

    def stored(self, name: str) -> StoredTensor:
        return StoredTensor(self._file.stored(self._place.stored).dtype, self.shape(name))

    def read(self, name: str) -> np.ndarray:
        expert = self._file.rows(self._place.stored, self._place.expert, self._place.expert + 1)
        return self._place._replace(expert=0).of(expert).T

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.read(name)[start:stop]

    def row_blocks(self, name: str, wanted: range | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        start, stop = (0, self.shape(name)[0]) if wanted is None else (wanted.start, wanted.stop)
        yield slice(start, stop), self.rows(name, start, stop)


def with_expert_tensors(files: Mapping[str, Any], stacked: Stacked, names: Iterable[str]) -> dict[str, Any]:
    """Return the same files with the weights of experts in the place of stacked tensors.

    Args:
        names: of all weights of the model.

    Raises:
        ModelFileError: a stacked tensor is for another number of experts.
    """
    places = {name: place for name in names if (place := place_of(name, stacked)) is not None}
    experts = {place.stored: place.expert + 1 for place in sorted(places.values())}
    for stored, count in experts.items():
        if stored in files and files[stored].shape(stored)[0] != count:
            shape = list(files[stored].shape(stored))
            raise ModelFileError(f"{files[stored].path}: {stored}: shape {shape}, expected {count} experts")
    found = {name: ExpertTensor(files[place.stored], place) for name, place in places.items() if place.stored in files}
    return {name: file for name, file in files.items() if name not in experts} | found


def stacked_specs(tensors: Mapping[str, StoredTensor], stacked: Stacked) -> dict[str, StoredTensor]:
    """Return the tensors of a file that holds these weights, each stacked tensor at the place of its last weight."""
    places = {name: place for name in tensors if (place := place_of(name, stacked)) is not None}
    experts = {place.stored: place.expert + 1 for place in sorted(places.values())}
    specs: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        place = places.get(name)
        if place is None:
            specs[name] = tensor
            continue
        outputs, *inputs = tensor.shape
        specs.pop(place.stored, None)
        specs[place.stored] = StoredTensor(tensor.dtype, (experts[place.stored], *inputs, outputs * place.parts))
    return specs


def stacked_contents(
    contents: Iterable[tuple[str, Iterable[Any]]], tensors: Mapping[str, StoredTensor], stacked: Stacked
) -> Iterator[tuple[str, Iterable[Any]]]:
    """Yield the names and bytes of the tensors of `stacked_specs`, from those of weights; a layer's are in memory."""
    import numpy as np

    specs = stacked_specs(tensors, stacked)
    pending: dict[str, np.ndarray] = {}
    missing: dict[str, int] = {}
    for name, blocks in contents:
        place = place_of(name, stacked)
        if place is None:
            yield name, blocks
            continue
        tensor, spec = tensors[name], specs[place.stored]
        unit = np.dtype(f"u{spec.nbytes // int(np.prod(spec.shape))}")  # whatever its values are
        if place.stored not in pending:
            pending[place.stored], missing[place.stored] = np.empty(spec.shape, unit), spec.shape[0] * place.parts
        values = np.frombuffer(b"".join(bytes(block) for block in blocks), unit).reshape(tensor.shape)
        place.of(pending[place.stored])[...] = values.T
        missing[place.stored] -= 1
        if not missing[place.stored]:
            yield place.stored, [pending.pop(place.stored).data]
