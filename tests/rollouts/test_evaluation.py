"""Held-out answers that are scored by rewards, and written where there is room."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from erniekit.rollouts.evaluation import RewardEvaluation
from erniekit.rollouts.prompts import SampledPrompt
from erniekit.rollouts.sampling import Sampled, Texts


def evaluation(samples: Path) -> RewardEvaluation:
    prompt = SampledPrompt("data.jsonl:1", [{"role": "user", "content": "q"}], {}, [1])
    rewards: Any = SimpleNamespace(names=("length",), score=lambda answers: np.ones((len(answers), 1)))
    dataset: Any = SimpleNamespace(prompts=[prompt])
    ranks: Any = SimpleNamespace(is_main_process=True)
    return RewardEvaluation(dataset, rewards, Texts(str, [2], 0), 8, samples, ranks)


def test_answers_are_written_with_their_rewards(tmp_path: Path) -> None:
    assert evaluation(tmp_path / "samples.jsonl")._scores([Sampled([5, 2], [], False)]) == [[1.0]]
    (line,) = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert json.loads(line)["answer"] == "[5]" and json.loads(line)["rewards"] == {"length": 1.0}


def test_a_file_that_cannot_be_written_ends_no_evaluation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "none" / "samples.jsonl"
    with caplog.at_level(logging.WARNING, "erniekit"):
        assert evaluation(path)._scores([Sampled([5, 2], [], False)]) == [[1.0]]
    assert f"could not write {path}: No such file or directory; the run goes on" in caplog.text
