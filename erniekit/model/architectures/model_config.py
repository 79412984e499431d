"""The shape of a model, read from a Hugging Face `config.json`. Needs neither Paddle nor NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from erniekit.errors import ModelFileError
from erniekit.json_files import read_json_object
from erniekit.model.architectures.architecture import ALWAYS, Architecture, Key
from erniekit.model.architectures.registry import ARCHITECTURES, architecture_of
from erniekit.model.architectures.rope_scaling import rope_scaling_problems
from erniekit.model.storage.model_folder import refuse_sharded_checkpoint

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model of one of the architectures of `registry.py`.

    Field names are the keys of `config.json`, unless the architecture names another key for a field.

    Attributes:
        own: the values of the keys that only this architecture has (`Architecture.own_keys`).
        other_keys: every key that this project does not use, so that a saved model folder loses nothing.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 131072
    rope_theta: float = 500000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    use_bias: bool = False  # ERNIE-4.5: of all linears
    attention_bias: bool = False  # Llama, Qwen3
    mlp_bias: bool = False  # Llama
    tie_word_embeddings: bool = True
    moe_num_experts: int = 0
    moe_k: int = 0
    moe_intermediate_size: int = 0
    moe_num_shared_experts: int = 0
    moe_layer_start_index: int = 0
    moe_layer_end_index: int = -1  # inclusive; -1: the last layer
    moe_layer_interval: int = 1
    moe_norm_min: float = 1e-12
    num_nextn_predict_layers: int = 0
    model_type: str = "ernie4_5"
    own: dict[str, Any] = field(default_factory=dict, hash=False)
    other_keys: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.model_type]

    def has_bias(self, linear: str) -> bool:
        """Return whether the linear with this last part of its name, such as "q_proj", has a bias."""
        key = self.architecture.biases.get(linear)
        return key is not None and (key == ALWAYS or getattr(self, key))

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, has experts in place of its MLP."""
        return self.architecture.has_experts(self, layer)

    @classmethod
    def from_folder(cls, folder: Path | str) -> ModelConfig:
        """Read `folder/config.json`. Raises ModelFileError for a missing, unreadable or inconsistent file."""
        path = Path(folder) / CONFIG_FILE
        if not path.is_file():
            refuse_sharded_checkpoint(folder)
            raise ModelFileError(f"{path}: no such file. A model folder needs a Hugging Face {CONFIG_FILE}.")
        return cls.from_json(read_json_object(path), where=str(path))

    @classmethod
    def from_json(cls, values: dict[str, Any], where: str = CONFIG_FILE) -> ModelConfig:
        """The configuration that the keys of a `config.json` describe; `where` heads the error message.

        Absent keys have the family's defaults; `num_key_value_heads` is num_attention_heads then.
        """
        architecture = architecture_of(values.get("model_type"), where)
        problems: list[str] = []
        known_values = _known_values(architecture, values, problems)
        problems += _unavailable_values(architecture, values)
        if not problems:
            problems = _inconsistencies(architecture, known_values)
        used_keys = {*architecture.own_keys, *_keys_of(architecture).values()}
        other_keys = {key: value for key, value in values.items() if key not in used_keys}
        if not problems:
            config = cls(**known_values, other_keys=other_keys)
            problems = architecture.problems(config)
        if problems:
            raise ModelFileError(f"{where} cannot be used:\n" + "\n".join(f"  {problem}" for problem in problems))
        return config

    def to_json(self) -> dict[str, Any]:
        """Every key of `config.json`, those this project does not use included; weights are float32, not quantised."""
        known = {key: getattr(self, name) for name, key in _keys_of(self.architecture).items()}
        other = {key: value for key, value in self.other_keys.items() if key != "quantization_config"}
        classes = {"architectures": [self.architecture.transformers_class], "torch_dtype": "float32"}
        return {**self.architecture.saved_keys, **other, **known, **self.own, **classes}

    def parameter_count(self) -> int:
        """The number of weights; tied embeddings count once."""
        return sum(math.prod(shape) for shape in self.weight_shapes().values())

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's Hugging Face name and shape (linear weights are [out, in]), in the order of the decoder."""
        return dict(self._weight_shapes)

    @cached_property
    def _weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.architecture.weight_shapes(self)  # a tenth of a second where there are thousands of experts

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """The path of every linear layer between embedding and head, and its (out, in)."""
        return self.architecture.linear_shapes(self)


_MOST_LAYERS = 100_000  # of layers and of experts: their weights are listed one by one
_POSITIVE = 1e-300  # the smallest value that "positive" lets through, for numbers that need not be whole
_KEYS: dict[str, Key] = {
    "vocab_size": Key(int, 1, required=True),
    "hidden_size": Key(int, 1, required=True),
    "intermediate_size": Key(int, 1, required=True),
    "num_hidden_layers": Key(int, 1, required=True, most=_MOST_LAYERS),
    "num_attention_heads": Key(int, 1, required=True),
    "num_key_value_heads": Key(int, 1),
    "head_dim": Key(int, 1),
    "max_position_embeddings": Key(int, 1),
    "rope_theta": Key(float, _POSITIVE),
    "rope_scaling": Key(dict),
    "rms_norm_eps": Key(float, _POSITIVE),
    "initializer_range": Key(float, _POSITIVE),
    "tie_word_embeddings": Key(bool),
    "model_type": Key(str),
}
_OPTIONAL_KEYS: dict[str, Key] = {  # of fields that some architectures have
    "use_bias": Key(bool),
    "attention_bias": Key(bool),
    "mlp_bias": Key(bool),
    "moe_num_experts": Key(int, 1, most=_MOST_LAYERS),
    "moe_k": Key(int, 1),
    "moe_intermediate_size": Key(int, 1),
    "moe_num_shared_experts": Key(int, 0),
    "moe_layer_start_index": Key(int, 0),
    "moe_layer_end_index": Key(int, -1),
    "moe_layer_interval": Key(int, 1),
    "moe_norm_min": Key(float, 0),
    "num_nextn_predict_layers": Key(int, 0, most=_MOST_LAYERS),
}
# Keys of any architecture that would change the computation, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1, 1.0),
}
_STORED_FORMATS = ("pack-quantized", "float-quantized", "nf4")  # of weights in few bits; see model/storage


def _keys_of(architecture: Architecture) -> dict[str, str]:
    """The fields of ModelConfig that an architecture has, and the key of each in `config.json`."""
    names = (*_KEYS, *(name for name in _OPTIONAL_KEYS if name in architecture.own_fields))
    return {name: architecture.key_names.get(name, name) for name in names}


def _known_values(architecture: Architecture, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The fields of ModelConfig among `values`, with their types checked and the defaults filled in."""
    known: dict[str, Any] = dict(architecture.defaults)
    for name, key in _keys_of(architecture).items():
        value = _checked(key, _KEYS.get(name) or _OPTIONAL_KEYS[name], values.get(key), problems)
        if value is not None:
            known[name] = value
    known["own"] = {
        name: None if key.nullable and values.get(name, key) is None else _own_value(name, key, values, problems)
        for name, key in architecture.own_keys.items()
    }
    if not problems:
        heads = known["num_attention_heads"]
        known.setdefault("num_key_value_heads", heads)
        if "head_dim" not in known:
            if architecture.head_dim is None and known["hidden_size"] % heads:
                problems.append(f"hidden_size {known['hidden_size']} is not a multiple of num_attention_heads {heads}")
            known["head_dim"] = architecture.head_dim or known["hidden_size"] // heads
    return known


def _own_value(name: str, key: Key, values: dict[str, Any], problems: list[str]) -> Any:
    value = _checked(name, key, values.get(name), problems)
    return key.default if value is None else value


def _checked(name: str, key: Key, value: Any, problems: list[str]) -> Any:
    """The value of a key, or None where it is absent or added to the problems."""
    if value is None:
        if key.required:
            problems.append(f"{name}: missing")
        return None
    if isinstance(value, int) and value > key.most:
        problems.append(f"{name}: must be at most {key.most:,}, got {str(value)[:20]}")
        return None
    if key.kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, key.kind) or (key.kind is not bool and isinstance(value, bool)):
        problems.append(f"{name}: expected {key.kind.__name__}, got {value!r}")
        return None
    if _is_below(value, key.minimum):
        wanted = "positive" if key.minimum in (1, _POSITIVE) else f"at least {key.minimum:g}"
        problems.append(f"{name}: must be {wanted}, got {value!r}")
        return None
    return value


def _unavailable_values(architecture: Architecture, values: dict[str, Any]) -> list[str]:
    """One line for each key of a `config.json` that asks for a computation which is not available."""
    problems = []
    for key, neutral in {**_NEUTRAL, **architecture.neutral}.items():
        if key not in values:
            continue
        entries = values[key] if isinstance(values[key], list) and values[key] else [values[key]]
        if any(entry not in neutral for entry in entries):
            problems.append(f"{key}: {values[key]!r} is not supported; only {neutral[-1]!r} is")
    quantized = values.get("quantization_config")
    if quantized is not None and (not isinstance(quantized, dict) or quantized.get("format") not in _STORED_FORMATS):
        shown = quantized.get("format") or quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        problems.append(
            f"quantization_config: weights as {shown!r} cannot be read; formats: {', '.join(_STORED_FORMATS)}"
        )
    return problems


def _is_below(value: Any, minimum: float | None) -> bool:
    return minimum is not None and not value >= minimum  # so that not-a-number is refused as well


def _inconsistencies(architecture: Architecture, known: dict[str, Any]) -> list[str]:
    problems = []
    if known["num_attention_heads"] % known["num_key_value_heads"]:
        problems.append(
            f"num_attention_heads {known['num_attention_heads']} is not a multiple of "
            f"num_key_value_heads {known['num_key_value_heads']}"
        )
    if known["head_dim"] % 2:
        problems.append(f"head_dim {known['head_dim']} is odd; rotary position embeddings turn pairs")
    if known.get("moe_k", 0) > known.get("moe_num_experts", 0):
        chosen, experts = (architecture.key_names.get(name, name) for name in ("moe_k", "moe_num_experts"))
        problems.append(f"{chosen} {known['moe_k']} is more than {experts} {known['moe_num_experts']}")
    return problems + rope_scaling_problems(known.get("rope_scaling"))
