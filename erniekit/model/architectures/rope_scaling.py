"""The frequencies of rotary position embeddings, and how `rope_scaling` changes them for longer contexts.

Without scaling, pair i of D / 2 turns by f_i = theta^(-2i / D) per position (Su et al., 2021, arXiv:2104.09864).
`rope_type` is one of
- linear: f_i / factor, as if positions were factor times closer (Chen et al., 2023, arXiv:2306.15595);
- llama3: of Llama 3.1 (Grattafiori et al., 2024, arXiv:2407.21783, and its released code): with w = 2 pi / f_i the
  wavelength and L the original length, f_i where w < L / high, f_i / factor where w > L / low, and between them
  (1 - s) f_i / factor + s f_i with s = (L / w - low) / (high - low);
- yarn (Peng et al., 2023, arXiv:2309.00071): (1 - r) f_i + r f_i / factor with r a ramp from 0 to 1 over the pairs
  between those that turn beta_fast and beta_slow times within the original length; cosines and sines are multiplied by
  0.1 ln(factor) + 1.
Needs neither Paddle nor NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig

_NEEDED: dict[Any, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
_OPTIONAL: dict[Any, tuple[str, ...]] = {
    "yarn": (
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
    ),
}


class Frequencies(NamedTuple):
    """Radians per position of each of the D / 2 pairs, and what multiplies cosines and sines."""

    per_pair: tuple[float, ...]
    magnitude: float


def rope_scaling_problems(scaling: Mapping[str, Any] | None) -> list[str]:
    """One line for each thing in a `rope_scaling` that cannot be used."""
    if scaling is None:
        return []
    kind = _kind(scaling)
    if kind not in _NEEDED:
        known = ", ".join(_NEEDED)
        return [f"rope_scaling: rope_type {kind!r} is not supported; supported: {known}"]
    problems = []
    for key in (*_NEEDED[kind], *_OPTIONAL.get(kind, ())):
        value = scaling.get(key)
        if value is None and key not in _NEEDED[kind]:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            problems.append(f"rope_scaling: {key} must be a positive number for {kind}, got {value!r}")
    if kind == "llama3" and not problems and not scaling["high_freq_factor"] > scaling["low_freq_factor"]:
        problems.append("rope_scaling: high_freq_factor must be more than low_freq_factor")
    return problems


def rotary_frequencies(config: ModelConfig) -> Frequencies:
    """The frequencies that `config` asks for; its `rope_scaling` was checked when it was read."""
    size, theta = config.head_dim, config.rope_theta
    plain = tuple(theta ** (-pair / size) for pair in range(0, size, 2))
    scaling = config.rope_scaling or {"rope_type": "default"}
    kind = _kind(scaling)
    if kind == "linear":
        return Frequencies(tuple(frequency / scaling["factor"] for frequency in plain), 1.0)
    if kind == "llama3":
        return Frequencies(tuple(_llama3(frequency, scaling) for frequency in plain), 1.0)
    if kind == "yarn":
        return _yarn(plain, theta, scaling, config.max_position_embeddings)
    assert kind == "default", kind
    return Frequencies(plain, 1.0)


def _kind(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("type", scaling.get("rope_type", "default"))


def _llama3(frequency: float, scaling: Mapping[str, Any]) -> float:
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return kept * frequency + (1.0 - kept) * frequency / scaling["factor"]


def _yarn(plain: tuple[float, ...], theta: float, scaling: Mapping[str, Any], max_positions: int) -> Frequencies:
    """With `original_max_position_embeddings` the factor is max_position_embeddings over it, as in transformers."""
    original = scaling.get("original_max_position_embeddings")
    factor = max_positions / original if original else scaling["factor"]
    length = original or max_positions

    def pair_turning(times: float) -> float:
        """The pair, not a whole number, that turns this often within `length`."""
        return len(plain) * math.log(length / (times * 2 * math.pi)) / math.log(theta)

    first = pair_turning(scaling.get("beta_fast") or 32)
    last = pair_turning(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(plain) - 1)
    width = last - first or 0.001

    def scaled(pair: int, frequency: float) -> float:
        ramp = min(1.0, max(0.0, (pair - first) / width))
        return (1.0 - ramp) * frequency + ramp * frequency / factor

    return Frequencies(tuple(scaled(*item) for item in enumerate(plain)), _yarn_magnitude(scaling, factor))


def _yarn_magnitude(scaling: Mapping[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return growth(scaling["mscale"]) / growth(scaling["mscale_all_dim"])
    return growth(1.0)
