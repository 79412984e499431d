"""Which files a configuration names as sources of training and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from erniekit.build.data import has_evaluation_data
from erniekit.build.sources import evaluation_sources, training_sources
from erniekit.config import Config
from erniekit.data.split import Split


@pytest.mark.proves("eval_split")
def test_both_parts_of_a_split_come_from_the_training_files(make_config: Callable[..., Config]) -> None:
    config = make_config(
        train_dataset_path="a.jsonl,b.jsonl", train_dataset_type="erniekit,alpaca", train_dataset_prob="0.3,0.7",
        eval_split=0.2, seed=5,
    )  # fmt: skip
    training, held_out = training_sources(config), evaluation_sources(config)
    assert [source.split for source in training] == [Split(0.2, 5, False)] * 2
    assert held_out == [replace(source, split=Split(0.2, 5, True)) for source in training]
    assert has_evaluation_data(config) and not has_evaluation_data(make_config())
    assert training_sources(make_config())[0].split is None


def test_files_with_their_formats_and_weights(make_config: Callable[..., Config], records: Path, pairs: Path) -> None:
    asked = {"path": [str(records), str(pairs)], "type": ["erniekit", "messages"], "prob": [0.25, 0.75]}

    def seen(sources: list[Any]) -> list[tuple[Any, ...]]:
        return [(source.path, source.kind, source.probability) for source in sources]

    for which, read in (("train", training_sources), ("eval", evaluation_sources)):
        config = make_config(**{f"{which}_dataset_{name}": value for name, value in asked.items()})
        assert seen(read(config)) == [(records, "erniekit", 0.25), (pairs, "messages", 0.75)]
