"""Exporting a trained model as a folder that others load: Hugging Face's files, written tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.errors import ModelFileError, UserError
from erniekit.model.builder import build_model
from erniekit.model.configuration import CONFIG_FILE, ModelConfig
from erniekit.model.device import use_device
from erniekit.model.precision import STORED_TYPES, to_stored
from erniekit.model.safetensors_file import StoredTensor
from erniekit.model.shards import listed, open_weight_files, weight_files, write_weight_files
from erniekit.parameters import Config
from erniekit.runners.logit_difference import fits_in_memory, logit_difference
from erniekit.runners.model_card import MODEL_CARD_FILE, model_card
from erniekit.runners.publish import check_target, publish
from erniekit.runners.trained_model import TrainedModel, find_trained_model
from erniekit.runners.wiring import Say, model_folder

GENERATION_CONFIG_FILE = "generation_config.json"
_PIECE = 1 << 20  # values that are rounded at once
_TYPE_NAMES = {stored: name for name, stored in STORED_TYPES.items()}


def export_model(named: Path, target: Path, config: Config, *, dtype: str | None = None, say: Say = print) -> None:
    """Write the trained model that `named` means to the folder `target`, in the form that `transformers` loads.

    Weights stream from the trained files to the new ones, so that a tensor at a time is in memory. Afterwards the
    model is loaded from both, one after the other, to measure how far their logits are apart.

    Args:
        named: a configuration file of a run, its `output_dir`, or a checkpoint; full weights or adapters.
        dtype: "float32", "bfloat16" or "float16"; None for the type that the base model is stored in.

    Raises:
        UserError: there is no complete model, the target is not empty, or a file is damaged.
    """
    for line in config.messages:
        say(line)
    use_device(config.basic.device)
    model = find_trained_model(named, config)
    base = _base_folder(model)
    sources = [folder for folder in (model.folder, base) if folder]
    check_target(target, sources, overwrite=config.basic.overwrite_output_dir)
    weights = open_trained_weights(model, base)
    reference, reference_types = _reference_types(model, base)
    types = stored_types(list(weights.shapes), reference_types, dtype)
    chosen = Counter(types.values()).most_common(1)[0][0]
    say(
        f"dtype: {_TYPE_NAMES[chosen]}, "
        + ("as asked for" if dtype else f"as {reference} is stored; --dtype chooses another")
    )
    tokenizer = load_tokenizer(model.folder)
    limit = int(config.checkpoint.max_shard_size * 10**9)

    def write(folder: Path) -> None:
        written = write_weights(folder, weights, types, limit)
        size = sum(path.stat().st_size for path in written)
        say(f"weights: {len(types):,} tensors, {size / 1e9:.3g} GB, files: {len(written)}")
        _write_json(folder / CONFIG_FILE, {**weights.config.to_json(), "torch_dtype": _TYPE_NAMES[chosen]})
        _write_json(folder / GENERATION_CONFIG_FILE, _generation_config(model.folder, weights.config))
        for source in tokenizer.files:
            shutil.copyfile(source, folder / source.name)
        difference = _measure(model, weights.config, folder, tokenizer)
        say(f"logits beside the trained model's: {difference}")
        (folder / MODEL_CARD_FILE).write_text(
            model_card(
                name=target.resolve().name,
                base=_base_name(model),
                base_folder=base,
                is_adapter_merged=model.base is not None,
                parameters=model.parameters,
                results=model.results,
                facts={**_facts(weights.config, types), "logits beside the trained model's": difference},
            ),
            encoding="utf-8",
        )

    publish(target, write)
    say(f"{target}: complete")


@dataclass(frozen=True)
class TrainedWeights:
    """Trained weights on disk.

    Attributes:
        config: the model's shape.
        shapes: every tensor's Hugging Face name and shape.
        read: yields every tensor in that order, float32, linears as [out, in].
    """

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[], Iterator[tuple[str, np.ndarray]]]


def open_trained_weights(model: TrainedModel, base: Path | None) -> TrainedWeights:
    """The weights of a trained model, adapters merged; nothing but headers is read yet.

    Raises:
        ModelFileError: files are missing or damaged, or do not fit `config.json`.
    """
    if model.base is not None:
        raise ModelFileError(f"{model.folder}: merging adapters is not available yet")
    config = ModelConfig.from_folder(model.folder)
    files, shapes = open_weight_files(model.folder), config.weight_shapes()
    problems = [f"{name}: missing" for name in shapes if name not in files]
    problems += [
        f"{name}: shape {list(files[name].shape(name))}, expected {list(shape)}"
        for name, shape in shapes.items()
        if name in files and files[name].shape(name) != shape
    ]
    if problems:
        raise ModelFileError(listed(f"{model.folder}: the weights do not fit {CONFIG_FILE}:", problems))
    return TrainedWeights(config, shapes, lambda: ((name, files[name].read(name)) for name in shapes))


def stored_types(names: Sequence[str], reference: Mapping[str, str], dtype: str | None) -> dict[str, str]:
    """The type each tensor is written in, as safetensors names it.

    Args:
        reference: the types in which the base model stores its tensors.
        dtype: what the user asks for; None: each tensor as its base has it, new ones as most of the base.
    """
    known = {name: stored for name, stored in reference.items() if stored in _TYPE_NAMES}
    most = Counter(known.values()).most_common(1)
    usual = STORED_TYPES[dtype] if dtype else most[0][0] if most else "F32"
    return {name: "F32" if _is_router(name) else usual if dtype else known.get(name, usual) for name in names}


def write_weights(folder: Path, weights: TrainedWeights, types: Mapping[str, str], max_shard_bytes: int) -> list[Path]:
    """Round every tensor once to its type and write it; a tensor at a time is in memory."""
    tensors = {name: StoredTensor(types[name], shape) for name, shape in weights.shapes.items()}
    contents = ((name, _rounded(name, values, types[name])) for name, values in weights.read())
    return write_weight_files(folder, tensors, contents, max_shard_bytes, {"format": "pt"})


def _rounded(name: str, values: np.ndarray, stored: str) -> Iterator[memoryview]:
    """A tensor's bytes, piece by piece, for rounding takes room beside the values."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, _PIECE):
        yield to_stored(name, flat[start : start + _PIECE], stored).data


def _is_router(name: str) -> bool:
    """Routers decide by small differences between their scores, so `transformers` keeps them in float32, too."""
    return not {"gate", "moe_statics"}.isdisjoint(name.split("."))


def _base_folder(model: TrainedModel) -> Path | None:
    """The folder of the model that was trained, where it is still there; of adapters it must be."""
    name = _base_name(model)
    if not name:
        return None
    try:
        return model_folder(Config.from_mapping({"model_name_or_path": name}, verb="export"))
    except UserError:
        if model.base is not None:
            raise
        return None


def _base_name(model: TrainedModel) -> str:
    return model.base or str(model.parameters.get("model_name_or_path") or "")


def _reference_types(model: TrainedModel, base: Path | None) -> tuple[Path, dict[str, str]]:
    """The base and the types in which it stores its tensors, or, where it has none, the same of the trained model."""
    for folder in filter(None, (base, model.folder)):
        if any(weight_files(folder)):
            return folder, {name: file.stored(name).dtype for name, file in open_weight_files(folder).items()}
    return model.folder, {}


def _generation_config(folder: Path, config: ModelConfig) -> dict[str, Any]:
    path = folder / GENERATION_CONFIG_FILE
    own = config.to_json()
    ids: dict[str, Any] = {name: own[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in own}
    if not path.is_file():
        return ids
    try:
        return {**ids, **json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        raise ModelFileError(f"{path}: cannot be read as a JSON object: {error}") from None


def _measure(model: TrainedModel, config: ModelConfig, exported: Path, tokenizer: Tokenizer) -> str:
    """How far the model in the files just written is from the trained one, in words."""
    if not fits_in_memory(config):
        return f"not measured: {4e-9 * config.parameter_count():.3g} GB of float32 weights do not fit into memory"
    return str(
        logit_difference(
            lambda: build_model(config, model.folder),
            lambda: build_model(ModelConfig.from_folder(exported), exported),
            tokenizer,
        )
    )


def _facts(config: ModelConfig, types: Mapping[str, str]) -> dict[str, str]:
    counts = Counter(_TYPE_NAMES[stored] for stored in types.values())
    return {
        "model type": config.model_type,
        "parameters": f"{config.parameter_count():,}",
        "stored as": ", ".join(f"{name} ({count:,} tensors)" for name, count in counts.most_common()),
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
