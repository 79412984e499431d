"""The frequencies of rotary position embeddings, and how `rope_scaling` changes them for longer contexts.

Without scaling, pair i of D / 2 turns by f_i = theta^(-2i / D) per position (Su et al., 2021, arXiv:2104.09864).
`rope_type` is one of
- linear: f_i / factor, as if positions were factor times closer (Chen et al., 2023, arXiv:2306.15595);
- llama3: of Llama 3.1 (Grattafiori et al., 2024, arXiv:2407.21783, and its released code): with w = 2 pi / f_i the
  wavelength and L the original length, f_i where w < L / high, f_i / factor where w > L / low, and between them
  (1 - s) f_i / factor + s f_i with s = (L / w - low) / (high - low);
- yarn (Peng et al., 2023, arXiv:2309.00071): (1 - r) f_i + r f_i / factor with r a ramp from 0 to 1 over the pairs
  between those that turn beta_fast and beta_slow times within the original length (equations 17 to 19); cosines and
  sines are multiplied by 0.1 ln(factor) + 1 (equation 22), or by `attention_factor`, or by
  (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1) as in DeepSeek-V2's released code.

Yarn's factor is `factor`, as transformers 5 takes it (`_compute_yarn_parameters` of modeling_rope_utils.py 5.23); where
it is null, max_position_embeddings / original_max_position_embeddings takes its place. transformers 4 always takes that
ratio where the original length is given; `yarn_remark` tells of files that mean different models to the two.
Needs neither Paddle nor NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from erniekit.model.architectures.config_keys import shown, shown_key

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig

_LENGTH = "original_max_position_embeddings"
_NEEDED: dict[Any, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
    "yarn": (),  # a factor or an original length, see `_yarn_factor`
}
_OPTIONAL: dict[Any, tuple[str, ...]] = {
    "yarn": ("factor", _LENGTH, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}
_FLAGS: dict[Any, tuple[str, ...]] = {"yarn": ("truncate",)}
# entries that no version of transformers reads for these kinds
_INERT: dict[Any, tuple[str, ...]] = {"default": (_LENGTH,), "linear": (_LENGTH,), "yarn": ("finetuned",)}
_SMALLEST, _LARGEST = 1.2e-38, 3.4e38  # of float32


class Frequencies(NamedTuple):
    """Radians per position of each of the D / 2 pairs, and what multiplies cosines and sines.

    Pairs with 0 pass unchanged, as those do that a partial rotary embedding leaves out.
    """

    per_pair: tuple[float, ...]
    magnitude: float


def rope_scaling_problems(scaling: Mapping[str, Any] | None, name: str = "rope_scaling") -> list[str]:
    """Return a line for each thing in a `rope_scaling` that cannot be used.

    Args:
        name: the key that the file writes it under.
    """
    if scaling is None:
        return []
    kind, old, new = scaling_kind(scaling), scaling.get("type"), scaling.get("rope_type")
    if old is not None and new is not None and old != new:
        return [f"{name}: type {shown(old)} contradicts rope_type {shown(new)}; keep the right one"]
    if not isinstance(kind, str) or kind not in _NEEDED:
        known = ", ".join(_NEEDED)
        return [f"{name}: rope_type {shown(kind)} is not supported; supported: {known}"]
    problems = []
    numbers, flags = (*_NEEDED[kind], *_OPTIONAL.get(kind, ())), _FLAGS.get(kind, ())
    for key in numbers:
        value = scaling.get(key)
        if value is None and key not in _NEEDED[kind]:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _SMALLEST <= value <= _LARGEST:
            problems.append(f"{name}: {key} must be a positive number for {kind}, got {shown(value)}")
    problems += [
        f"{name}: {key} must be true or false for {kind}, got {shown(scaling[key])}"
        for key in flags
        if scaling.get(key) is not None and not isinstance(scaling[key], bool)
    ]
    understood = {"type", "rope_type", *numbers, *flags, *_INERT.get(kind, ())}
    problems += [
        f"{name}: {shown_key(key)} is not understood for {kind}, and may change what the model computes"
        for key, value in scaling.items()
        if key not in understood and value is not None
    ]
    if problems:
        return problems
    if kind == "llama3" and not scaling["high_freq_factor"] > scaling["low_freq_factor"]:
        problems.append(f"{name}: high_freq_factor must be more than low_freq_factor")
    if kind == "yarn" and scaling.get("factor") is None and scaling.get(_LENGTH) is None:
        problems.append(f"{name}: factor must be a positive number for yarn, got None")
    return problems


def yarn_remark(scaling: Mapping[str, Any] | None, max_positions: int) -> str | None:
    """Return a line where transformers 4 takes another factor of yarn than transformers 5 and this program."""
    if not scaling or scaling_kind(scaling) != "yarn" or None in (scaling.get("factor"), scaling.get(_LENGTH)):
        return None
    ratio = max_positions / scaling[_LENGTH]
    if math.isclose(ratio, scaling["factor"], rel_tol=1e-6):
        return None
    return (
        f"yarn: factor {scaling['factor']:g} is taken as it is written, as in transformers 5; transformers 4 takes "
        f"max_position_embeddings / {_LENGTH} = {max_positions} / {scaling[_LENGTH]:g} = {ratio:g} and computes "
        "another model from the same file"
    )


def rotary_frequencies(config: ModelConfig) -> Frequencies:
    """The frequencies that `config` asks for; its `rope_scaling` was checked when it was read."""
    size, theta = config.head_dim, config.rope_theta
    plain = tuple(theta ** (-pair / size) for pair in range(0, size, 2))
    scaling = config.rope_scaling or {"rope_type": "default"}
    kind = scaling_kind(scaling)
    if kind == "linear":
        return Frequencies(tuple(frequency / scaling["factor"] for frequency in plain), 1.0)
    if kind == "llama3":
        return Frequencies(tuple(_llama3(frequency, scaling) for frequency in plain), 1.0)
    if kind == "yarn":
        return _yarn(plain, theta, scaling, config.max_position_embeddings)
    assert kind == "default", kind
    return Frequencies(plain, 1.0)


def scaling_kind(scaling: Mapping[str, Any]) -> Any:
    """Return the `rope_type` of a `rope_scaling`, whichever of its two keys says it."""
    kinds = (scaling.get("type"), scaling.get("rope_type"), "default")
    return next(kind for kind in kinds if kind is not None)


def _llama3(frequency: float, scaling: Mapping[str, Any]) -> float:
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return kept * frequency + (1.0 - kept) * frequency / scaling["factor"]


def _yarn(plain: tuple[float, ...], theta: float, scaling: Mapping[str, Any], max_positions: int) -> Frequencies:
    length = scaling.get(_LENGTH) or max_positions
    factor = scaling.get("factor") or max_positions / length

    def pair_turning(times: float) -> float:
        """The pair, not a whole number, that turns this often within `length`."""
        return len(plain) * math.log(length / (times * 2 * math.pi)) / math.log(theta)

    first = pair_turning(scaling.get("beta_fast") or 32)
    last = pair_turning(scaling.get("beta_slow") or 1)
    if scaling.get("truncate") is not False:
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
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return yarn_growth(scaling["mscale"], factor) / yarn_growth(scaling["mscale_all_dim"], factor)
    return yarn_growth(1.0, factor)


def yarn_growth(weight: float, factor: float) -> float:
    """Return by how much attention scores grow in each of queries and keys for contexts `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
