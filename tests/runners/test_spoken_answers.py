"""An evaluation speaks held-out texts, and a judge writes down what it hears."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile

from erniekit.config import Config
from erniekit.errors import ConfigurationError
from erniekit.inference.speaking import Piece, Utterance, spoken_answers
from erniekit.inference.speaking.speaker import SpeechModel
from erniekit.inference.speaking.spoken_answers import SPEECH_FOLDER
from erniekit.runners.evaluate import build_generation_evaluator, run_evaluation
from tests.runners.coded_speech import coded_speech


class Deaf:
    """Hears the same word in everything."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def write_down(self, sound: np.ndarray, sampling_rate: int) -> str:
        self.heard.append(len(sound))
        return "one"


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


@pytest.fixture
def evaluated(
    make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[dict[str, float], Path, Deaf]]:
    judge = Deaf()
    monkeypatch.setattr(spoken_answers, "open_judge", lambda name, texts: judge)
    monkeypatch.setattr("erniekit.build.preflight.check_judge", lambda config: None, raising=False)
    monkeypatch.setattr(spoken_answers, "open_voices", lambda: None)

    def evaluate(shards: int = 1, **values: Any) -> tuple[dict[str, float], Path, Deaf]:
        data = coded_speech(_fresh(tmp_path / "codes"))
        held_out = coded_speech(_fresh(tmp_path / "held-out"), 6, shards=shards)
        config = make_config(
            stage="TTS",
            do_train=False,
            do_eval=True,
            train_dataset_path=str(data),
            train_dataset_type="codes",
            eval_dataset_path=str(held_out),
            eval_dataset_type="codes",
            unmask_steps=2,
            **values,
        )
        return dict(run_evaluation(config).metrics), config.output_dir, judge

    return evaluate


@pytest.mark.proves("speech_judge", "eval_answers")
@pytest.mark.parametrize("objective", ["masked", "ar_nar"])
def test_held_out_texts_are_spoken_and_compared(evaluated: Callable[..., Any], objective: str) -> None:
    metrics, output, judge = evaluated(tts_objective=objective, eval_answers=4, speech_judge="pocketsphinx")
    lines = [json.loads(line) for line in (output / "eval_samples.jsonl").read_text().splitlines()]
    assert metrics["answers"] == len(lines) == len(judge.heard) == 4
    words = [line["expected"].lower().split() for line in lines]
    missed = sum(len(each) - ("one" in each) for each in words)
    assert metrics["wer"] == pytest.approx(missed / sum(map(len, words)))
    assert {line["answer"] for line in lines} == {"one"} and all("wer" in line and "cer" in line for line in lines)
    for line, samples in zip(lines, judge.heard, strict=True):
        path, _, number = line["place"].rpartition(":")
        assert Path(path).is_file() and int(number) >= 1
        assert len(soundfile.read(line["sound"])[0]) == samples
    assert len(list((output / SPEECH_FOLDER).iterdir())) == 4


def test_lines_of_several_shards_are_told_apart(evaluated: Callable[..., Any]) -> None:
    metrics, output, _ = evaluated(shards=3, tts_objective="ar_nar", eval_answers=-1)
    lines = [json.loads(line) for line in (output / "eval_samples.jsonl").read_text().splitlines()]
    assert metrics["answers"] == 6 == len({line["place"] for line in lines}) == len({line["sound"] for line in lines})
    for line in lines:
        path, _, number = line["place"].rpartition(":")
        record = json.loads(Path(path).read_text().splitlines()[int(number) - 1])
        assert record["text"] == line["expected"]


def test_without_a_judge_texts_are_spoken_and_not_compared(evaluated: Callable[..., Any]) -> None:
    metrics, output, judge = evaluated(tts_objective="masked", eval_answers=2)
    assert metrics["answers"] == 2 and "wer" not in metrics and not judge.heard
    assert len(list((output / SPEECH_FOLDER).iterdir())) == 2


@pytest.mark.proves("language_probability", "instruct_probability")
def test_what_a_model_is_never_told_is_not_told_in_evaluation(
    evaluated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[bool, set[str]]] = []

    def speak(model: SpeechModel, utterances: list[Utterance], *_: Any) -> Iterator[Piece]:
        told.append((model.tells_language, {each.instruct for each in utterances}))
        codes = np.zeros((2, 1), np.int64)
        return (Piece(number, 0, True, codes, np.zeros(8, np.float32), 0.0) for number in range(len(utterances)))

    monkeypatch.setattr(SpeechModel, "speak", speak)
    evaluated(tts_objective="masked", eval_answers=2)
    evaluated(tts_objective="masked", eval_answers=2, language_probability=0.0, instruct_probability=0.0)
    assert told == [(True, {"calm"}), (False, {""})]


def test_error_rates_of_stages_of_a_pipeline_are_refused_before_training(make_config: Callable[..., Config]) -> None:
    config = make_config(
        stage="TTS", do_eval=True, eval_dataset_path="a", eval_dataset_type="codes", eval_answers=2,
        train_dataset_path="a", train_dataset_type="codes", speech_judge="pocketsphinx", metric_for_best_model="wer",
    )  # fmt: skip
    mesh = SimpleNamespace(topology=SimpleNamespace(pipeline=2), rank=0)
    with pytest.raises(ConfigurationError, match="texts are not spoken where pipeline stages divide the model"):
        build_generation_evaluator(config, None, None, mesh)  # type: ignore[arg-type]


class TwoVoices:
    """Hears one voice and the other in turn; the cosine between them is 0.8."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def embedding(self, sound: np.ndarray, sampling_rate: int) -> np.ndarray | None:
        self.heard.append(len(sound))
        return np.array([3.0, 4.0]) if len(self.heard) % 2 else np.array([0.0, 1.0])


def test_voices_are_compared_with_those_of_the_recordings(
    evaluated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each recording once, its sound after that of its text."""
    voices = TwoVoices()
    monkeypatch.setattr(spoken_answers, "open_voices", lambda: voices)
    metrics, output, _ = evaluated(tts_objective="masked", eval_answers=3)
    lines = [json.loads(line) for line in (output / "eval_samples.jsonl").read_text().splitlines()]
    assert metrics["speaker_similarity"] == pytest.approx(0.8) and len(voices.heard) == 6
    assert [line["speaker_similarity"] for line in lines] == [0.8] * 3
