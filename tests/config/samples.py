"""Small configurations and values that the tests of this room share."""

from __future__ import annotations

from typing import Any

import pytest

from erniekit.config import Config
from erniekit.config.parameter import Parameter, When
from erniekit.errors import ConfigurationError

SMALLEST: dict[str, Any] = {"model_name_or_path": "model", "output_dir": "out", "train_dataset_path": "train.jsonl"}


def load(verb: str = "train", **values: Any) -> Config:
    """A training configuration of the required parameters and `values`."""
    return Config.from_mapping(SMALLEST | values, verb=verb)


def problems(verb: str = "train", **values: Any) -> str:
    """The message about a configuration that must be refused."""
    with pytest.raises(ConfigurationError) as caught:
        load(verb, **values)
    return str(caught.value)


def another_value(parameter: Parameter) -> Any:
    """A valid value other than the default, as a user may write it."""
    if parameter.choices:
        unlike = [choice for choice in parameter.choices if choice not in (parameter.default, *parameter.default)]
        return unlike[:1] if parameter.kind.is_list else unlike[0]
    if parameter.name in ("lora_alpha", "hadamard_block_size", "ref_model_update_steps"):  # their rules refuse the next
        return parameter.example
    if isinstance(parameter.default, bool):
        return not parameter.default
    if isinstance(parameter.default, (int, float)):
        bigger = parameter.default * 2 or 0.25
        if isinstance(parameter.default, int):
            bigger = parameter.default + 1
        inside = (parameter.maximum is None or bigger <= parameter.maximum) and (
            parameter.below is None or bigger < parameter.below
        )
        return bigger if inside else parameter.default / 2
    if parameter.default is None:
        return 7
    return "other" if parameter.example is None else parameter.example


def fulfil(need: When) -> Any:
    """A value under which the condition holds."""
    if need.above is not None:
        return int(need.above) + 1
    return need.values[0] if need.values else True
