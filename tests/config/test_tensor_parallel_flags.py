"""Every word of `tensor_parallel_config` acts, or is told to change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from erniekit.config import Config
from erniekit.config.sections.distributed_flags import IGNORED_TENSOR_PARALLEL_FLAGS, TENSOR_PARALLEL_FLAGS
from erniekit.distributed.replicated import SYNC_FLAGS

SKIPS_COPIES = "enable_mp_skip_c_identity"


def messages(word: str, **values: Any) -> str:
    needed = {"model_name_or_path": "m", "train_dataset_path": "t.jsonl", "output_dir": "o", "max_steps": 1}
    needed |= {"tensor_parallel_degree": 2, "tensor_parallel_config": word}
    return "\n".join(Config.from_mapping({**needed, **values}, [], verb="train").messages)


@pytest.mark.proves("tensor_parallel_config")
@pytest.mark.parametrize("word", TENSOR_PARALLEL_FLAGS)
def test_a_word_acts_or_is_told(word: str) -> None:
    reported = messages(word, sequence_parallel=False)
    if word in IGNORED_TENSOR_PARALLEL_FLAGS:
        assert f"{word} has no effect: {IGNORED_TENSOR_PARALLEL_FLAGS[word]}" in reported
    else:
        assert word not in reported and word in {*SYNC_FLAGS, SKIPS_COPIES}


def test_with_the_sequence_divided_tokens_are_copied_anyway() -> None:
    assert f"{SKIPS_COPIES} has no effect: with sequence_parallel" in messages(SKIPS_COPIES)
