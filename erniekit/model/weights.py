"""Weights in and out: safetensors in Hugging Face names and layout, one file or sharded with an index.

Hugging Face stores linear weights as [out, in], Paddle computes with [in, out]; they are transposed on the way.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import paddle

from erniekit.errors import ModelFileError
from erniekit.model.configuration import CONFIG_FILE
from erniekit.model.decoder import Decoder
from erniekit.model.model_folder import refuse_half_written
from erniekit.model.safetensors_file import SafetensorsFile, write_safetensors

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GENERATION_CONFIG_FILE = "generation_config.json"
MAX_SHARD_BYTES = 5 * 10**9
_SHOWN_PROBLEMS = 20


def named_weights(decoder: Decoder) -> dict[str, paddle.Tensor]:
    """Every weight under its Hugging Face name, in the decoder's layout, in a fixed order; a tied head appears once."""
    return {
        prefix + name: parameter
        for prefix, stage in decoder.named_stages()
        for name, parameter in stage.named_parameters()
    }


def is_transposed(name: str) -> bool:
    """Whether the decoder keeps this weight as the transpose of Hugging Face's."""
    return name.endswith("_proj.weight")


def load_weights(decoder: Decoder, folder: Path | str) -> None:
    """Fill the decoder from `model.safetensors`, or from the shards that its index lists, tensor by tensor.

    bfloat16 and float16 files become the decoder's own precision.

    Raises:
        ModelFileError: a file is missing or damaged, the folder was left half-written, or tensors are missing, unknown
            or of another shape (all listed).
    """
    folder = Path(folder)
    refuse_half_written(folder)
    files = _locate(folder)
    shapes = decoder.config.weight_shapes()
    tied_head = decoder.config.tie_word_embeddings and "lm_head.weight" in files
    problems = [f"{name}: missing" for name in shapes if name not in files]
    for name, file in files.items():
        if name in shapes:
            if file.shape(name) != shapes[name]:
                problems.append(f"{name}: shape {list(file.shape(name))}, expected {list(shapes[name])}")
        elif not (name == "lm_head.weight" and tied_head):
            problems.append(f"{name}: the model has no such weight ({file.path.name})")
    if tied_head and not problems and not _equal(files, "lm_head.weight", "model.embed_tokens.weight"):
        problems.append(
            "lm_head.weight: differs from model.embed_tokens.weight, but config.json ties them; "
            'set "tie_word_embeddings": false'
        )
    if problems:
        raise ModelFileError(_listed(f"{folder}: the weights do not fit {CONFIG_FILE}:", problems))
    for name, parameter in named_weights(decoder).items():
        values = files[name].read(name)
        if is_transposed(name):
            values = values.T
        parameter.set_value(np.ascontiguousarray(values, np.float32).astype(_numpy_dtype(parameter), copy=False))


def save_weights(decoder: Decoder, folder: Path | str, max_shard_bytes: int = MAX_SHARD_BYTES) -> list[Path]:
    """Write the weights as float32 into `folder` and return the files written; more than one means an index too.

    Equal weights give equal bytes. Nothing is synced to disk; the checkpoint folder does that.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shapes = decoder.config.weight_shapes()
    weights = named_weights(decoder)
    shards = _shards(shapes, max_shard_bytes)
    written = []
    for number, names in enumerate(shards, start=1):
        file_name = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path = folder / file_name
        write_safetensors(path, {name: shapes[name] for name in names}, _stored(weights, names), {"format": "pt"})
        written.append(path)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": 4 * decoder.config.parameter_count()},
            "weight_map": {name: path.name for path, names in zip(written, shards, strict=True) for name in names},
        }
        written.append(_write_json(folder / INDEX_FILE, index))
    for path in [folder / WEIGHTS_FILE, folder / INDEX_FILE, *folder.glob("model-*-of-*.safetensors")]:
        if path not in written:
            path.unlink(missing_ok=True)  # of an earlier save that was cut differently; it would be loaded instead
    return written


def save_model_folder(
    decoder: Decoder,
    folder: Path | str,
    tokenizer_files: Iterable[Path] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Write a folder that this project and `transformers` load: configurations, weights and the tokenizer's files."""
    folder = Path(folder)
    written = save_weights(decoder, folder, max_shard_bytes)
    config: dict[str, object] = decoder.config.to_json()
    written.append(_write_json(folder / CONFIG_FILE, config))
    token_ids: dict[str, object] = {
        name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config
    }
    written.append(_write_json(folder / GENERATION_CONFIG_FILE, token_ids))
    for source in tokenizer_files:
        written.append(Path(shutil.copyfile(source, folder / Path(source).name)))
    return written


def _locate(folder: Path) -> dict[str, SafetensorsFile]:
    """Every stored tensor's name and the open file that holds it."""
    index_path = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file():
        file = SafetensorsFile(folder / WEIGHTS_FILE)
        return dict.fromkeys(file.names(), file)
    if not index_path.is_file():
        raise ModelFileError(f"{folder}: neither {WEIGHTS_FILE} nor {INDEX_FILE} is there")
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        shard_names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"{index_path}: cannot be read as an index of shards: {error!r}") from None
    outside = [name for name in shard_names if Path(name).name != name]
    missing = [name for name in shard_names if name not in outside and not (folder / name).is_file()]
    if outside or missing:
        problems = [f"{name}: not a plain file name" for name in outside] + [
            f"{name}: no such file" for name in missing
        ]
        raise ModelFileError(_listed(f"{index_path}: shards cannot be opened:", problems))
    shards = {name: SafetensorsFile(folder / name) for name in shard_names}
    absent = [f"{name}: not in {shard}" for name, shard in weight_map.items() if name not in shards[shard].names()]
    if absent:
        raise ModelFileError(_listed(f"{index_path}: the index does not fit its shards:", absent))
    return {name: shards[shard] for name, shard in weight_map.items()}


def _equal(files: dict[str, SafetensorsFile], first: str, second: str) -> bool:
    return np.array_equal(files[first].read(first), files[second].read(second))


def _shards(shapes: dict[str, tuple[int, ...]], max_shard_bytes: int) -> list[list[str]]:
    """Names in order, cut before the tensor that would make a shard too large; a tensor is never cut."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        tensor_bytes = 4 * int(np.prod(shape))
        if shards[-1] and size + tensor_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor_bytes
    return shards


def _stored(weights: dict[str, paddle.Tensor], names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    for name in names:
        values = weights[name].astype("float32").numpy()
        yield name, values.T if is_transposed(name) else values


def _numpy_dtype(parameter: paddle.Tensor) -> type:
    return np.float64 if parameter.dtype == paddle.float64 else np.float32


def _write_json(path: Path, content: Mapping[str, object]) -> Path:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return path


def _listed(title: str, problems: list[str]) -> str:
    shown = [f"  {problem}" for problem in problems[:_SHOWN_PROBLEMS]]
    if len(problems) > _SHOWN_PROBLEMS:
        shown.append(f"  ... and {len(problems) - _SHOWN_PROBLEMS} more")
    return "\n".join([title, *shown])
