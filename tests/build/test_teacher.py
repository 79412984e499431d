"""What a teacher with another number of rows of logits may and may not do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.build.teacher import check_rows
from erniekit.config import Config
from erniekit.errors import ConfigurationError, ModelFileError

ROWS = [  # of the student, of the teacher, tokens; a run; what is told
    (320, 256, 250, {"distill_divergence": "reverse_kl"}, "distill_divergence: .*has 256 rows of logits and .* 320"),
    (320, 256, 250, {"on_policy_ratio": 0.5}, "on_policy_ratio: .*cannot read"),
    (256, 320, 250, {"tensor_parallel_degree": 2}, "tensor_parallel_degree: .*Write teacher_top_k: 64"),
    (256, 320, 260, {}, "with up to 260 tokens, differ"),
    (256, 320, None, {}, "unknown without the tokenizers of both"),
]


@pytest.mark.parametrize(("student", "teacher", "tokens", "values", "told"), ROWS)
def test_what_cannot_be_with_other_rows_is_told(
    make_config: Callable[..., Config], student: int, teacher: int, tokens: int | None, values: Any, told: str
) -> None:
    config = make_config(stage="DISTILL", teacher_model_name_or_path="somewhere", **values)
    with pytest.raises((ConfigurationError, ModelFileError), match=f"(?s){told}"):
        check_rows(config, Path("somewhere"), student, teacher, tokens)
    check_rows(config, Path("somewhere"), student, student, tokens)


def test_a_table_needs_no_rows_of_its_own(make_config: Callable[..., Config]) -> None:
    values = {"stage": "DISTILL", "teacher_model_name_or_path": "somewhere", "tensor_parallel_degree": 2}
    check_rows(make_config(**values, teacher_top_k=8), Path("somewhere"), 256, 320, 250)
