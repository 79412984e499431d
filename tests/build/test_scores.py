"""The score that stage RM puts in the place of the head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from erniekit.build.scores import with_score
from erniekit.config import Config
from erniekit.model.architectures.model_config import ModelConfig


def test_a_score_is_drawn_by_the_seed(make_config: Callable[..., Config], tiny_model: Path) -> None:
    plain = ModelConfig.from_folder(tiny_model)
    scored = with_score(make_config(stage="RM", seed=7), plain, tiny_model)
    assert scored.scored and scored.wrapped is not None
    assert scored.wrapped.seed == 7 and scored.wrapped.config == plain


@pytest.mark.parametrize("stage", ["SFT", "DPO"])
def test_other_stages_have_none(make_config: Callable[..., Config], tiny_model: Path, stage: str) -> None:
    plain = ModelConfig.from_folder(tiny_model)
    assert with_score(make_config(stage=stage), plain, tiny_model) is plain
