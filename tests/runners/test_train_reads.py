"""What training and evaluation hand on of a configuration; nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.build.text_reading import TextReading
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


@pytest.fixture
def coded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Codes of 50 frames a second; what is looked for and written down."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(train, "codec_of_run", lambda config: SimpleNamespace(folder=Path("codec"), frame_rate=50))
    monkeypatch.setattr(train, "codec_candidates", lambda folders, sources: found.update(sources) or [])
    monkeypatch.setattr(train, "differing_codecs", lambda folder, others: [])
    monkeypatch.setattr(train, "training_sources", lambda config: [])
    monkeypatch.setattr(train, "measured_pace", lambda texts: 7.0)
    monkeypatch.setattr(train, "write_text_reading", lambda folder, reading: found.update(reading=reading))
    return found


READING = {"text_frontend": "phonemes", "prompt_seconds": [2, 9]}


@pytest.mark.parametrize(
    ("values", "reading"),
    [
        (READING | {"tts_objective": "ar_nar"}, TextReading("phonemes", 7.0, True, 9)),
        (READING | {"language_probability": 0}, TextReading("phonemes", 7.0, False, None)),
        ({}, TextReading("tokenizer", 7.0, True, None)),
    ],
    ids=str,
)
def test_how_texts_are_read_is_written_down(
    make_config: MakeConfig, coded: dict[str, Any], values: dict[str, Any], reading: TextReading
) -> None:
    train._tell_codes(make_config(stage="TTS", train_dataset_path="codes", **values), writes=True)
    assert coded == {"train_dataset_path": ("codes",), "reading": reading}


@pytest.mark.parametrize(("known", "anew"), [("phonemes", False), ("characters", True)])
def test_what_a_text_was_to_the_model_is_compared(
    make_config: MakeConfig,
    coded: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    logged: list[str],
    known: str,
    anew: bool,
) -> None:
    monkeypatch.setattr(train, "read_text_reading", lambda folders: SimpleNamespace(frontend=known))
    config = make_config(stage="TTS", continue_training=True, text_frontend="phonemes")
    train._tell_codes(config, writes=False)
    told = [line for line in logged if "it learns to read anew" in line]
    assert len(told) == anew
    assert all("text_frontend: phonemes, and the model has been trained with characters" in line for line in told)
