"""The shape of a model, read from a Hugging Face `config.json`. Needs neither Paddle nor NumPy."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from erniekit.errors import ModelFileError
from erniekit.json_files import read_json_object
from erniekit.model.architectures.architecture import ALWAYS, Architecture, Key
from erniekit.model.architectures.config_keys import key_problems, key_remarks, shown
from erniekit.model.architectures.registry import ARCHITECTURES, architecture_of
from erniekit.model.architectures.rope_parameters import ROPE_PARAMETERS, rope_parameters, with_keys_before_5
from erniekit.model.architectures.rope_scaling import rope_scaling_problems, yarn_remark
from erniekit.model.processor_files import check_processor_files
from erniekit.model.storage.model_folder import refuse_sharded_checkpoint

CONFIG_FILE = "config.json"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model of one of the architectures of `registry.py`.

    Field names are the keys of `config.json`, unless the architecture names another key for a field.

    Attributes:
        own: the values of the keys that only this architecture has (`Architecture.own_keys`).
        other_keys: every key that this project does not use, so that a saved model folder loses nothing.
        remarks: lines for the user on what the file says and does not act here.
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
    remarks: tuple[str, ...] = field(default=(), compare=False, repr=False)

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
    def from_folder(cls, folder: Path | str, ignored_keys: Sequence[str] = ()) -> ModelConfig:
        """Read `folder/config.json`, and log what it says that does not act here, once.

        Args:
            ignored_keys: see `from_json`.

        Raises:
            ModelFileError: the file is missing, unreadable or inconsistent, or has a key that is not understood.
        """
        path = Path(folder) / CONFIG_FILE
        if not path.is_file():
            refuse_sharded_checkpoint(folder)
            raise ModelFileError(f"{path}: no such file. A model folder needs a Hugging Face {CONFIG_FILE}.")
        config = cls.from_json(read_json_object(path), where=str(path), ignored_keys=ignored_keys)
        for remark in config.remarks:
            _warn_once(f"{path}: {remark}")
        if config.architecture.audio is not None:
            check_processor_files(Path(folder), config.architecture.audio(config))
        return config

    @classmethod
    def from_json(
        cls, values: dict[str, Any], where: str = CONFIG_FILE, ignored_keys: Sequence[str] = ()
    ) -> ModelConfig:
        """The configuration that the keys of a `config.json` describe, as transformers 4 or 5 writes them.

        Absent keys have the family's defaults; `num_key_value_heads` is num_attention_heads then.

        Args:
            where: heads the error message.
            ignored_keys: keys that are not understood here, and of which the user says that they change nothing.

        Raises:
            ModelFileError: a value cannot be used, values contradict each other, or a key is not understood.
        """
        architecture = architecture_of(values.get("model_type"), where)
        problems: list[str] = []
        kept = {key: value for key, value in values.items() if key not in ignored_keys}
        plain = with_keys_before_5(kept, architecture.rope_sets, problems)
        _replace_aliases(architecture, plain, problems)
        known_values = _known_values(architecture, plain, problems)
        used_keys = {*architecture.own_keys, *_keys_of(architecture).values()}
        understood = {*used_keys, *architecture.aliases, ROPE_PARAMETERS}
        problems += key_problems(architecture, plain, understood, ignored_keys)
        if not problems:
            problems = _inconsistencies(architecture, known_values)
            problems += rope_scaling_problems(known_values.get("rope_scaling"), _scaling_key(values))
        other_keys = {key: value for key, value in plain.items() if key not in used_keys}
        if not problems:
            remarks = key_remarks(values, ignored_keys)
            config = cls(**known_values, other_keys=other_keys)
            remarks += filter(None, [yarn_remark(config.rope_scaling, config.max_position_embeddings)])
            config = replace(config, remarks=tuple(remarks))
            problems = architecture.problems(config)
        if problems:
            raise ModelFileError(f"{where} cannot be used:\n" + "\n".join(f"  {problem}" for problem in problems))
        return config

    def to_json(self) -> dict[str, Any]:
        """Every key of `config.json`, those this project does not use included; weights are float32, not quantised.

        Keys that transformers 5 renamed are written under both names, so that it and transformers 4 read the same.
        """
        architecture = self.architecture
        known = {key: getattr(self, name) for name, key in _keys_of(architecture).items()}
        other = {key: value for key, value in self.other_keys.items() if key != "quantization_config"}
        values = {**architecture.saved_keys, **other, **known, **self.own}
        return {
            **values,
            **{alias: values[key] for alias, key in architecture.aliases.items()},
            ROPE_PARAMETERS: rope_parameters(values, architecture.rope_sets),
            "architectures": [architecture.transformers_class],
            **stored_type("float32"),
        }

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
        return dict(self._linear_shapes)

    @cached_property
    def _linear_shapes(self) -> dict[str, tuple[int, int]]:
        return self.architecture.linear_shapes(self)


def stored_type(name: str) -> dict[str, str]:
    """Return the keys of `config.json` that say the type of the stored weights, such as "bfloat16"."""
    return {"torch_dtype": name, "dtype": name}  # of transformers 4 and 5


@lru_cache(maxsize=256)
def _warn_once(line: str) -> None:
    logger.warning(line)  # a run reads the file of its model several times


_MOST_LAYERS = 2_000  # weights are listed one by one
_MOST_EXPERTS = 10_000
_MOST_LAYERS_OF_EXPERTS = 30_000  # layers x experts, for the same reason
_POSITIVE = 1.2e-38  # of float32: the smallest that "positive" lets through, for numbers that need not be whole
_LARGEST = {int: 2**31 - 1, float: 3.4e38}
_KEYS: dict[str, Key] = {
    "vocab_size": Key(int, 1, required=True),
    "hidden_size": Key(int, 1, required=True),
    "intermediate_size": Key(int, 1, required=True),
    "num_hidden_layers": Key(int, 1, required=True, most=_MOST_LAYERS),
    "num_attention_heads": Key(int, 1, required=True),
    "num_key_value_heads": Key(int, 1),
    "head_dim": Key(int, 1),
    "max_position_embeddings": Key(int, 1),
    "rope_theta": Key(float),
    "rope_scaling": Key(dict),
    "rms_norm_eps": Key(float, _POSITIVE, most=1),
    "initializer_range": Key(float, _POSITIVE, most=1000),
    "tie_word_embeddings": Key(bool),
    "model_type": Key(str),
}
_OPTIONAL_KEYS: dict[str, Key] = {  # of fields that some architectures have
    "use_bias": Key(bool),
    "attention_bias": Key(bool),
    "mlp_bias": Key(bool),
    "moe_num_experts": Key(int, 1, most=_MOST_EXPERTS),
    "moe_k": Key(int, 1),
    "moe_intermediate_size": Key(int, 1),
    "moe_num_shared_experts": Key(int, 0),
    "moe_layer_start_index": Key(int, 0),
    "moe_layer_end_index": Key(int, -1),
    "moe_layer_interval": Key(int, 1),
    "moe_norm_min": Key(float, 0),
    "num_nextn_predict_layers": Key(int, 0, most=_MOST_LAYERS),
}


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
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    most = _LARGEST.get(key.kind) if key.most is None else key.most
    if is_number and most is not None and value > most:
        limit = f"{most:,}" if isinstance(most, int) else f"{most:g}"
        problems.append(f"{name}: must be at most {limit}, got {str(value)[:20]}")
        return None
    if key.kind is float and is_number:
        value = float(value)
    if not isinstance(value, key.kind) or (key.kind is not bool and isinstance(value, bool)):
        problems.append(f"{name}: expected {key.kind.__name__}, got {shown(value)}")
        return None
    if is_number and _is_below(value, key.minimum):
        wanted = "positive" if key.minimum in (1, _POSITIVE) else f"at least {key.minimum:g}"
        problems.append(f"{name}: must be {wanted}, got {shown(value)}")
        return None
    if isinstance(value, float) and math.isnan(value):
        problems.append(f"{name}: expected a number, got {shown(value)}")
        return None
    return value


def _replace_aliases(architecture: Architecture, values: dict[str, Any], problems: list[str]) -> None:
    for alias, key in architecture.aliases.items():
        value = values.pop(alias, None)
        if value is None:
            continue
        if values.get(key) is not None and values[key] != value:
            problems.append(f"{key}: {shown(values[key])} contradicts {alias}: {shown(value)}; keep the right one")
        values[key] = value


def _scaling_key(values: dict[str, Any]) -> str:
    return "rope_scaling" if values.get("rope_scaling") else ROPE_PARAMETERS


def _is_below(value: Any, minimum: float | None) -> bool:
    return minimum is not None and not value >= minimum  # so that not-a-number is refused as well


def _inconsistencies(architecture: Architecture, known: dict[str, Any]) -> list[str]:
    problems = []
    if known["num_attention_heads"] % known["num_key_value_heads"]:
        problems.append(
            f"num_attention_heads {known['num_attention_heads']} is not a multiple of "
            f"num_key_value_heads {known['num_key_value_heads']}"
        )
    if known["rope_theta"] <= 1:
        problems.append(f"rope_theta: must be more than 1, got {known['rope_theta']!r}")
    if known["head_dim"] % 2:
        problems.append(f"head_dim {known['head_dim']} is odd; rotary position embeddings turn pairs")
    if known.get("moe_k", 0) > known.get("moe_num_experts", 0):
        chosen, experts = (architecture.key_names.get(name, name) for name in ("moe_k", "moe_num_experts"))
        problems.append(f"{chosen} {known['moe_k']} is more than {experts} {known['moe_num_experts']}")
    if known["num_hidden_layers"] * known.get("moe_num_experts", 0) > _MOST_LAYERS_OF_EXPERTS:
        experts = architecture.key_names.get("moe_num_experts", "moe_num_experts")
        problems.append(
            f"num_hidden_layers {known['num_hidden_layers']:,} x {experts} {known['moe_num_experts']:,}: at most "
            f"{_MOST_LAYERS_OF_EXPERTS:,}"
        )
    return problems
