"""The parts of a model that a run may freeze or train at a rate of their own: encoders, projector and decoder.

`Tower.part` says which part a tower is; everything else is the decoder. Needs neither Paddle nor NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from erniekit.model.architectures.architecture import Architecture
    from erniekit.model.architectures.model_config import ModelConfig

AUDIO, VISION, ALIGNER, LLM = "audio", "vision", "aligner", "llm"
PART_NAMES = {AUDIO: "audio encoder", VISION: "vision encoder", ALIGNER: "projector", LLM: "decoder"}


def part_name(architecture: Architecture, part: str) -> str:
    """Return what a part of models of a family is called; tables of codes stand in the place of an audio encoder."""
    return "code tables" if part == AUDIO and architecture.codes is not None else PART_NAMES[part]


def part_of(architecture: Architecture, name: str) -> str:
    """Return the part that a weight, a module or a parameter of an adapter belongs to, by its Hugging Face name."""
    return next((tower.part for tower in architecture.towers if name.startswith(tower.prefix)), LLM)


def parts_of(architecture: Architecture) -> tuple[str, ...]:
    """Return the parts that models of a family have, in the order of `PART_NAMES`."""
    own = {tower.part for tower in architecture.towers} | {LLM}
    return tuple(part for part in PART_NAMES if part in own)


def part_sizes(architecture: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return how many values the weights of these names and shapes have in each part that has any."""
    sizes = dict.fromkeys(parts_of(architecture), 0)
    for name, shape in shapes.items():
        sizes[part_of(architecture, name)] += math.prod(shape)
    return {part: size for part, size in sizes.items() if size}


def trainable_shapes(config: ModelConfig, frozen: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the weights that a run trains which freezes these parts."""
    architecture = config.architecture
    return {
        name: shape
        for name, shape in config.weight_shapes().items()
        if architecture.weight_info(name).rule.trained and part_of(architecture, name) not in frozen
    }


def decoder_linears(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the path and (out, in) of each linear layer of the decoder, those that are quantized. Encoders and
    projectors keep their weights as they are: they are small, and their activations have other ranges."""
    architecture = config.architecture
    return {path: shape for path, shape in config.linear_shapes().items() if part_of(architecture, path) == LLM}


def named_parts(parts: Iterable[str]) -> str:
    """Return parts in words: "the audio encoder and the decoder"."""
    *first, last = [f"the {PART_NAMES[part]}" for part in PART_NAMES if part in set(parts)]
    return f"{', '.join(first)} and {last}" if first else last
