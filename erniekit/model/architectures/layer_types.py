"""Layers of two types: some attend to a window of the last positions, the others to all. Needs no Paddle.

`layer_types` names the type of each layer; where it is absent, every n-th layer attends to all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.model.architectures.architecture import Key

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig

SLIDING, FULL = "sliding_attention", "full_attention"
LAYER_TYPES = Key(list, nullable=True)
SLIDING_WINDOW = Key(int, 1, default=4096, nullable=True)


def is_sliding(config: ModelConfig, layer: int, interval: int) -> bool:
    """Return whether a layer attends to a window; without `layer_types`, all but each `interval`-th do."""
    types = config.own["layer_types"]
    return types[layer] == SLIDING if types else (layer + 1) % interval != 0


def acting_window(config: ModelConfig) -> int | None:
    """Return `sliding_window`, or None where no document can be longer than it."""
    window = config.own["sliding_window"]
    return window if window is not None and window < config.max_position_embeddings else None


def layer_type_problems(config: ModelConfig) -> list[str]:
    """Return a line for a `layer_types` that does not name one of the two types for each layer."""
    types = config.own["layer_types"]
    if not types or (len(types) == config.num_hidden_layers and all(kind in (SLIDING, FULL) for kind in types)):
        return []
    return [f"layer_types: expected {SLIDING} or {FULL} for each of {config.num_hidden_layers} layers, got {types!r}"]
