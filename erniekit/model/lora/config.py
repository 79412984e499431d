"""Settings of low-rank adapters, and which linear layers get one. Needs no Paddle or NumPy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from erniekit.errors import ConfigurationError
from erniekit.model.architectures.stacked_experts import place_of
from erniekit.model.vocabulary import new_row_shapes

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig

KAIMING, PISSA = "kaiming", "pissa"
REGULAR_EXPRESSION = "re:"  # prefix of a pattern that is a regular expression


@dataclass(frozen=True)
class LoraSettings:
    """The update of a linear layer is scaling * A B, with A [in, r] and B [r, out].

    Attributes:
        alpha: the scaling is alpha / r, or alpha / sqrt(r) with `rslora`.
        dropout: probability for entries of the adapter's input.
        dora: learn the length of every output's weight apart from its direction (DoRA, arXiv 2402.09353).
        init: "kaiming" (A uniform, B zero), or "pissa": both from the weight's largest singular values, which
            leave the frozen weight (PiSSA, arXiv 2404.02948).
        target_modules: patterns of the layers to adapt; none means the architecture's own (see `adapter_targets`).
        rank_pattern, alpha_pattern: other ranks and alphas of single layers, as PEFT writes them.
    """

    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0
    dora: bool = False
    init: str = KAIMING
    target_modules: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def rank_of(self, path: str) -> int:
        return _by_pattern(self.rank_pattern, path, self.rank)

    def alpha_of(self, path: str) -> float:
        return _by_pattern(self.alpha_pattern, path, self.alpha)

    def scaling_of(self, path: str) -> float:
        """Return the factor on A B of the layer with this path."""
        rank = self.rank_of(path)
        return self.alpha_of(path) / (math.sqrt(rank) if self.rslora else rank)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "target_modules": list(self.target_modules)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LoraSettings:
        """Return the settings that `to_json` gave. Raises ValueError, KeyError or TypeError for anything else."""
        settings = cls(**{**values, "target_modules": tuple(values["target_modules"])})
        ranks, alphas = settings.rank_pattern.values(), settings.alpha_pattern.values()
        numbers = [settings.rank, settings.alpha, settings.dropout, *ranks, *alphas]
        if not all(type(value) in (int, float) and 0 <= value < math.inf for value in numbers):
            raise ValueError("a number is not one")
        if not all(type(rank) is int and rank > 0 for rank in (settings.rank, *ranks)):
            raise ValueError("a rank is not a positive integer")
        if settings.init not in (KAIMING, PISSA) or not {type(settings.rslora), type(settings.dora)} <= {bool}:
            raise ValueError("init, rslora or dora has an unknown value")
        return settings

    def __str__(self) -> str:
        scale = f"alpha {self.alpha:g} / {'sqrt(r)' if self.rslora else 'r'}"
        kind = "DoRA" if self.dora else "LoRA"
        more = [f"dropout {self.dropout:g}"] if self.dropout else []
        more += ["PiSSA"] if self.init == PISSA else []
        return ", ".join([f"{kind}, rank {self.rank}, {scale}", *more])


def adaptable_linears(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the path and (out, in) of each linear layer beside which an adapter can stand, towers' included.

    Experts that files stack are not among them: PEFT knows no adapters of single ones.
    """
    stacked, linears = config.architecture.stacked_experts, config.linear_shapes()
    return {path: shape for path, shape in linears.items() if place_of(f"{path}.weight", stacked) is None}


def adapter_targets(config: ModelConfig, patterns: Iterable[str]) -> list[str]:
    """Return the paths of the linear layers to adapt, in the order of the model.

    Without patterns they are what the architecture names: all of the decoder's where it names none. A pattern reaches
    the layers of a tower only if it begins with the tower's prefix, as `audio_tower.layers.*.q_proj` does, or is its
    name, `audio_tower`, for all its layers. So no pattern that is meant for the decoder adapts a tower.

    Raises:
        ConfigurationError: a pattern names no layer.
    """
    patterns = tuple(patterns) or config.architecture.lora_targets
    towers = tuple(tower.prefix for tower in config.architecture.towers)
    for_towers = [pattern for pattern in patterns if _begins_with(pattern, towers)]
    for_decoder = [pattern for pattern in patterns if pattern not in for_towers]
    paths, chosen = list(adaptable_linears(config)), set[str]()
    if for_decoder or not for_towers:
        names = " and ".join(tower.rstrip(".") for tower in towers)
        hint = f"\n  Names of layers in {names} begin with that." if towers else ""
        chosen.update(select_targets((path for path in paths if not path.startswith(towers)), for_decoder, hint))
    if for_towers:
        chosen.update(select_targets((path for path in paths if path.startswith(towers)), for_towers))
    return [path for path in paths if path in chosen]


def _begins_with(pattern: str, prefixes: tuple[str, ...]) -> bool:
    return f"{pattern.removeprefix(REGULAR_EXPRESSION)}.".replace("\\.", ".").startswith(prefixes)


def select_targets(paths: Iterable[str], patterns: Iterable[str], hint: str = "") -> list[str]:
    """Return the linear layers among `paths` that match the patterns, in order; all of them without a pattern.

    A pattern is the last words of a path (`q_proj`, `self_attn.q_proj`), the path of a module, which stands for all
    linear layers in it (`audio_tower`, `model.layers.3`), a path with wildcards (`model.layers.[0-3].*`), or `re:` and
    a regular expression for a full path.

    Args:
        hint: the end of the message about a pattern that matches none.

    Raises:
        ConfigurationError: a pattern matches no layer.
    """
    paths, patterns = list(paths), list(patterns)
    if not patterns:
        return paths
    unused = [pattern for pattern in patterns if not any(matches(pattern, path) for path in paths)]
    if unused:
        raise ConfigurationError(
            f"lora_target_modules: {', '.join(map(repr, unused))} names no linear layer of this model.\n"
            f"  There are: {', '.join(_shapes_of_paths(paths))}{hint}"
        )
    return [path for path in paths if any(matches(pattern, path) for pattern in patterns)]


def matches(pattern: str, path: str) -> bool:
    """Return whether a pattern of `lora_target_modules` matches the layer with this path."""
    if pattern.startswith(REGULAR_EXPRESSION):
        return re.fullmatch(pattern[len(REGULAR_EXPRESSION) :], path) is not None
    if set(pattern) & set("*?["):
        return fnmatchcase(path, pattern)
    return f".{path}".endswith(f".{pattern}") or path.startswith(f"{pattern}.")


def adapter_shapes(config: ModelConfig, settings: LoraSettings) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every parameter that is trained with the adapters of a model: the adapters', and
    the rows of new tokens."""
    linears = config.linear_shapes()
    shapes: dict[str, tuple[int, ...]] = {}
    for path in adapter_targets(config, settings.target_modules):
        outputs, inputs = linears[path]
        rank = settings.rank_of(path)
        shapes |= {f"{path}.lora_A": (inputs, rank), f"{path}.lora_B": (rank, outputs)}
        if settings.dora:
            shapes[f"{path}.lora_magnitude_vector"] = (outputs,)
    return shapes | new_row_shapes(config)


def adapter_parameter_count(config: ModelConfig, settings: LoraSettings) -> int:
    """Return how many parameters are trained with the adapters of a model."""
    return sum(math.prod(shape) for shape in adapter_shapes(config, settings).values())


def _by_pattern(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    """Return the value of the first key that, as a regular expression, matches the end of the path at a dot (PEFT's
    rule)."""
    for key, value in patterns.items():
        if re.match(rf"(.*\.)?({key})$", path):
            return value
    return default


def _shapes_of_paths(paths: Iterable[str]) -> list[str]:
    """Return paths with their numbers replaced by `*`, each once."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", path) for path in paths))
