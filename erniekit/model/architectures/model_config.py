"""The shape of a model, read from a Hugging Face `config.json`. Needs neither Paddle nor NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from erniekit.errors import ModelFileError
from erniekit.json_files import read_json_object
from erniekit.model.architectures.families import ALWAYS, FAMILIES, Family, family_of, unavailable_values
from erniekit.model.architectures.rope_scaling import rope_scaling_problems
from erniekit.model.architectures.weights import weight_shapes
from erniekit.model.storage.model_folder import refuse_sharded_checkpoint

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of one of the families of `families.py`. Field names are those of `config.json`.

    `other_keys` holds every key this project does not use, so that a saved model folder loses nothing.
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
    other_keys: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    def has_bias(self, linear: str) -> bool:
        """Whether the linear with this last part of its name, such as "q_proj", has a bias."""
        key = self.family.biases.get(linear)
        return key is not None and (key == ALWAYS or getattr(self, key))

    def is_moe_layer(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has experts in place of its MLP."""
        last = self.num_hidden_layers - 1 if self.moe_layer_end_index == -1 else self.moe_layer_end_index
        in_range = self.moe_layer_start_index <= layer <= last
        return self.moe_num_experts > 0 and in_range and (layer + 1) % self.moe_layer_interval == 0

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
        family = family_of(values.get("model_type"), where)
        problems: list[str] = []
        known_values = _known_values(family, values, problems)
        problems += unavailable_values(family, values)
        if not problems:
            problems = _inconsistencies(known_values)
        if problems:
            raise ModelFileError(f"{where} cannot be used:\n" + "\n".join(f"  {problem}" for problem in problems))
        other_keys = {key: value for key, value in values.items() if key not in _fields_of(family)}
        return cls(**known_values, other_keys=other_keys)

    def to_json(self) -> dict[str, Any]:
        """Every key of `config.json`, those this project does not use included; weights are float32, not quantised."""
        own = {name: getattr(self, name) for name in _fields_of(self.family)}
        defaults = {"hidden_act": "silu"}
        other = {key: value for key, value in self.other_keys.items() if key != "quantization_config"}
        architectures = [self.family.architecture]
        return {**defaults, **other, **own, "architectures": architectures, "torch_dtype": "float32"}

    def parameter_count(self) -> int:
        """The number of weights; tied embeddings count once."""
        return sum(math.prod(shape) for shape in self.weight_shapes().values())

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's Hugging Face name and shape (linear weights are [out, in]), in the order of the decoder."""
        return weight_shapes(self)


class _Key(NamedTuple):
    """What is asked of a key's value. `minimum` is None where any value of the type will do; `most` is for integers."""

    kind: type
    minimum: float | None = None
    required: bool = False
    most: int = 2**31 - 1  # Paddle's sizes are int32


_MOST_LAYERS = 100_000  # of layers and of experts: their weights are listed one by one
_POSITIVE = 1e-300  # the smallest value that "positive" lets through, for numbers that need not be whole
_KEYS: dict[str, _Key] = {
    "vocab_size": _Key(int, 1, required=True),
    "hidden_size": _Key(int, 1, required=True),
    "intermediate_size": _Key(int, 1, required=True),
    "num_hidden_layers": _Key(int, 1, required=True, most=_MOST_LAYERS),
    "num_attention_heads": _Key(int, 1, required=True),
    "num_key_value_heads": _Key(int, 1),
    "head_dim": _Key(int, 1),
    "max_position_embeddings": _Key(int, 1),
    "rope_theta": _Key(float, _POSITIVE),
    "rope_scaling": _Key(dict),
    "rms_norm_eps": _Key(float, _POSITIVE),
    "initializer_range": _Key(float, _POSITIVE),
    "tie_word_embeddings": _Key(bool),
    "model_type": _Key(str),
    "use_bias": _Key(bool),
    "attention_bias": _Key(bool),
    "mlp_bias": _Key(bool),
    "moe_num_experts": _Key(int, 1, most=_MOST_LAYERS),
    "moe_k": _Key(int, 1),
    "moe_intermediate_size": _Key(int, 1),
    "moe_num_shared_experts": _Key(int, 0),
    "moe_layer_start_index": _Key(int, 0),
    "moe_layer_end_index": _Key(int, -1),
    "moe_layer_interval": _Key(int, 1),
    "moe_norm_min": _Key(float, 0),
    "num_nextn_predict_layers": _Key(int, 0, most=_MOST_LAYERS),
}
_FAMILY_FIELDS = {name for family in FAMILIES.values() for name in family.own_fields}


def _fields_of(family: Family) -> list[str]:
    return [name for name in _KEYS if name not in _FAMILY_FIELDS or name in family.own_fields]


def _known_values(family: Family, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The fields of ModelConfig among `values`, with their types checked and the defaults filled in."""
    known: dict[str, Any] = dict(family.defaults)
    for name in _fields_of(family):
        key = _KEYS[name]
        value: Any = values.get(name)
        if value is None:
            if key.required:
                problems.append(f"{name}: missing")
            continue
        if isinstance(value, int) and value > key.most:
            problems.append(f"{name}: must be at most {key.most:,}, got {str(value)[:20]}")
            continue
        if key.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, key.kind) or (key.kind is not bool and isinstance(value, bool)):
            problems.append(f"{name}: expected {key.kind.__name__}, got {value!r}")
        elif _is_below(value, key.minimum):
            wanted = "positive" if key.minimum in (1, _POSITIVE) else f"at least {key.minimum:g}"
            problems.append(f"{name}: must be {wanted}, got {value!r}")
        else:
            known[name] = value
    if not problems:
        heads = known["num_attention_heads"]
        known.setdefault("num_key_value_heads", heads)
        if "head_dim" not in known:
            if family.head_dim is None and known["hidden_size"] % heads:
                problems.append(f"hidden_size {known['hidden_size']} is not a multiple of num_attention_heads {heads}")
            known["head_dim"] = family.head_dim or known["hidden_size"] // heads
    return known


def _is_below(value: Any, minimum: float | None) -> bool:
    return minimum is not None and not value >= minimum  # so that not-a-number is refused as well


def _inconsistencies(known: dict[str, Any]) -> list[str]:
    problems = []
    if known["num_attention_heads"] % known["num_key_value_heads"]:
        problems.append(
            f"num_attention_heads {known['num_attention_heads']} is not a multiple of "
            f"num_key_value_heads {known['num_key_value_heads']}"
        )
    if known["head_dim"] % 2:
        problems.append(f"head_dim {known['head_dim']} is odd; rotary position embeddings turn pairs")
    if known.get("moe_k", 0) > known.get("moe_num_experts", 0):
        problems.append(f"moe_k {known['moe_k']} is more than moe_num_experts {known['moe_num_experts']}")
    return problems + rope_scaling_problems(known.get("rope_scaling"))
