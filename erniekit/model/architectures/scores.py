"""Models that give a text one score, as transformers' classes for sequence classification with one label do: the
decoder of a family with a head `score` [1, H]. Needs neither Paddle nor NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from erniekit.model.architectures.sharding import ModuleRule

if TYPE_CHECKING:
    from erniekit.model.architectures.architecture import Architecture
    from erniekit.model.architectures.model_config import ModelConfig

_CLASS = "ForSequenceClassification"
SCORE = "score.weight"
SCORE_RULE = ModuleRule("other", axes={"weight": 1})  # [1, H]: each rank has the weights of its own channels
SCORE_KEYS: Mapping[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "num_labels": 1}


def is_scored(values: Mapping[str, Any]) -> bool:
    """Return whether the keys of a `config.json` are those of a model for sequence classification."""
    names = values.get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and name.endswith(_CLASS) for name in names)


def scored_class(architecture: Architecture) -> str:
    """Return the class of transformers that opens a family's model with a score."""
    return architecture.transformers_class.replace("ForCausalLM", _CLASS)


def score_problems(config: ModelConfig, values: Mapping[str, Any]) -> list[str]:
    """Return a line for each thing in the keys of a model with a score that cannot be used."""
    if not config.scored:
        return []
    problems = [] if can_score(config.architecture) else [f"{config.model_type}: models of this family give no score"]
    labels = values.get("id2label")
    count = len(labels) if isinstance(labels, dict) else values.get("num_labels", 2)
    if count != 1:
        problems.append(f"id2label: a model that gives a score has one label, got {count}")
    return problems


def can_score(architecture: Architecture) -> bool:
    """Return whether a family is a plain decoder, around which transformers puts a score."""
    return architecture.text is None and architecture.codes is None and not architecture.towers


def with_score(shapes: Mapping[str, tuple[int, ...]], head: str, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a decoder with a score in the place of the head that predicts tokens."""
    return {**{name: shape for name, shape in shapes.items() if name != head}, SCORE: (1, hidden_size)}
