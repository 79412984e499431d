"""Every word of `tensor_parallel_config` acts, or is told to change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from erniekit.parallel.copies import SYNCHRONISED
from erniekit.parameters import Config
from erniekit.parameters.tensor_words import TENSOR_WORDS, WITHOUT_EFFECT

SKIPS_COPIES = "enable_mp_skip_c_identity"


def messages(word: str, **values: Any) -> str:
    needed = {"model_name_or_path": "m", "train_dataset_path": "t.jsonl", "output_dir": "o", "max_steps": 1}
    needed |= {"tensor_parallel_degree": 2, "tensor_parallel_config": word}
    return "\n".join(Config.from_mapping({**needed, **values}, [], verb="train").messages)


@pytest.mark.proves("tensor_parallel_config")
@pytest.mark.parametrize("word", TENSOR_WORDS)
def test_a_word_acts_or_is_told(word: str) -> None:
    told = messages(word, sequence_parallel=False)
    if word in WITHOUT_EFFECT:
        assert f"{word} has no effect: {WITHOUT_EFFECT[word]}" in told
    else:
        assert word not in told and word in {*SYNCHRONISED, SKIPS_COPIES}


def test_with_the_sequence_divided_tokens_are_copied_anyway() -> None:
    assert f"{SKIPS_COPIES} has no effect: with sequence_parallel" in messages(SKIPS_COPIES)
