"""The shape of a model, read from a Hugging Face `config.json`. Needs neither Paddle nor NumPy."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from erniekit.errors import ModelFileError

CONFIG_FILE = "config.json"
MODEL_TYPES = ("ernie4_5",)

# Keys that would change the computation; only the value that changes nothing is available.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "compression_ratio": (1, 1.0),
    "moe_num_experts": (None, 0),
    "num_nextn_predict_layers": (None, 0),
    "scale_qk_coeff": (1, 1.0),
}


@dataclass(frozen=True)
class ModelConfig:
    """An ERNIE-4.5 dense decoder. Field names are those of `config.json`.

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
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    use_bias: bool = False
    tie_word_embeddings: bool = True
    model_type: str = "ernie4_5"
    other_keys: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_folder(cls, folder: Path | str) -> ModelConfig:
        """Read `folder/config.json`. Raises ModelFileError for a missing, unreadable or inconsistent file."""
        path = Path(folder) / CONFIG_FILE
        if not path.is_file():
            raise ModelFileError(f"{path}: no such file. A model folder needs a Hugging Face {CONFIG_FILE}.")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ModelFileError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ModelFileError(f"{path}: expected a JSON object, got {type(values).__name__}")
        return cls.from_json(values, where=str(path))

    @classmethod
    def from_json(cls, values: dict[str, Any], where: str = CONFIG_FILE) -> ModelConfig:
        """The configuration that the keys of a `config.json` describe; `where` heads the error message.

        `head_dim` defaults to hidden_size / num_attention_heads, `num_key_value_heads` to num_attention_heads.
        """
        model_type = values.get("model_type")
        if model_type not in MODEL_TYPES:
            known = ", ".join(MODEL_TYPES)
            raise ModelFileError(f"{where}: model_type {model_type!r} is not available yet; available: {known}")
        problems: list[str] = []
        known_values = _known_values(values, problems)
        for key, neutral in _NEUTRAL_VALUES.items():
            if key in values and values[key] not in neutral:
                problems.append(f"{key}: {values[key]!r} is not available yet; only {neutral[-1]!r} is")
        if not problems:
            problems = _inconsistencies(known_values)
        if problems:
            raise ModelFileError(f"{where} cannot be used:\n" + "\n".join(f"  {problem}" for problem in problems))
        other_keys = {key: value for key, value in values.items() if key not in known_values}
        return cls(**known_values, other_keys=other_keys)

    def to_json(self) -> dict[str, Any]:
        """Every key of `config.json`, those this project does not use included."""
        own = {name: getattr(self, name) for name in _FIELD_TYPES}
        defaults = {"architectures": ["Ernie4_5ForCausalLM"], "hidden_act": "silu"}
        return {**defaults, **self.other_keys, **own, "torch_dtype": "float32"}

    def parameter_count(self) -> int:
        """The number of weights; tied embeddings count once."""
        total = 0
        for shape in self.weight_shapes().values():
            size = 1
            for length in shape:
                size *= length
            total += size
        return total

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's Hugging Face name and shape (linear weights are [out, in]), in the order of the decoder."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, key_value = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key_value, hidden),
            "self_attn.v_proj": (key_value, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            for name, shape in linears.items():
                shapes[f"{prefix}{name}.weight"] = shape
                if self.use_bias:
                    shapes[f"{prefix}{name}.bias"] = shape[:1]
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


_FIELD_TYPES: dict[str, type] = {
    "vocab_size": int,
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "max_position_embeddings": int,
    "rope_theta": float,
    "rms_norm_eps": float,
    "initializer_range": float,
    "use_bias": bool,
    "tie_word_embeddings": bool,
    "model_type": str,
}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _known_values(values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The fields of ModelConfig among `values`, with their types checked and the derived defaults filled in."""
    known: dict[str, Any] = {}
    for name, kind in _FIELD_TYPES.items():
        value = values.get(name)
        if value is None:
            if name in _REQUIRED:
                problems.append(f"{name}: missing")
            continue
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            problems.append(f"{name}: expected {kind.__name__}, got {value!r}")
        elif isinstance(value, (int, float)) and kind is not bool and value <= 0:
            problems.append(f"{name}: must be positive, got {value!r}")
        else:
            known[name] = value
    if not problems:
        heads = known["num_attention_heads"]
        known.setdefault("num_key_value_heads", heads)
        if "head_dim" not in known:
            if known["hidden_size"] % heads:
                problems.append(f"hidden_size {known['hidden_size']} is not a multiple of num_attention_heads {heads}")
            known["head_dim"] = known["hidden_size"] // heads
    return known


def _inconsistencies(known: dict[str, Any]) -> list[str]:
    problems = []
    if known["num_attention_heads"] % known["num_key_value_heads"]:
        problems.append(
            f"num_attention_heads {known['num_attention_heads']} is not a multiple of "
            f"num_key_value_heads {known['num_key_value_heads']}"
        )
    if known["head_dim"] % 2:
        problems.append(f"head_dim {known['head_dim']} is odd; rotary position embeddings turn pairs")
    return problems
