"""AdamW's moments in few bits in the files of a checkpoint (`ckpt_quant_stage`; the codes are `moment_codes`'s).

In the place of `<parameter>/moment1` and `<parameter>/moment2`, for a parameter with n values,

    <parameter>/moment2_codes  U8 [n], or [n / 2] with two to a byte    roots of the second moment
    <parameter>/moment2_low    BF16 [blocks]                            the range of each block's roots
    <parameter>/moment2_high   BF16 [blocks]
    <parameter>/moment1_codes  I8 [n], or U8 [n / 2]                    first moment in units of those roots
    <parameter>/moment1_scale  BF16 [blocks]
    <parameter>/moments_shape  I64 [dimensions]                         of the parameter

and the file's metadata says which codes they are, so that reading needs no parameter. Norms and biases, master weights
and the powers of the betas stay as they are. What is compressed is what a file would hold, whole tensors or a rank's
slices, one moment after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from erniekit.errors import CheckpointError
from erniekit.model.storage.safetensors_file import StoredTensor
from erniekit.model.whole import FullTensors
from erniekit.training.moment_codes import (
    FORMATS,
    FirstMomentCodes,
    MomentFormat,
    NotEncodableError,
    SecondMomentCodes,
    decode_first,
    decode_second,
    encode_first,
    encode_second,
)
from erniekit.training.tensor_files import TensorFiles

LEVEL_KEY, VERSION_KEY, VERSION = "ckpt_quant_stage", "moment_codes", "1"
_FIRST, _SECOND, _SHAPE = "/moment1", "/moment2", "/moments_shape"
_LONGEST_VECTOR = 1 << 16  # of a norm or a bias; longer ones are a rank's share of a matrix
_FIRST_SUFFIXES, _SECOND_SUFFIXES = ("_codes", "_scale"), ("_codes", "_low", "_high")


class CompressedState:
    """`FullTensors` of an optimizer with its moments in codes. Reads one moment at a time of what it stands before.

    Attributes:
        metadata: for the files.
    """

    def __init__(self, full: FullTensors, fmt: MomentFormat) -> None:
        self._full, self._fmt = full, fmt
        self._stored: dict[str, StoredTensor] = {}
        own = {name: full.stored(name) for name in full.names}
        for name, tensor in own.items():
            parameter = name.removesuffix(_FIRST).removesuffix(_SECOND)
            moments = [own.get(parameter + kind) for kind in (_FIRST, _SECOND)]
            if parameter == name or not all(map(_is_compressed, moments)):
                self._stored[name] = tensor
            elif name.endswith(_FIRST):
                self._stored |= _components(parameter, tensor.shape, fmt)
        self._uncompressed = self._stored.keys() & own.keys()
        self._ready: dict[str, np.ndarray | None] = {}
        self._roots: SecondMomentCodes | None = None  # of the parameter whose first moment is next
        self.names = tuple(self._stored)
        self.metadata = {LEVEL_KEY: fmt.level, VERSION_KEY: VERSION}

    def stored(self, name: str) -> StoredTensor:
        return self._stored[name]

    def read(self, name: str) -> np.ndarray | None:
        """Raises CheckpointError where a moment is not finite."""
        if name in self._uncompressed:
            return self._full.read(name)
        if name not in self._ready:
            self._ready = dict(self._encoded(name))
        return self._ready.pop(name)

    def _encoded(self, name: str) -> Iterator[tuple[str, np.ndarray | None]]:
        """The part of that name, and those of the same moment."""
        moment = name.removesuffix("_codes")
        assert moment != name, f"{name}: read out of order"
        of_second = moment.endswith(_SECOND)
        values, codes = self._full.read(moment), None
        try:
            if values is not None:
                codes = self._encode_second(values) if of_second else self._encode_first(values)
        except NotEncodableError as error:
            raise CheckpointError(
                f"{moment}: {error}, so this run is damaged; no checkpoint is written.\n"
                "  Resume from an earlier one with a lower learning_rate or max_grad_norm."
            ) from None
        suffixes = _SECOND_SUFFIXES if of_second else _FIRST_SUFFIXES
        for suffix, component in zip(suffixes, codes or [None] * len(suffixes), strict=True):
            yield moment + suffix, component
        if not of_second:
            yield moment.removesuffix(_FIRST) + _SHAPE, None if values is None else np.array(values.shape, np.int64)

    def _encode_second(self, values: np.ndarray) -> SecondMomentCodes:
        self._roots = encode_second(values, self._fmt)
        return self._roots

    def _encode_first(self, values: np.ndarray) -> FirstMomentCodes:
        assert self._roots is not None
        codes = encode_first(values, self._roots, self._fmt)
        self._roots = None
        return codes


def moment_format_of(files: TensorFiles, folder: Path) -> MomentFormat | None:
    """How the moments in these files are stored; None: as they are.

    Raises:
        CheckpointError: in a way that this version does not know, or one that the files do not agree on.
    """
    found = {(each.get(LEVEL_KEY), each.get(VERSION_KEY)) for each in files.metadata}
    if found <= {(None, None)}:
        if any(name.endswith((_FIRST + "_codes", _SECOND + "_codes")) for name in files.names):
            raise CheckpointError(f"{folder}: the optimizer's moments are compressed, but the files do not say how")
        return None
    if len(found) > 1:
        raise CheckpointError(
            f"{folder}: the optimizer's files come from several checkpoints: {sorted(map(str, found))}"
        )
    ((level, version),) = found
    if level not in FORMATS or version != VERSION:
        raise CheckpointError(
            f"{folder}: the optimizer's moments are compressed in a way that this version does not know "
            f"({LEVEL_KEY} {level}, {VERSION_KEY} {version}); it reads {', '.join(FORMATS)} of version {VERSION}.\n"
            "  Resume with the version that wrote it, or set ignore_load_lr_and_optim: true for fresh moments."
        )
    return FORMATS[level]


def decompressed(files: TensorFiles, folder: Path) -> TensorFiles:
    """The same tensors under the names that they have in an optimizer, moments in float32.

    Raises:
        CheckpointError: as `moment_format_of`, or parts of a moment are missing; on reading, they do not fit one
        another.
    """
    fmt = moment_format_of(files, folder)
    if fmt is None:
        return files
    parameters = [name.removesuffix(_SHAPE) for name in files.names if name.endswith(_SHAPE)]
    components = {component for name in parameters for component in _components(name, (1,), fmt)}
    if missing := sorted(components - set(files.names)):
        raise CheckpointError(
            f"{folder}: parts of compressed moments are missing, for example {', '.join(missing[:3])}"
        )
    moments = {name + kind: name for name in parameters for kind in (_FIRST, _SECOND)}

    def read(name: str) -> np.ndarray:
        parameter = moments.get(name)
        if parameter is None:
            return files.read(name)
        shape = tuple(int(size) for size in files.read(parameter + _SHAPE))
        stored = _components(parameter, shape, fmt) if all(size >= 0 for size in shape) else {}

        def component(suffix: str) -> np.ndarray:
            values = files.read(parameter + suffix)
            if parameter + suffix not in stored or values.shape != stored[parameter + suffix].shape:
                raise CheckpointError(f"{folder}: {parameter + suffix} {list(values.shape)} fits no {list(shape)}")
            return values

        roots = SecondMomentCodes(*(component(_SECOND + suffix) for suffix in _SECOND_SUFFIXES))
        if name.endswith(_SECOND):
            return decode_second(roots, shape, fmt)
        return decode_first(
            FirstMomentCodes(*(component(_FIRST + suffix) for suffix in _FIRST_SUFFIXES)), roots, shape, fmt
        )

    others = [name for name in files.names if name not in components]
    return TensorFiles((*others, *moments), read, files.metadata)


def _is_compressed(moment: StoredTensor | None) -> bool:
    if moment is None or moment.dtype not in ("F32", "BF16"):
        return False
    size = math.prod(moment.shape)
    return size > _LONGEST_VECTOR or (len(moment.shape) > 1 and size > 0)


def _components(parameter: str, shape: tuple[int, ...], fmt: MomentFormat) -> dict[str, StoredTensor]:
    """What a file holds of a parameter's moments, in the order in which they are made."""
    size = math.prod(shape)
    codes, num_blocks = (fmt.code_bytes(size),), (fmt.num_blocks(size),)
    return {
        f"{parameter}{_SECOND}_codes": StoredTensor("U8", codes),
        f"{parameter}{_SECOND}_low": StoredTensor("BF16", num_blocks),
        f"{parameter}{_SECOND}_high": StoredTensor("BF16", num_blocks),
        f"{parameter}{_FIRST}_codes": StoredTensor("I8" if fmt.bits == 8 else "U8", codes),
        f"{parameter}{_FIRST}_scale": StoredTensor("BF16", num_blocks),
        f"{parameter}{_SHAPE}": StoredTensor("I64", (len(shape),)),
    }
