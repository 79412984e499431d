"""Read and write adapters in PEFT's format, checked against the model. Needs no Paddle.

PEFT names the factors of a linear layer `base_model.model.<path>.lora_A.weight` [r, in] and `.lora_B.weight` [out, r],
and DoRA's column norms `.lora_magnitude_vector` [out]. Adapters that started from PiSSA are stored as the difference
from their start, [A; A0] and [B, -B0] of rank 2r, so that they fit the original base model in every program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from erniekit.errors import ModelFileError
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.scores import SCORE
from erniekit.model.lora.config import PISSA, LoraSettings, adaptable_linears
from erniekit.model.lora.folder import ADAPTER_CONFIG_FILE, peft_config, settings_from_peft
from erniekit.model.lora.init import Factors, merged_weight, principal_factors
from erniekit.model.lora.new_row_files import (
    is_row_tensor,
    merge_rows,
    peft_row_tensors,
    read_new_rows,
)
from erniekit.model.lora.paddlenlp_files import is_paddlenlp_folder, read_paddlenlp
from erniekit.model.lora.score import MODULES_KEY, STORED_SCORE, read_score
from erniekit.model.lora.trainable_tokens import peft_token_ids
from erniekit.model.storage.safetensors import SafetensorsFile, check_finite, write_safetensors
from erniekit.model.storage.shards import format_problems

ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_PREFIX = "base_model.model."
_METADATA = "erniekit"  # the key of our entry in the file's metadata, which PEFT ignores


@dataclass(frozen=True)
class StoredAdapters:
    """The adapters of a folder.

    Attributes:
        settings: `target_modules` are full paths.
        factors: by the path of the linear layer. For PiSSA as PEFT saves it, `start` has still to be computed.
        base_fingerprint: of the weights they were trained on (`fingerprint.weights_fingerprint`); "" if it is unknown.
        new_rows: of new tokens, [n, H], by the name of the weight that they belong to.
        first_new: the id of the first of these tokens.
        score: of a reward model, [1, H]; None: the model predicts tokens.
    """

    settings: LoraSettings
    factors: Mapping[str, Factors]
    base_fingerprint: str = ""
    new_rows: Mapping[str, np.ndarray] = field(default_factory=dict)
    first_new: int = 0
    score: np.ndarray | None = None

    def complete(self, path: str, weight: np.ndarray) -> Factors:
        """Return the complete factors of one layer, whose weight in the base model is `weight` [in, out]."""
        factors = self.factors[path]
        if self.settings.init != PISSA or factors.start is not None:
            return factors
        scaling, rank = self.settings.scaling_of(path), self.settings.rank_of(path)
        return factors._replace(start=principal_factors(path, weight, rank, scaling).start)

    def merge(self, name: str, values: np.ndarray) -> np.ndarray:
        """Merge the adapter of a weight, if it has one, or its rows of new tokens into the base model's values.

        Args:
            name: Hugging Face name of the weight.
            values: in Hugging Face's layout, [out, in] for linear layers.

        Returns:
            float32 if there is an adapter, otherwise `values` themselves.
        """
        if name == SCORE and self.score is not None:
            return self.score
        if name in self.new_rows:
            return merge_rows(values, self.new_rows[name], self.first_new)
        path = name.removesuffix(".weight")
        if path == name or path not in self.factors:
            return values
        weight = values.astype(np.float32, copy=False).T
        merged = merged_weight(weight, self.complete(path, weight), self.settings.scaling_of(path))
        return np.ascontiguousarray(merged.T)


def read_adapters(folder: Path | str, model_config: ModelConfig) -> StoredAdapters:
    """Read the adapters that PEFT, paddlenlp or this project wrote into `folder`, for a model of this configuration.

    Multi-token prediction layers of the model may lack adapters, because a run may leave these layers out, as
    transformers does. Adapters of such layers that the model lacks are ignored.

    Raises:
        ModelFileError: a file is missing or damaged, the adapters need a computation that is not available here,
            their new tokens are not those of the model, or tensors are missing, unknown or of another shape than the
            model and the configuration imply (all are listed).
    """
    folder = Path(folder)
    linears, is_mtp_weight = adaptable_linears(model_config), model_config.architecture.is_mtp_weight
    if is_paddlenlp_folder(folder):
        return StoredAdapters(*read_paddlenlp(folder, linears))
    settings = settings_from_peft(folder, list(linears), scored=model_config.scored)
    file = _open(folder)
    score = read_score(file, model_config)
    settings = _without_missing_mtp(settings, file, is_mtp_weight)
    new_rows = read_new_rows(folder, file, model_config)
    first_new = model_config.vocabulary.first if model_config.vocabulary else 0
    rest = [name for name in file.names() if not (new_rows and is_row_tensor(name))]
    if score is not None:
        rest.remove(STORED_SCORE)
    factors = _read_factors(file, rest, folder, settings, linears, is_mtp_weight)
    own = _own_metadata(file)
    if own is None:
        return StoredAdapters(settings, factors, new_rows=new_rows, first_new=first_new, score=score)
    stored, fingerprint = replace(own[0], target_modules=settings.target_modules), own[1]
    growth = 2 if stored.init == PISSA else 1
    if any(settings.rank_of(path) != growth * stored.rank_of(path) for path in settings.target_modules):
        raise ModelFileError(
            f"{file.path}: the metadata {_METADATA!r} names other ranks than {folder / ADAPTER_CONFIG_FILE}; "
            "one of the two files belongs to other adapters"
        )
    if stored.init == PISSA:
        factors = {path: _split_start(each) for path, each in factors.items()}
    return StoredAdapters(stored, factors, fingerprint, new_rows, first_new, score)


def write_adapters(
    folder: Path | str, adapters: StoredAdapters, model_config: ModelConfig, base_model: str
) -> list[Path]:
    """Write `adapter_config.json` and `adapter_model.safetensors` (float32) in PEFT's format.

    Args:
        base_model: the folder or the hub id of the base model.

    Returns:
        The files written.
    """
    folder, settings = Path(folder), adapters.settings
    folder.mkdir(parents=True, exist_ok=True)
    factor = 2 if settings.init == PISSA else 1
    towers = tuple(tower.prefix for tower in model_config.architecture.towers)
    linears = list(adaptable_linears(model_config))
    token_ids = peft_token_ids(model_config) if adapters.new_rows else None
    config = peft_config(settings, list(adapters.factors), linears, base_model, factor, towers, token_ids)
    if model_config.architecture.codes is not None:
        config["task_type"] = None  # PEFT would ask for the methods of a model that generates text
    if adapters.score is not None:
        config |= {"task_type": "SEQ_CLS", MODULES_KEY: ["score"]}
    config_path = folder / ADAPTER_CONFIG_FILE
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tensors = {
        name: values for path, factors in adapters.factors.items() for name, values in _peft_tensors(path, factors)
    }
    tensors |= peft_row_tensors(adapters.new_rows)
    if adapters.score is not None:
        tensors[STORED_SCORE] = adapters.score
    own = {"settings": replace(settings, target_modules=()).to_json(), "base_fingerprint": adapters.base_fingerprint}
    metadata = {"format": "pt", _METADATA: json.dumps(own)}
    weights_path = folder / ADAPTER_WEIGHTS_FILE
    shapes = {name: values.shape for name, values in tensors.items()}
    dtype = np.result_type(*(values.dtype for values in tensors.values()))  # float64 in tests that compare layouts
    write_safetensors(weights_path, shapes, tensors.items(), metadata, dtype)
    return [config_path, weights_path]


def _open(folder: Path) -> SafetensorsFile:
    path = folder / ADAPTER_WEIGHTS_FILE
    if not path.is_file() and (folder / _PICKLED).is_file():
        raise ModelFileError(
            f"{folder / _PICKLED} is a pickled file, and reading it can run any program; only "
            f"{ADAPTER_WEIGHTS_FILE} is read here.\n  If you trust it, let PEFT convert it, with its base model: "
            f"PeftModel.from_pretrained(base, {str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    return SafetensorsFile(path)


def _without_missing_mtp(
    settings: LoraSettings, file: SafetensorsFile, is_mtp_weight: Callable[[str], bool]
) -> LoraSettings:
    stored = {_own_name(name).rpartition(".")[0] for name in file.names()}
    targets = tuple(path for path in settings.target_modules if path in stored or not is_mtp_weight(f"{path}.weight"))
    return replace(settings, target_modules=targets)


def _read_factors(
    file: SafetensorsFile,
    stored_names: Sequence[str],
    folder: Path,
    settings: LoraSettings,
    linears: Mapping[str, tuple[int, int]],
    is_mtp_weight: Callable[[str], bool],
) -> dict[str, Factors]:
    names = {_own_name(name): name for name in stored_names}
    expected = expected_shapes(settings, linears)
    problems = [] if expected else ["target_modules names no linear layer of the model"]
    problems += [f"{name}: missing" for name in expected if name not in names]
    for own, stored in names.items():
        if own not in expected:
            if not is_mtp_weight(own) or own.rpartition(".")[0] in linears:
                problems.append(f"{stored}: {_why_unknown(own, linears)}")
        elif file.shape(stored) != expected[own]:
            problems.append(f"{stored}: shape {list(file.shape(stored))}, expected {list(expected[own])}")
        elif not file.stored(stored).is_float:
            problems.append(f"{stored}: holds {file.stored(stored).dtype}, which are not the floats of an adapter")
    if problems:
        title = f"{file.path}: the adapters do not fit {folder / ADAPTER_CONFIG_FILE} and the base model:"
        raise ModelFileError(format_problems(title, problems))

    def read(name: str) -> np.ndarray:
        values = file.read(names[name])
        check_finite(values, names[name], file.path)
        return np.ascontiguousarray(values.T, np.float32)

    return {
        path: Factors(
            read(f"{path}.lora_A"),
            read(f"{path}.lora_B"),
            read(f"{path}.lora_magnitude_vector") if settings.dora else None,
        )
        for path in settings.target_modules
    }


def expected_shapes(settings: LoraSettings, linears: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    """Return the names `<path>.lora_A`, ... of every target, with the shapes that PEFT stores."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in settings.target_modules:
        (outputs, inputs), rank = linears[path], settings.rank_of(path)
        shapes[f"{path}.lora_A"], shapes[f"{path}.lora_B"] = (rank, inputs), (outputs, rank)
        if settings.dora:
            shapes[f"{path}.lora_magnitude_vector"] = (outputs,)
    return shapes


def _own_name(name: str) -> str:
    return name.removeprefix(_PREFIX).removesuffix(".weight")


def _why_unknown(own: str, linears: Mapping[str, tuple[int, int]]) -> str:
    path, _, kind = own.rpartition(".")
    if kind not in ("lora_A", "lora_B", "lora_magnitude_vector"):
        return "not an adapter of a linear layer"
    if path in linears:
        return f"{ADAPTER_CONFIG_FILE} does not name this layer"
    return "the base model has no such linear layer between embedding and head"


def _peft_tensors(path: str, factors: Factors) -> Sequence[tuple[str, np.ndarray]]:
    a, b = factors.A, factors.B
    if factors.start is not None:
        a, b = np.concatenate([a, factors.start[0]], axis=1), np.concatenate([b, -factors.start[1]], axis=0)
    tensors = [(f"{_PREFIX}{path}.lora_A.weight", a.T), (f"{_PREFIX}{path}.lora_B.weight", b.T)]
    if factors.magnitude is not None:
        tensors.append((f"{_PREFIX}{path}.lora_magnitude_vector", factors.magnitude))
    return tensors


def _split_start(factors: Factors) -> Factors:
    """Undo `_peft_tensors` for adapters that started from PiSSA."""
    (a, a0), (b, b0) = np.split(factors.A, 2, axis=1), np.split(factors.B, 2, axis=0)
    contiguous = np.ascontiguousarray
    return factors._replace(A=contiguous(a), B=contiguous(b), start=(contiguous(a0), -b0))


def _own_metadata(file: SafetensorsFile) -> tuple[LoraSettings, str] | None:
    """Return the settings and the base's fingerprint that this project stores; None for a file of another program."""
    text = file.metadata.get(_METADATA)
    if text is None:
        return None
    try:
        own = json.loads(text)
        return LoraSettings.from_json(own["settings"]), str(own["base_fingerprint"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFileError(f"{file.path}: the metadata {_METADATA!r} cannot be read ({error!r})") from None
