"""Weights in and out: safetensors, one file or sharded with an index; read in any layout, written in Hugging Face's.

Hugging Face stores linear weights as [out, in], Paddle computes with [in, out]; they are transposed on the way.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from erniekit.model.architectures.model_config import CONFIG_FILE, ModelConfig
from erniekit.model.decoder import Decoder
from erniekit.model.linear import Linear
from erniekit.model.local_tensors import FullTensors, SingleProcessTensors, local_tensors
from erniekit.model.mapped_weights import map_weights
from erniekit.model.parameter_memory import allocate, host_array, place_rows
from erniekit.model.quantization.packed import PackedWeight, packed_weight
from erniekit.model.storage.code_offsets import contents_with_offsets, specs_with_offsets
from erniekit.model.storage.grown_weights import GrownWeights
from erniekit.model.storage.layouts import StoredWeights, open_weights
from erniekit.model.storage.matrix_reading import read_matrix
from erniekit.model.storage.safetensors import StoredTensor
from erniekit.model.storage.shards import write_weight_files
from erniekit.model.storage.stacked_tensors import stacked_contents, stacked_specs
from erniekit.model.storage.tied_head import contents_with_head, specs_with_head
from erniekit.model.storage.wrapped_weights import WrappedWeights
from erniekit.model.tensor_parallel import TensorParallel
from erniekit.model.vocabulary import NEW_ROWS
from erniekit.progress import progress

GENERATION_CONFIG_FILE = "generation_config.json"
Weights = StoredWeights | WrappedWeights | GrownWeights
MAX_SHARD_BYTES = 5 * 10**9
_CHUNK_BYTES = 4 << 20


def named_weights(decoder: Decoder) -> dict[str, paddle.Tensor]:
    """Every weight under its Hugging Face name, in the decoder's layout, in a fixed order; a tied head appears once.

    Adapters and the new rows beside them are not among them.
    """
    file_name = decoder.config.architecture.file_name
    return {
        file_name(prefix + name): parameter
        for prefix, block in decoder.named_blocks()
        for name, parameter in block.named_parameters()
        if ".adapter." not in f".{name}" and name.rpartition(".")[2] != NEW_ROWS
    }


def named_linears(decoder: Decoder) -> dict[str, Linear]:
    """Every linear layer between embedding and head, by its Hugging Face path, in the decoder's order."""
    file_name = decoder.config.architecture.file_name
    return {
        file_name((prefix + name).removesuffix(".")): layer
        for prefix, block in decoder.named_blocks()
        for name, layer in block.named_sublayers(include_self=True)  # a stage may be a linear layer itself
        if isinstance(layer, Linear)
    }


def packed_weights(decoder: Decoder) -> dict[str, PackedWeight]:
    """The weights that are kept in few bits, which are none of `named_weights`, under their Hugging Face names."""
    packed = {f"{path}.weight": packed_weight(linear) for path, linear in named_linears(decoder).items()}
    return {name: weight for name, weight in packed.items() if weight is not None}


@paddle.no_grad()
def load_weights(decoder: Decoder, source: Path | str | Weights, *, mapped: bool = False) -> str:
    """Fill the decoder from a folder's safetensors files, straight into its parameters or a few MB at a time; return in
    words which layout they have.

    bfloat16 and float16 files become the decoder's own precision. A weight that is kept in few bits is read whole.

    Args:
        mapped: leave the weights in their files where they can be computed with there (`mapped_weights`).

    Raises:
        ModelFileError: a file is missing or damaged, the folder was left half-written, the layout cannot be told, or
            tensors are missing, unknown or of another shape (all listed).
    """
    stored = source if isinstance(source, Weights) else open_weights(decoder.config, source)
    architecture = decoder.config.architecture
    weights = named_weights(decoder)
    in_files = map_weights(stored, weights, named_linears(decoder), decoder) if mapped else set()
    to_read = {name: parameter for name, parameter in weights.items() if name not in in_files}
    for name, parameter in progress(to_read.items(), "loading weights", len(to_read), "tensors"):
        transposed = stored.is_transposed(name) != architecture.is_linear(name)
        axis = _file_axis(stored, name, decoder, transposed)
        allocate(parameter)
        if not _read_at_once(stored, name, parameter, decoder.tp, axis, transposed):
            for rows, values in _local_blocks(stored, name, decoder.tp, axis):
                place_rows(parameter, rows, values, transposed=transposed)
    for name, weight in packed_weights(decoder).items():
        weight.fill(name, stored.read(name), decoder.tp, architecture.placement(name).axis)
    return str(stored.layout)


def weight_reader(config: ModelConfig, folder: Path | str) -> Callable[[str], np.ndarray]:
    """Open a folder's weights: by Hugging Face name, each whole, float32 and in the decoder's layout.

    Raises:
        ModelFileError: as `load_weights`.
    """
    stored = open_weights(config, folder)

    def read(name: str) -> np.ndarray:
        values = stored.read(name)
        return np.ascontiguousarray(values.T if config.architecture.is_linear(name) else values, np.float32)

    return read


def _file_axis(stored: Weights, name: str, decoder: Decoder, transposed: bool) -> int | None:
    """Return the axis of a weight in its file that tensor-parallel ranks divide; None: each has all of it."""
    axis = decoder.config.architecture.placement(name).axis if decoder.tp.size > 1 else None
    if axis is None or len(stored.shape(name)) == 1:
        return axis
    return 1 - axis if transposed else axis


def _local_range(tp: TensorParallel, size: int) -> range:
    width = tp.local_size(size)
    return range(tp.rank * width, (tp.rank + 1) * width)


def _read_at_once(
    stored: Weights,
    name: str,
    parameter: paddle.Tensor,
    tp: TensorParallel,
    axis: int | None,
    transposed: bool,
) -> bool:
    """Fill a parameter from its file by our kernel, this rank's slice of it; return whether that was possible."""
    matrix, host = stored.matrix(name), host_array(parameter)
    if matrix is None or host is None:
        return False
    if axis is not None:
        matrix = matrix.part(axis, _local_range(tp, stored.shape(name)[axis]))
    return read_matrix(matrix, host, transposed=transposed)


def _local_blocks(
    stored: Weights, name: str, tp: TensorParallel, axis: int | None
) -> Iterator[tuple[slice, np.ndarray]]:
    """The blocks of this rank's slice of a weight, as the file has them; row numbers count within the slice.

    Args:
        axis: of the file, that the ranks divide; None: each has all of it.
    """
    if axis is None:
        yield from stored.row_blocks(name)
        return
    local_rows = _local_range(tp, stored.shape(name)[axis])
    for rows, values in stored.row_blocks(name, local_rows if axis == 0 else None):
        if axis == 1:
            yield rows, values[:, local_rows.start : local_rows.stop]
            continue
        first, last = max(rows.start, local_rows.start), min(rows.stop, local_rows.stop)
        if first < last:  # a fused tensor is read whole
            kept = values[first - rows.start : last - rows.start]
            yield slice(first - local_rows.start, last - local_rows.start), kept


def save_weights(
    decoder: Decoder,
    folder: Path | str | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    full_tensors: FullTensors | None = None,
) -> list[Path]:
    """Write the weights as float32 into `folder` and return the files written; more than one means an index too.

    Those of a float64 decoder, in which parallel layouts are compared, stay float64. Equal weights give equal bytes.
    Nothing is synced to disk; the checkpoint folder does that.

    Args:
        folder: None on ranks that only give what they hold of the weights.
        full_tensors: the weights of all ranks; default: those of this decoder.
    """
    full_tensors = full_tensors or SingleProcessTensors(local_tensors(named_weights(decoder)))
    shapes, is_linear = decoder.config.weight_shapes(), decoder.config.architecture.is_linear
    if folder is None:
        for name in shapes:
            full_tensors.read(name)
        return []
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = "F64" if paddle.float64 in {weight.dtype for weight in decoder.parameters()} else "F32"
    tensors = {name: StoredTensor(dtype, shape) for name, shape in shapes.items()}
    contents = ((name, _stored(full_tensors.read(name), dtype, is_linear(name))) for name in tensors)
    stacked = decoder.config.architecture.stacked_experts
    specs = specs_with_head(stacked_specs(tensors, stacked), decoder.config)
    contents_of_files = contents_with_head(stacked_contents(contents, tensors, stacked), decoder.config)
    specs = specs_with_offsets(specs, decoder.config)
    contents_of_files = contents_with_offsets(contents_of_files, decoder.config)
    return write_weight_files(folder, specs, contents_of_files, max_shard_bytes, {"format": "pt"})


def save_model_folder(
    decoder: Decoder,
    folder: Path | str | None,
    tokenizer_files: Iterable[Path] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    full_tensors: FullTensors | None = None,
) -> list[Path]:
    """Write a folder that this project and `transformers` load: configurations, weights and the tokenizer's files.

    For `folder` and `full_tensors` see `save_weights`.
    """
    written = save_weights(decoder, folder, max_shard_bytes, full_tensors)
    if folder is None:
        return []
    folder = Path(folder)
    config: dict[str, object] = decoder.config.to_json()
    written.append(_write_json(folder / CONFIG_FILE, config))
    return written + save_companion_files(decoder, folder, tokenizer_files)


def save_companion_files(decoder: Decoder, folder: Path, tokenizer_files: Iterable[Path]) -> list[Path]:
    """Write what answering needs beside weights or adapters: the ids of special tokens, and the tokenizer's files."""
    config: dict[str, Any] = decoder.config.to_json()
    config = {**config.get(decoder.config.architecture.text_key, {}), **config}
    token_ids: dict[str, object] = {
        name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config
    }
    written = [_write_json(folder / GENERATION_CONFIG_FILE, token_ids)]
    return written + [copy_companion_file(Path(source), folder) for source in tokenizer_files]


def copy_companion_file(source: Path, folder: Path) -> Path:
    """Copy one of the tokenizer's files; further chat templates keep the name of their own folder."""
    is_further_template = source.parent.name == "additional_chat_templates"
    target = folder / source.parent.name / source.name if is_further_template else folder / source.name
    target.parent.mkdir(exist_ok=True)
    return Path(shutil.copyfile(source, target))


def _stored(weight: np.ndarray | None, dtype: str, transposed: bool) -> Iterator[memoryview]:
    """A weight's bytes, a few MB at a time."""
    assert weight is not None  # this rank writes
    values = weight.T if transposed else weight
    rows = max(1, _CHUNK_BYTES // max(1, values[:1].nbytes))
    for start in range(0, len(values), rows):
        block = values[start : start + rows].astype(np.float64 if dtype == "F64" else np.float32, copy=False)
        yield np.ascontiguousarray(block).data


def _write_json(path: Path, content: Mapping[str, object]) -> Path:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return path
