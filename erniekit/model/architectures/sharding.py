"""What the weights of a module are, and how the ranks of a layout share them. Needs neither Paddle nor NumPy.

An architecture names its modules by patterns such as `model.layers.{layer}.mlp.experts.{expert}.up_proj` and gives each
of them one `ModuleRule`. Loading, saving, adapters, quantisation, the sums of gradients, their norm and the estimates
all ask this table; a name that no pattern matches is an error everywhere.

Weight names are Hugging Face's, those of adapters are `<path of the linear>.lora_A` and so on. Axes are those of the
decoder's layout: linear weights are [in, out], embeddings and heads [vocabulary, H].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np

LAYER, EXPERT = "{layer}", "{expert}"  # in a pattern: the number of a decoder layer, of a routed expert
_NUMBER = re.compile(r"\{\w+\}")  # any other name in braces stands for a number without a meaning here
_ADAPTER = ("lora_A", "lora_B", "lora_magnitude_vector", "start_A", "start_B")  # beside a linear layer
_BESIDE = {"linear": _ADAPTER, "embedding": ("new_rows",)}  # what is trained beside frozen weights


@dataclass(frozen=True)
class Placement:
    """Where the values of one weight are.

    Attributes:
        axis: the axis that is divided over the tensor-parallel group; None: every rank of it has all values.
        partial: with the whole of it on every rank, whether each rank's gradient is a part of the sum.
        expert: its number among the routed experts of its layer; None: it belongs to no routed expert.
    """

    axis: int | None = None
    partial: bool = False
    expert: int | None = None


@dataclass(frozen=True)
class ModuleRule:
    """What the parameters of a module are, and which of their axes tensor-parallel ranks divide.

    Attributes:
        kind: "linear" modules are `Linear` layers, which may have adapters and weights in few bits; "router" modules
            keep float32 in exported files.
        parameters: the names that a parameter of the module may have; a linear layer's adapter has its own besides.
        axes: the divided axis of each parameter that is divided; every rank has the others whole.
        partial: parameters that every rank has whole while its gradient is always a part of the sum. The gradients of
            all other whole ones are parts of the sum under sequence parallelism only.
        initial: the constant that random models start from, or a function that makes the values of a shape, which are
            multiplied by `initializer_range`; None: draw from a normal distribution. Biases are 0.
        trained: whether gradients change it; False for tables that files hold and training leaves alone.
    """

    kind: Literal["linear", "embedding", "norm", "router", "other"]
    parameters: tuple[str, ...] = ("weight",)
    axes: Mapping[str, int] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    initial: float | Callable[[tuple[int, ...]], np.ndarray] | None = None
    trained: bool = True


_LINEAR_PARAMETERS = ("weight", "bias")
COLUMN_PARALLEL = ModuleRule(  # the outputs are divided; each rank's slice of B gives a part of the gradient of A
    "linear",
    _LINEAR_PARAMETERS,
    axes={"weight": 1, "bias": 0, "lora_B": 1, "lora_magnitude_vector": 0},
    partial=("lora_A",),
)
ROW_PARALLEL = ModuleRule(  # the inputs are divided
    "linear", _LINEAR_PARAMETERS, axes={"weight": 0, "lora_A": 0}, partial=("lora_B", "lora_magnitude_vector")
)
REPLICATED_LINEAR = ModuleRule("linear", _LINEAR_PARAMETERS)  # also those of routed experts, which are never cut
SLICED_LINEAR = ModuleRule(  # every rank has the whole, and uses its own channels of the outputs
    "linear", _LINEAR_PARAMETERS, partial=(*_LINEAR_PARAMETERS, *_ADAPTER)
)
VOCAB_PARALLEL = ModuleRule(  # every rank has all rows of new tokens, and uses those whose places it has
    "embedding", axes={"weight": 0}, partial=("new_rows",)
)
NORM = ModuleRule("norm", initial=1.0)
HEAD_NORM = ModuleRule("norm", partial=("weight",), initial=1.0)  # each rank normalises its own heads
SHARDED_NORM = ModuleRule("norm", axes={"weight": 0}, initial=1.0)  # of channels that the ranks divide
ROUTER = ModuleRule("router", _LINEAR_PARAMETERS)
ROUTER_CORRECTION = ModuleRule("router", ("e_score_correction_bias",))


class WeightInfo(NamedTuple):
    """What an architecture's table says of one weight.

    Attributes:
        rule: the rule of its module.
        parameter: its name within the module, such as "weight" or "lora_A".
        layer: the number of its decoder layer; None: it belongs to none.
        expert: the number of its routed expert; None: it belongs to none.
        in_tower: whether it belongs to an encoder in front of the decoder.
    """

    rule: ModuleRule
    parameter: str
    layer: int | None
    expert: int | None
    in_tower: bool

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of a `Linear`: [out, in] in Hugging Face's files, [in, out] in the decoder."""
        return self.rule.kind == "linear" and self.parameter == "weight"

    def placement(self, *, sequence_parallel: bool = False) -> Placement:
        """Where the weight lies when the tensor-parallel group has several ranks.

        Args:
            sequence_parallel: whether hidden states are divided along the sequence outside of blocks, so that what
                works on them there (norms, routers, biases after a sum, experts) sees a part of the tokens. Encoders
                compute all their states on every rank.
        """
        if self.expert is not None:  # experts are divided among ranks, never cut
            return Placement(partial=sequence_parallel, expert=self.expert)
        axis = self.rule.axes.get(self.parameter)
        is_part = (sequence_parallel and not self.in_tower) or self.parameter in self.rule.partial
        return Placement(axis, partial=axis is None and is_part)


class _Pattern(NamedTuple):
    rule: ModuleRule
    layer_at: int | None  # which part of the path is the layer's number
    expert_at: int | None
    in_tower: bool


class RuleTable:
    """Finds the one rule of a weight by its name.

    Args:
        decoder: rules of the decoder by pattern of module path.
        towers: those of the encoders in front of it.
    """

    def __init__(self, decoder: Mapping[str, ModuleRule], towers: Mapping[str, ModuleRule]) -> None:
        self._patterns: dict[str, _Pattern] = {}
        self._found: dict[str, WeightInfo] = {}  # names are asked for again and again
        for rules, in_tower in ((decoder, False), (towers, True)):
            for pattern, rule in rules.items():
                parts, key = pattern.split("."), _NUMBER.sub("*", pattern)
                assert key not in self._patterns, f"two rules for {pattern}"
                layer_at, expert_at = (parts.index(part) if part in parts else None for part in (LAYER, EXPERT))
                self._patterns[key] = _Pattern(rule, layer_at, expert_at, in_tower)

    def find(self, name: str) -> WeightInfo | None:
        """What is known of the weight or adapter parameter of this name; None: no rule names it."""
        if name in self._found:
            return self._found[name]
        path, _, parameter = name.rpartition(".")
        parts = path.split(".")
        found = self._patterns.get(".".join("*" if part.isdigit() else part for part in parts))
        if found is None:
            return None
        is_adapter = parameter in _BESIDE.get(found.rule.kind, ())
        if parameter not in found.rule.parameters and not is_adapter:
            return None
        layer, expert = (None if at is None else int(parts[at]) for at in (found.layer_at, found.expert_at))
        self._found[name] = WeightInfo(found.rule, parameter, layer, expert, found.in_tower)
        return self._found[name]


def prefixed(prefix: str, rules: Mapping[str, ModuleRule]) -> dict[str, ModuleRule]:
    """Return the same rules for modules whose paths begin with `prefix`; an empty path is the module of that name."""
    return {(prefix + path).rstrip("."): rule for path, rule in rules.items()}
