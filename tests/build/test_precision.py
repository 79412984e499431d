"""What of section 1.8 has no effect is told before a run computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from erniekit.build.precision import apply_mixed_precision
from erniekit.config import Config
from tests.model.tiny import tiny_model


@pytest.mark.parametrize("flags", ["", "remove_master_weight", "skip_save_model_weight"])
def test_flags_of_master_weights_have_no_effect_where_weights_are_float32(
    flags: str, make_config: Callable[..., Config], logged: list[str]
) -> None:
    sixteen_bits: dict[str, Any] = {"bf16": True, "cpu_bf16": "always", "fp16_opt_level": "O2", "device": "cpu"}
    saved = {"save_strategy": "steps", "unified_checkpoint_config": flags}
    apply_mixed_precision(make_config(**sixteen_bits, **saved), tiny_model())
    told = [line for line in logged if line.startswith("`unified_checkpoint_config`")]
    line = f"`unified_checkpoint_config` (config.yaml:17): {flags} has no effect: weights are float32 on a CPU"
    assert told == ([line] if flags else [])
