"""Models among the rewards are looked at before a run begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from erniekit.build.reward_models import check_reward_models
from erniekit.config import Config
from erniekit.errors import ModelFileError


def test_a_model_that_gives_no_score_is_no_reward(make_config: Callable[..., Config], tiny_base: Path) -> None:
    answers = {"stage": "GRPO", "max_completion_len": 8}
    for reward in ("exact_match", "reward_model:absent"):
        check_reward_models(make_config(**answers, rewards=[reward]))
    with pytest.raises(ModelFileError, match=r"rewards: .* gives no score: it is no reward model"):
        check_reward_models(make_config(**answers, rewards=["exact_match", f"reward_model:{tiny_base}"]))
