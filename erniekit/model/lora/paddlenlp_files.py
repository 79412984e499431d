"""Read adapters that paddlenlp 3 wrote: `lora_config.json`, and factors in Paddle's layout. Needs no Paddle.

A factor is named after the layer in paddlenlp's model, which begins with the family
(`llama.layers.0.self_attn.q_proj.lora_A`); shapes are [in, r] and [r, out], as here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.errors import ModelFileError
from erniekit.json_files import read_json_object
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.folder import ADAPTER_CONFIG_FILE, PADDLENLP_CONFIG_FILE
from erniekit.model.lora.init import Factors
from erniekit.model.storage.safetensors import SafetensorsFile, check_finite
from erniekit.model.storage.shards import format_problems

WEIGHTS_FILE = "peft_model.safetensors"
_PICKLED = "lora_model_state.pdparams"
_SHARDS = "peft_model*.safetensors"
_INDEX_FILE = "peft_model.safetensors.index.json"
# Settings that give the factors another meaning than scaling * x A B.
_CHANGE_THE_COMPUTATION = (
    "do_qat", "enable_lora_list", "lora_use_mixer", "loraga", "pissa", "trainable_bias", "trainable_modules",
    "use_mora",
)  # fmt: skip


def is_paddlenlp_folder(folder: Path) -> bool:
    """Return whether the adapters in `folder` are in paddlenlp's format and not in PEFT's."""
    return (folder / PADDLENLP_CONFIG_FILE).is_file() and not (folder / ADAPTER_CONFIG_FILE).is_file()


def read_paddlenlp(folder: Path, linears: Mapping[str, tuple[int, int]]) -> tuple[LoraSettings, dict[str, Factors]]:
    """Return the settings, and the factors of every adapted layer.

    Args:
        linears: path -> (out, in) of every linear layer of the base model.

    Raises:
        ModelFileError: a file is missing, damaged or pickled, or the adapters do not fit the model.
    """
    values = read_json_object(folder / PADDLENLP_CONFIG_FILE)
    settings = _settings(values, folder / PADDLENLP_CONFIG_FILE)
    stored = {_own_name(name): (name, file) for file in _open(folder) for name in file.names()}
    targets = [path for path in linears if f"{path}.lora_A" in stored or f"{path}.lora_B" in stored]
    expected = {}
    for path in targets:
        outputs, inputs = linears[path]
        expected[f"{path}.lora_A"], expected[f"{path}.lora_B"] = (inputs, settings.rank), (settings.rank, outputs)
    problems = [f"{name}: missing" for name in expected if name not in stored]
    for own, (name, file) in stored.items():
        if own not in expected:
            problems.append(f"{name}: the base model has no such linear layer between embedding and head")
        elif file.shape(name) != expected[own]:
            problems.append(f"{name}: shape {list(file.shape(name))}, expected {list(expected[own])}")
        elif not file.stored(name).is_float:
            problems.append(f"{name}: holds {file.stored(name).dtype}, which are not the floats of an adapter")
    if problems:
        raise ModelFileError(format_problems(f"{folder}: the adapters do not fit the base model:", problems))

    def read(own: str) -> np.ndarray:
        name, file = stored[own]
        values = file.read(name)
        check_finite(values, name, file.path)
        return np.ascontiguousarray(values, np.float32)

    factors = {path: Factors(read(f"{path}.lora_A"), read(f"{path}.lora_B")) for path in targets}
    settings = LoraSettings(settings.rank, settings.alpha, settings.rslora, target_modules=tuple(targets))
    return settings, factors


def _settings(values: Mapping[str, Any], path: Path) -> LoraSettings:
    problems = [f"{key}: {values[key]!r} is not available" for key in _CHANGE_THE_COMPUTATION if values.get(key)]
    if values.get("tensor_parallel_degree") not in (None, -1, 0, 1):
        problems.append("tensor_parallel_degree: the factors are sharded; save them with merge_tensor_parallel")
    rank, alpha = values.get("r"), values.get("lora_alpha")
    for key, value, types in (("r", rank, int), ("lora_alpha", alpha, (int, float))):
        if isinstance(value, bool) or not isinstance(value, types) or not 0 < value < 1e30:
            problems.append(f"{key}: expected a positive number, got {value!r}")
    if problems:
        raise ModelFileError(f"{path}: these adapters cannot be used:\n" + "\n".join(f"  {line}" for line in problems))
    assert rank is not None and alpha is not None
    return LoraSettings(int(rank), float(alpha), bool(values.get("rslora")))


def _open(folder: Path) -> list[SafetensorsFile]:
    paths = sorted(folder.glob(_SHARDS))
    if (folder / _INDEX_FILE).is_file():
        weight_map = read_json_object(folder / _INDEX_FILE).get("weight_map")
        listed_files = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        missing = sorted(str(name) for name in listed_files - {path.name for path in paths})
        if missing:
            raise ModelFileError(format_problems(f"{folder / _INDEX_FILE}: shards are missing:", missing))
    if paths:
        return [SafetensorsFile(path) for path in paths]
    pickled = sorted(folder.glob("*.pdparams"))
    if pickled:
        raise ModelFileError(
            f"{pickled[0]} is a pickled file, and reading it can run any program; only safetensors are read "
            f"here.\n  If you trust it, convert it:\n  {conversion_command(pickled[0], folder / WEIGHTS_FILE)}"
        )
    raise ModelFileError(f"{folder}: contains neither {WEIGHTS_FILE} nor shards of it")


def conversion_command(pickled: Path, target: Path) -> str:
    """Return the command that converts paddlenlp's pickled adapters into a safetensors file.

    It is shown to users, who decide whether they trust the file; ERNIEKit never runs it.
    """
    program = (
        f"import paddle; from safetensors.numpy import save_file; state = paddle.load({str(pickled)!r}); "
        f"save_file({{name: value.astype('float32').numpy() for name, value in state.items()}}, {str(target)!r})"
    )
    return f"python -c {shlex.quote(program)}"


def _own_name(name: str) -> str:
    """Translate `llama.layers.0.mlp.up_proj.lora_A` to `model.layers.0.mlp.up_proj.lora_A`."""
    rest = name.partition(".")[2]
    return f"model.{rest}" if rest.startswith("layers.") else name
