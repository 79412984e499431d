"""How the answers of a run are sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from erniekit.rollouts.sampling import Texts, sampling_settings


def test_settings_are_those_of_the_run(make_config: Callable[..., Any]) -> None:
    values = {"max_completion_len": 9, "rollout_temperature": 0.7, "seed": 7}
    config = make_config(stage="GRPO", rewards=["exact_match"], num_generations=2, **values)
    assert sampling_settings(config, Texts(str, [2, 3], 0)) == {
        "longest": 9, "temperature": 0.7, "seed": 7, "stop_token_ids": (2, 3),
    }  # fmt: skip
