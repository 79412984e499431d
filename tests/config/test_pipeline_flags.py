"""Every word of `pipeline_parallel_config` has an effect, is told to have none, or is refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from erniekit.config import Config
from erniekit.config.sections.distributed_flags import IGNORED_PIPELINE_FLAGS, PIPELINE_FLAGS
from erniekit.distributed.pipeline import PipelineOptions
from erniekit.errors import ConfigurationError

REFUSED = {"enable_split_backward"}
ELSEWHERE = {"enable_release_grads", "disable_non_batch_p2p_comm"}  # see the tests of these names


def load(**values: Any) -> Config:
    needed = {"model_name_or_path": "m", "train_dataset_path": "t.jsonl", "output_dir": "o", "max_steps": 1}
    needed["pipeline_parallel_degree"] = 4
    return Config.from_mapping({**needed, **values}, [], verb="train")


def messages(*words: str, **values: Any) -> str:
    return "\n".join(load(pipeline_parallel_config=" ".join(words), **values).messages)


@pytest.mark.parametrize("word", PIPELINE_FLAGS)
def test_a_word_acts_or_is_told_or_is_refused(word: str) -> None:
    if word in REFUSED:
        with pytest.raises(ConfigurationError, match=rf"{word}: .*schedule.*leave it out"):
            messages(word)
    elif word in IGNORED_PIPELINE_FLAGS:
        assert f"{word} has no effect: {IGNORED_PIPELINE_FLAGS[word]}" in messages(word)
        assert PipelineOptions.from_flags([word]) == PipelineOptions()
    elif word not in ELSEWHERE:
        assert PipelineOptions.from_flags([word]) != PipelineOptions()


@pytest.mark.parametrize("word", ["enable_overlap_p2p_comm", "best_unbalanced_scheduler"])
def test_words_of_interleaved_pipelines(word: str) -> None:
    assert f"{word} has no effect: only interleaved" in messages(word)
    assert word not in messages(word, virtual_pp_degree=2, gradient_accumulation_steps=8)


def test_tensor_parallel_ranks_send_parts_of_equal_tensors() -> None:
    word = "disable_partial_send_recv"
    assert "full tensors are always sent" in messages(word)
    assert "full local tensors are always sent" in messages(word, tensor_parallel_degree=2)
    assert word not in messages(word, tensor_parallel_degree=2, sequence_parallel=False)


def test_enable_release_grads_stands_for_release_grads() -> None:
    config = load(pipeline_parallel_config="enable_release_grads")
    assert config["release_grads"] is True and "enable_release_grads" in config.origin("release_grads")
    assert load()["release_grads"] is False
    assert load(pipeline_parallel_config="enable_release_grads", release_grads=False)["release_grads"] is False


@pytest.mark.parametrize(
    ("words", "values", "said"),
    [
        (["disable_p2p_cache_shape"], {"virtual_pp_degree": 2}, "must know the shapes"),
        (["disable_batch_p2p_comm", "disable_non_batch_p2p_comm"], {}, "no way to send"),
        (["enable_overlap_p2p_comm", "disable_non_batch_p2p_comm"], {"virtual_pp_degree": 2}, "without batches"),
    ],
)
def test_contradictions_are_refused(words: list[str], values: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        messages(*words, gradient_accumulation_steps=8, **values)


def test_overlapped_exchanges_are_not_batched() -> None:
    assert not PipelineOptions.from_flags(["enable_overlap_p2p_comm"]).batched


@pytest.mark.parametrize(("count", "fitting"), [(1, 4), (4, 0), (5, 8), (8, 0), (9, 0)])
def test_how_many_micro_batches_an_interleaved_pipeline_fills_up(count: int, fitting: int) -> None:
    text = messages(virtual_pp_degree=2, gradient_accumulation_steps=count)
    assert ("fill" in text or "discarded" in text) == bool(fitting)
    assert not fitting or f"runs {fitting} micro-batches, so {fitting - count} in every step " in text
    assert "discarded" not in messages(gradient_accumulation_steps=count)


def test_dropout_in_an_interleaved_pipeline_is_told() -> None:
    interleaved = {"virtual_pp_degree": 2, "gradient_accumulation_steps": 8}
    assert "dropout masks differ from" in messages(hidden_dropout_prob=0.1, **interleaved)
    assert "masks" not in messages(hidden_dropout_prob=0.1)
