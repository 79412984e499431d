"""What preference records become by way of a configuration: the preview, the counts, and the first pair of --try."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.build.model import open_tokenizer
from erniekit.build.step_count import cached_step_count
from erniekit.errors import DataError
from erniekit.runners import overfit_check
from erniekit.runners.preview import data_summary, preview, preview_data

PAIR = {"question": "What is 1 + 1?", "chosen": "2", "rejected": "3"}
SCORES = {"score_chosen": 2, "score_rejected": 1}
LONG_HISTORY = {**PAIR, "history": [["Count." + " Count." * 3, "1 2 3 4 5 6"]] * 3, "chosen": "two"}
LONG_QUESTION = {**PAIR, "question": "Count." + " Count." * 29}


@pytest.fixture
def on_pairs(make_config: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """A configuration of preference training on these records."""

    def make(records: list[dict[str, Any]], **parameters: Any) -> Any:
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        values = {"stage": "DPO", "train_dataset_path": str(path), "train_dataset_type": "alpaca", **parameters}
        return make_config(**values)

    return make


def test_the_preview_shows_pairs(on_pairs: Callable[..., Any]) -> None:
    text = preview(on_pairs([PAIR, LONG_HISTORY]))
    assert "row 0: 2 pairs" in text
    assert "chosen: [[two</s>]]" in text and "rejected: [[3</s>]]" in text
    assert "epoch 0: 2 samples" in text


def test_the_summary_counts_what_became_of_long_prompts(on_pairs: Callable[..., Any]) -> None:
    config = on_pairs([PAIR, LONG_HISTORY, LONG_QUESTION], max_prompt_len=60)
    summary = data_summary(config)
    assert "3 records, 2 kept, 1 dropped (their last question is longer than max_prompt_len)" in summary
    assert "1 shortened by dropping their oldest turns" in summary and "2 pairs" in summary
    assert cached_step_count(config) is not None
    assert cached_step_count(on_pairs([PAIR, LONG_HISTORY, LONG_QUESTION], max_prompt_len=50)) is None


def test_pairs_beyond_the_window_of_the_model_have_their_prompt_twice(
    on_pairs: Callable[..., Any], windowed_model: Path, tmp_path: Path
) -> None:
    told = "1 with their prompt twice (longer than a window of the model's attention)"
    config = on_pairs([PAIR, LONG_HISTORY], model_name_or_path=str(windowed_model), max_seq_len=256)
    assert told in data_summary(config)
    assert cached_step_count(config) is not None
    model_config = windowed_model / "config.json"
    other = tmp_path / "other"
    shutil.copytree(windowed_model, other)
    (other / "config.json").write_text(
        model_config.read_text().replace('"sliding_window": 40', '"sliding_window": 256')
    )
    wider = on_pairs([PAIR, LONG_HISTORY], model_name_or_path=str(other), max_seq_len=256)
    assert "twice" not in data_summary(wider)
    shown, expected = (
        [(part["targets"], part["parts"]) for row in preview_data(each)["rows"] for part in row["documents"]]
        for each in (config, wider)
    )
    assert len(shown) == 2 and sorted(shown, key=str) == sorted(expected, key=str)


def test_evaluation_reads_pairs_too(on_pairs: Callable[..., Any], tmp_path: Path) -> None:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text(json.dumps(PAIR) + "\n" + json.dumps(PAIR | {"chosen": 3}) + "\n", encoding="utf-8")
    parameters = {"do_eval": True, "eval_dataset_path": str(held_out), "eval_dataset_type": "alpaca"}
    with pytest.raises(DataError, match=r"held-out.jsonl:2: chosen: expected an answer: a text, or a list of turns"):
        data_summary(on_pairs([PAIR], **parameters))
    held_out.write_text(json.dumps(PAIR) + "\n", encoding="utf-8")
    assert "(alpaca preferences): 1 records, 1 kept" in data_summary(on_pairs([PAIR], **parameters)).split("steps:")[1]


def test_offsets_ask_for_scores(on_pairs: Callable[..., Any]) -> None:
    records = [PAIR | SCORES, PAIR]
    assert "2 pairs" in data_summary(on_pairs(records))
    with pytest.raises(DataError, match=r"pairs.jsonl:2: score_chosen: expected scores .*offset_alpha"):
        data_summary(on_pairs(records, offset_alpha=0.5))


def test_the_first_pair_of_a_try_is_that_of_a_run(
    on_pairs: Callable[..., Any], tmp_path: Path, logged: list[str]
) -> None:
    """With max_prompt_len and the policies of a run, and without reading on."""

    def first(records: list[dict[str, Any]], **parameters: Any) -> Any:
        config = on_pairs(records, **parameters)
        return overfit_check.first_sample(config, *open_tokenizer(config))

    location, sample = first([LONG_QUESTION, LONG_HISTORY, {"question": 1}], max_prompt_len=60)
    assert location.endswith("pairs.jsonl:2") and 20 < sample.pair.chosen + 1 <= 60
    assert logged == ["skipped 1 records before it, longer than max_seq_len 128 or max_prompt_len 60"]
    with pytest.raises(DataError, match=r"pairs.jsonl:1: prompt: expected at most 60 tokens"):
        first([LONG_QUESTION, PAIR], max_prompt_len=60, over_length_policy="error")
    with pytest.raises(DataError, match=r"pairs.jsonl:1: chosen: expected an answer"):
        first([PAIR | {"chosen": 2}, PAIR])
    with pytest.raises(DataError, match=r"none of 1 records fits max_seq_len 128 or max_prompt_len 60"):
        first([LONG_QUESTION], max_prompt_len=60)
