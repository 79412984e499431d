"""What training and evaluation hand on of a configuration; nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.config import Config
from erniekit.distributed.topology import Topology
from erniekit.inference.answer_eval import SAMPLES_FILE
from erniekit.runners import evaluate, train

MakeConfig = Callable[..., Config]


@pytest.mark.proves("max_evaluate_steps")
def test_an_evaluation_has_as_many_batches_as_asked(make_config: MakeConfig) -> None:
    data: Any = SimpleNamespace(evaluation_plan=SimpleNamespace(dataset=SimpleNamespace(location=None)))
    run: Any = train._evaluation(make_config(max_evaluate_steps=3), None, data, None, None, None)  # type: ignore[arg-type]
    assert run.keywords["max_batches"] == 3


@pytest.mark.proves("weight_decay")
def test_the_decay_is_described(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(train, "logger", SimpleNamespace(debug=said.append, info=said.append))
    train._describe_optimizer(make_config(weight_decay=0.25), {}, Topology())
    assert "weight decay 0.25" in said[0]


@pytest.mark.proves("eval_answers", "text_normalizer")
def test_as_many_answers_are_written_as_asked(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(evaluate, "GenerationEvaluator", lambda *parts: told.extend(parts))
    mesh: Any = SimpleNamespace(rank=0, topology=Topology())
    held_out = {"do_eval": True, "eval_dataset_path": "e.jsonl"}
    for count in (0, 3):
        config = make_config(**held_out, eval_answers=count, text_normalizer="english")
        evaluate.build_generation_evaluator(config, None, object(), mesh)  # type: ignore[arg-type]
    (sources, _, _, count, file, normalizer, _) = told
    assert count == 3 and normalizer == "english" and str(sources[0].path) == "e.jsonl" and file.name == SAMPLES_FILE


@pytest.mark.proves("max_evaluate_steps")
def test_an_evaluation_alone_has_as_many_batches_as_asked(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EvaluationBeginsError(Exception):
        pass

    def begins(*parts: Any, max_batches: int, **named: Any) -> None:
        assert max_batches == 3
        raise EvaluationBeginsError

    dataset = SimpleNamespace(report="", location=None)
    objectives = SimpleNamespace(evaluation=lambda *parts: None)
    replacements: dict[str, Any] = {name: lambda *parts, **named: None for name in (
        "initial_weights", "adapter_plan", "join_ranks", "announce_dense_mask", "open_model", "evaluation_ranks",
        "build_generation_evaluator", "evaluation_plan", "dp_rank_of", "evaluation_dataset", "reads_data",
    )}  # fmt: skip
    replacements |= {
        "begin": lambda config: (None, None, None),
        "topology_and_rank": lambda *parts: (Topology(), 1),
        "broadcast_dataset_index": lambda *parts: dataset,
        "stage_objectives": lambda config: objectives,
        "evaluate": begins,
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(evaluate, name, replacement)
    with pytest.raises(EvaluationBeginsError):
        evaluate.run_evaluation(make_config(max_evaluate_steps=3))


def test_a_model_that_goes_on_is_told_when_it_learns_to_read_anew(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    codec = SimpleNamespace(folder=Path("codec"), frame_rate=0)
    for name, value in {"codec_of_run": codec, "codec_candidates": [], "differing_codecs": []}.items():
        monkeypatch.setattr(train, name, lambda *given, value=value: value)
    monkeypatch.setattr(train, "read_text_reading", lambda folders: SimpleNamespace(frontend="phonemes"))
    for goes_on in (True, False):
        logged.clear()
        train._tell_codes(make_config(stage="TTS", continue_training=goes_on), writes=False)
        assert any("it learns to read anew" in line for line in logged) == goes_on
