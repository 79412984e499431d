"""Detect the layout of a model folder's weight files and read all layouts as one. Needs no Paddle.

- Hugging Face: names begin with `model.`, linear weights are [out, in].
- Paddle (paddlenlp, paddleformers, ERNIEKit 1): names begin with the family's name, linear weights are [in, out], and
  so is an untied head. Projections may be fused along the outputs: `up_gate_proj` (or `gate_up_fused_proj`) contains
  gate, then up; `qkv_proj` contains all queries, keys and values in this order ("blocks", ERNIE with grouped queries)
  or, for each key head, its queries, its key and its value ("groups", paddlenlp, and ERNIE with as many key heads as
  queries).

Shapes determine the order of inputs and outputs; if all linear weights are square, the files' metadata and names do.

`locate_weights` reads headers only, and imports NumPy only where projections are fused or weights are stored in few
bits, so that `erniekit validate` can call it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from erniekit.errors import ModelFileError
from erniekit.model.architectures.architecture import Architecture
from erniekit.model.architectures.model_config import CONFIG_FILE, ModelConfig
from erniekit.model.architectures.plain_decoder import EMBEDDING, HEAD
from erniekit.model.architectures.registry import ARCHITECTURES
from erniekit.model.storage.grown_weights import GrownWeights
from erniekit.model.storage.matrix_reading import StoredMatrix
from erniekit.model.storage.model_folder import CONFIG_KEY, refuse_half_written, refuse_sharded_checkpoint
from erniekit.model.storage.safetensors import SafetensorsFile, check_finite
from erniekit.model.storage.shards import format_problems, open_weight_files
from erniekit.model.storage.stacked_tensors import ExpertTensor, with_expert_tensors
from erniekit.model.storage.wrapped_weights import WrappedWeights
from erniekit.model.vocabulary import as_stored

if TYPE_CHECKING:
    import numpy as np

    from erniekit.model.storage.float8_tensors import Float8Tensor
    from erniekit.model.storage.packed_tensors import PackedTensor

    WeightFile = SafetensorsFile | PackedTensor | Float8Tensor | ExpertTensor

_PACKED, _FLOAT8 = ".weight_packed", "F8_E4M3"  # see packed_tensors and float8_tensors
_PADDLE_FORMATS = {"np", "pd", "paddle"}
_QKV = "qkv_proj"
_GATE_UP = ("up_gate_proj", "gate_up_fused_proj")
_FUSED_PART = re.compile(r"(?P<path>.*\.)(?P<linear>[qkv]_proj|gate_proj|up_proj)\.(?P<kind>weight|bias)$")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_CORRECTION = re.compile(r"\.e_score_correction_bias$")
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")  # stored by older programs; computed from the configuration here


@dataclass(frozen=True)
class Layout:
    """How names and shapes in the files differ from Hugging Face's.

    Attributes:
        prefix: replaces `model.`.
        inputs_first: linear weights are [in, out].
        head_inputs_first: an untied head is [hidden, vocabulary].
        qkv: "", "blocks" or "groups": how queries, keys and values share a tensor.
        gate_up: the name of the linear layer with gate and up, or "".
    """

    prefix: str = "model."
    inputs_first: bool = False
    head_inputs_first: bool = False
    qkv: str = ""
    gate_up: str = ""

    def __str__(self) -> str:
        if self == Layout():
            return "Hugging Face layout"
        order = "[in, out]" if self.inputs_first else "[out, in]"
        fused = [name for name in (_QKV if self.qkv else "", self.gate_up) if name]
        return f"{self.prefix}* names, linears {order}" + (f", fused {' and '.join(fused)}" if fused else "")


class TensorRegion(NamedTuple):
    """The location of one weight in the files.

    Attributes:
        stored: the name of the tensor that contains it; "" if no file does, and its values are zero.
        shape: of that tensor.
        transposed: whether the tensor is the transpose of what Hugging Face stores.
        outputs: the tensor's outputs that belong to this weight; None means all.
    """

    stored: str
    shape: tuple[int, ...]
    transposed: bool
    outputs: np.ndarray | None


class StoredWeights:
    """The weights of a folder under their Hugging Face names, whatever the layout of the files."""

    def __init__(self, layout: Layout, files: Mapping[str, WeightFile], regions: Mapping[str, TensorRegion]) -> None:
        self.layout, self._files, self._regions = layout, files, regions

    def dtype(self, name: str) -> str:
        """Return the type in which a weight is stored, such as "BF16"."""
        stored = self._regions[name].stored
        return self._files[stored].stored(stored).dtype if stored else "F32"

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight, in the file's order of axes (see `is_transposed`)."""
        region = self._regions[name]
        return region.shape if region.outputs is None else (*region.shape[:-1], len(region.outputs))

    def is_transposed(self, name: str) -> bool:
        """Return whether `row_blocks` yields rows of the transpose of what Hugging Face stores."""
        return self._regions[name].transposed

    def matrix(self, name: str) -> StoredMatrix | None:
        """Return where a weight lies in a file as it is, in the file's order of axes; None: `row_blocks` makes it."""
        region = self._regions[name]
        file = self._files[region.stored] if region.stored else None
        whole = file.matrix(region.stored) if isinstance(file, SafetensorsFile) else None
        if whole is None or region.outputs is None:
            return whole
        first, last = int(region.outputs[0]), int(region.outputs[-1])
        if last - first + 1 != len(region.outputs):  # alternates with others
            return None
        return whole.part(len(region.shape) - 1, range(first, last + 1))

    def row_blocks(self, name: str, wanted: range | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield the row numbers and rows of a weight a few MB at a time, in the file's order (see `is_transposed`).

        bfloat16 is converted to float32, everything else keeps its type.

        Args:
            wanted: consecutive rows; None: all. If the weight has a tensor for itself, other rows are not read.

        Raises:
            ModelFileError: values are NaN or infinite.
        """
        import numpy as np

        region = self._regions[name]
        if not region.stored:
            own = range(region.shape[0]) if wanted is None else wanted
            yield slice(own.start, own.stop), np.zeros((len(own), *region.shape[1:]), np.float32)
            return
        file = self._files[region.stored]
        for rows, values in file.row_blocks(region.stored, wanted if region.outputs is None else None):
            check_finite(values, region.stored, file.path)
            if region.outputs is None:
                yield rows, values
            elif values.ndim == 2:
                yield rows, values[:, region.outputs]
            else:
                inside = (region.outputs >= rows.start) & (region.outputs < rows.stop)
                first = int(np.argmax(inside))
                found = values[region.outputs[inside] - rows.start]
                yield slice(first, first + len(found)), found

    def tied_weights_that_differ(self, config: ModelConfig) -> list[str]:
        """Return a problem if the embedding and a stored copy of it as the head differ; both are read."""
        head = config.architecture.file_name(HEAD)
        if not (config.ties_head and head in self._files):
            return []
        embedding = self._regions[config.architecture.file_name(EMBEDDING)].stored
        return _untied_head(self._files[head], self._files[embedding], head, embedding)

    def read(self, name: str) -> np.ndarray:
        """Return one full weight as Hugging Face stores it (linear weights [out, in]); its type as
        from `row_blocks`."""
        region = self._regions[name]
        if not region.stored:
            import numpy as np

            return np.zeros(region.shape, np.float32)
        file = self._files[region.stored]
        values = file.read(region.stored)
        check_finite(values, region.stored, file.path)
        if region.outputs is not None:
            values = values[..., region.outputs]
        return values.T if region.transposed else values


def open_weights(config: ModelConfig, folder: Path | str) -> StoredWeights | WrappedWeights | GrownWeights:
    """Locate every weight that `config` needs, and compare a stored copy of tied embeddings with them.

    Of a grown vocabulary the files hold the rows that the model had before.

    Raises:
        ModelFileError: as for `locate_weights`, or the two tied tensors differ.
    """
    stored = locate_weights(config, folder)
    problems = stored.tied_weights_that_differ(config)
    if problems:
        raise ModelFileError(_do_not_fit(Path(folder), config, stored.layout, problems))
    return stored


def locate_weights(config: ModelConfig, folder: Path | str) -> StoredWeights | WrappedWeights | GrownWeights:
    """Locate every weight that `config` needs; only headers are read.

    Raises:
        ModelFileError: a file is missing or damaged, the folder was left half-written, the layout is ambiguous, or
            tensors are missing, unknown or of another shape (all are listed).
    """
    if config.vocabulary is not None:
        return GrownWeights(_wrapped(as_stored(config), folder), config)
    return _wrapped(config, folder)


def _wrapped(config: ModelConfig, folder: Path | str) -> StoredWeights | WrappedWeights:
    """Locate the weights of a model whose files may hold no more than its decoder."""
    if config.wrapped is None:
        return _locate(config, folder)
    return WrappedWeights(_locate(config.wrapped.config, folder), config)


def _locate(config: ModelConfig, folder: Path | str) -> StoredWeights:
    folder = Path(folder)
    refuse_half_written(folder)
    refuse_sharded_checkpoint(folder)
    quantized = config.other_keys.get(CONFIG_KEY)
    files = _as_float_weights(open_weight_files(folder), quantized)
    if config.architecture.stacked_experts:
        files = with_expert_tensors(files, config.architecture.stacked_experts, config.weight_shapes())
    inert = config.architecture.inert_tensors
    shapes = {
        name: file.shape(name) for name, file in files.items() if not _COMPUTED.search(name) and name not in inert
    }
    formats = {file.metadata.get("format", "") for file in files.values()}
    layout = find_layout(config, shapes, formats, where=str(folder))
    regions = weight_regions(config, layout)
    if not config.other_keys.get("moe_use_aux_free", True):  # such routers may be stored without a correction bias
        unstored = {
            name for name, region in regions.items() if _CORRECTION.search(name) and region.stored not in shapes
        }
        regions |= {name: regions[name]._replace(stored="") for name in unstored}
    problems = _misfits(config, regions, shapes, files)
    if problems:
        raise ModelFileError(_do_not_fit(folder, config, layout, problems))
    return StoredWeights(layout, files, regions)


def _do_not_fit(folder: Path, config: ModelConfig, layout: Layout, problems: list[str]) -> str:
    title = f"{folder}: the weights do not fit {CONFIG_FILE} ({config.model_type}, {layout}):"
    return format_problems(title, problems)


def _as_float_weights(
    files: Mapping[str, SafetensorsFile], quantized: Mapping[str, Any] | None
) -> Mapping[str, WeightFile]:
    """Return the same files, with weights that are stored in few bits presented as floats."""
    if not any(name.endswith(_PACKED) or file.stored(name).dtype == _FLOAT8 for name, file in files.items()):
        return files
    from erniekit.model.storage.float8_tensors import with_float8_weights
    from erniekit.model.storage.packed_tensors import with_packed_weights

    return with_float8_weights(with_packed_weights(files, quantized), quantized)


def find_layout(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], formats: set[str], *, where: str) -> Layout:
    """Determine the layout of files that contain tensors of these names and shapes.

    Args:
        formats: the `format` entries of the files' metadata; "pt" is Hugging Face's, "np" paddlenlp's.
        where: begins the error message.

    Raises:
        ModelFileError: names, shapes and metadata allow more than one layout, with different weights.
    """
    known = {family.paddle_files: None for family in ARCHITECTURES.values() if family.paddle_files is not None}
    paddle = next((files for files in known if f"{files.prefix}embed_tokens.weight" in shapes), None)
    is_paddle, prefix = paddle is not None, paddle.prefix if paddle else "model."
    linears = {part for name in shapes for part in name.split(".")[-2:-1]}
    gate_up = next((name for name in _GATE_UP if name in linears), "")
    qkv = ""
    if _QKV in linears:
        if paddle is None:
            raise ModelFileError(
                f"{where}: {prefix}*.{_QKV} can contain queries, keys and values in more than one order, and the "
                "files do not say which. Save the model again in Hugging Face's layout, with unfused projections."
            )
        grouped = config.num_key_value_heads != config.num_attention_heads
        qkv = paddle.grouped_qkv if grouped else "groups"
    inputs_first = _order_by_shape(config, Layout(prefix, qkv=qkv, gate_up=gate_up), shapes)
    if inputs_first is None:
        if formats <= _PADDLE_FORMATS or (is_paddle and formats == {""}):
            inputs_first = True
        elif formats == {"pt"}:
            inputs_first = False
        else:
            raise ModelFileError(
                f"{where}: every linear weight is square and the files' metadata name no format, so it is unknown "
                'whether they are [in, out] or [out, in]. Save them with the metadata {"format": "pt"} if they are '
                '[out, in], as Hugging Face has them, or {"format": "np"} if they are [in, out], as Paddle has them.'
            )
    head = shapes.get(config.architecture.file_name(HEAD))
    square_head = config.vocab_size == config.hidden_size
    head_inputs_first = inputs_first and is_paddle if square_head else head == (config.hidden_size, config.vocab_size)
    return Layout(prefix, inputs_first, head_inputs_first and not config.ties_head, qkv, gate_up)


def weight_regions(config: ModelConfig, layout: Layout) -> dict[str, TensorRegion]:
    """Return the location of each weight of a model in a layout, by Hugging Face name."""
    shapes = config.weight_shapes()
    return {name: _region(config, layout, name, shapes) for name in shapes}


def _region(config: ModelConfig, layout: Layout, name: str, shapes: Mapping[str, tuple[int, ...]]) -> TensorRegion:
    shape, outputs, stored = shapes[name], None, name
    fused = _FUSED_PART.fullmatch(name)
    if fused:
        parts: tuple[str, ...] = ()
        if layout.qkv and fused["linear"][0] in "qkv":
            parts, whole = ("q_proj", "k_proj", "v_proj"), _QKV
        elif layout.gate_up and fused["linear"] in ("gate_proj", "up_proj"):
            parts, whole = ("gate_proj", "up_proj"), layout.gate_up
        if parts:
            sizes = [shapes[f"{fused['path']}{part}.{fused['kind']}"][0] for part in parts]
            number = parts.index(fused["linear"])
            groups = config.num_key_value_heads if layout.qkv == "groups" and whole == _QKV else 1
            outputs = _outputs(sizes, number, groups)
            stored = f"{fused['path']}{whole}.{fused['kind']}"
            shape = (sum(sizes), *shape[1:])
    is_head = name == config.architecture.file_name(HEAD)
    transposed = layout.head_inputs_first if is_head else layout.inputs_first and _has_inputs(config.architecture, name)
    if stored.startswith("model."):
        stored = layout.prefix + stored.removeprefix("model.")
    return TensorRegion(stored, shape[::-1] if transposed else shape, transposed, outputs)


def _outputs(sizes: list[int], number: int, groups: int) -> np.ndarray:
    """Return the outputs of part `number`, if each of `groups` groups has an equal share of every part in order."""
    import numpy as np

    shares = [size // groups for size in sizes]
    start = sum(shares[:number])
    group = np.arange(groups)[:, None] * sum(shares)
    return (group + np.arange(start, start + shares[number])).reshape(-1)


def _order_by_shape(config: ModelConfig, layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> bool | None:
    """Return whether most linear weights that are not square are [in, out]; None if all are square."""
    votes = 0
    for name, region in weight_regions(config, layout).items():
        found = shapes.get(region.stored)
        if _has_inputs(config.architecture, name) and found is not None and region.shape[0] != region.shape[1]:
            votes += (found == region.shape[::-1]) - (found == region.shape)
    return votes > 0 if votes else None


def _has_inputs(architecture: Architecture, name: str) -> bool:
    """Whether this is a matrix that Paddle's libraries store as [in, out]: that of a linear layer or of a router."""
    info = architecture.weight_info(name)
    return info.parameter == "weight" and info.rule.kind in ("linear", "router")


def _misfits(
    config: ModelConfig,
    regions: Mapping[str, TensorRegion],
    shapes: Mapping[str, tuple[int, ...]],
    files: Mapping[str, WeightFile],
) -> list[str]:
    expected = {region.stored: region.shape for region in regions.values() if region.stored}
    head, embedding = (config.architecture.file_name(name) for name in (HEAD, EMBEDDING))
    if config.ties_head and head in shapes:
        expected[head] = expected[regions[embedding].stored]  # a stored copy
    problems = [f"{name}: missing" for name in expected if name not in shapes]
    for name, shape in shapes.items():
        if name not in expected and not _may_be_left_out(config, name):
            problems.append(f"{name}: the model has no such weight ({files[name].path.name})")
        elif name in expected and shape != expected[name]:
            problems.append(f"{name}: shape {list(shape)}, expected {list(expected[name])}")
        elif name in expected and not files[name].stored(name).is_float:
            problems.append(f"{name}: holds {files[name].stored(name).dtype}, which are not the floats of a weight")
    return problems


def _may_be_left_out(config: ModelConfig, name: str) -> bool:
    """Return whether a weight belongs to multi-token prediction, which some families store as further layers."""
    layer = _LAYER.match(name.removeprefix(config.architecture.decoder_prefix))
    further = config.other_keys.get("num_nextn_predict_layers") or 0
    number = int(layer[1]) if layer else -1
    return config.architecture.is_mtp_weight(name) or 0 <= number - config.num_hidden_layers < further


def _untied_head(head: WeightFile, embedding: WeightFile, head_name: str, embedding_name: str) -> list[str]:
    """Return a problem if the two stored tensors differ."""
    import numpy as np

    blocks = embedding.row_blocks(embedding_name)
    if all(np.array_equal(values, head.rows(head_name, rows.start, rows.stop)) for rows, values in blocks):
        return []
    return [
        f'{head_name}: differs from {embedding_name}, but {CONFIG_FILE} ties them; set "tie_word_embeddings": false'
    ]
