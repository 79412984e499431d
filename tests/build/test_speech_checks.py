"""What only stage TTS asks for is refused before a run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from erniekit.build import speech_checks
from erniekit.config import Config
from erniekit.errors import UserError
from tests.model.tiny_speech import omnivoice_config, vall_e_config

MODELS = {"masked": omnivoice_config(), "ar_nar": vall_e_config()}
LISTENER = Path("examples/models/tiny-listener")


def config(**values: Any) -> Config:
    smallest = {"stage": "TTS", "model_name_or_path": "m", "output_dir": "o", "train_dataset_path": "t"}
    return Config.from_mapping(smallest | values)


def levels(objective: str) -> int:
    return int(MODELS[objective].own["num_audio_codebook"])


@pytest.mark.parametrize("objective", MODELS)
def test_weights_are_as_many_as_the_levels_of_the_model(objective: str) -> None:
    own = {"tts_objective": objective}
    many = levels(objective)
    right = ",".join("1" * many)
    speech_checks.check_speech(config(**own, audio_codebook_weights=right), MODELS[objective])
    with pytest.raises(UserError, match=f"`audio_codebook_weights`: {many + 1} weights for {many} levels"):
        speech_checks.check_speech(config(**own, audio_codebook_weights=f"{right},1"), MODELS[objective])


def test_levels_are_drawn_and_adapted_only_where_there_are_any() -> None:
    many = levels("ar_nar")
    own = {"tts_objective": "ar_nar", "codebook_sampling": ",".join("1" * (many + 1))}
    with pytest.raises(UserError, match=f"{many + 1} weights for {many} levels"):
        speech_checks.check_speech(config(**own), MODELS["ar_nar"])
    adapted = {"tts_objective": "ar_nar", "lora": True, "lora_codebooks": str(many)}
    with pytest.raises(UserError, match=f"there is no level {many}"):
        speech_checks.check_speech(config(**adapted), MODELS["ar_nar"])


def test_phonemes_need_espeak(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"tts_objective": "ar_nar", "text_frontend": "phonemes"}
    monkeypatch.setattr(speech_checks, "is_importable", lambda name: False)
    with pytest.raises(UserError, match="needs espeak-ng"):
        speech_checks.check_speech(config(**own), MODELS["ar_nar"])
    speech_checks.check_speech(config(tts_objective="ar_nar"), MODELS["ar_nar"])
    monkeypatch.setattr(speech_checks, "is_importable", lambda name: name == "espeakng_loader")
    speech_checks.check_speech(config(**own), MODELS["ar_nar"])


def judged(judge: str, **values: Any) -> Config:
    asked = {"do_eval": True, "eval_dataset_path": "e", "eval_answers": 2, "speech_judge": judge}
    return config(**asked | values)


@pytest.mark.proves("speech_judge")
def test_a_judge_can_be_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = {"jiwer", "pocketsphinx"}
    monkeypatch.setattr(speech_checks, "is_importable", lambda name: name in there)
    monkeypatch.setattr(speech_checks, "absent_libraries", lambda names: [name for name in names if name not in there])
    speech_checks.check_judge(judged("pocketsphinx"))
    speech_checks.check_judge(judged(str(LISTENER)))
    with pytest.raises(UserError, match="is neither pocketsphinx nor the folder of a model"):
        speech_checks.check_judge(judged(str(tmp_path)))
    with pytest.raises(UserError, match="hears nothing; name one that transcribes"):
        speech_checks.check_judge(judged("examples/models/tiny-ernie"))
    there.discard("pocketsphinx")
    with pytest.raises(UserError, match="pocketsphinx is not installed"):
        speech_checks.check_judge(judged("pocketsphinx"))
    there.discard("jiwer")
    with pytest.raises(UserError, match="need the library jiwer"):
        speech_checks.check_judge(judged(str(LISTENER)))


def test_nobody_judges_where_nothing_is_said() -> None:
    speech_checks.check_judge(judged("nowhere", eval_answers=0))
    speech_checks.check_judge(config())


@pytest.mark.proves("metric_for_best_model", "eval_answers")
def test_the_most_similar_voice_is_chosen_where_voices_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = judged("", metric_for_best_model="speaker_similarity")
    monkeypatch.setattr(speech_checks, "is_importable", lambda name: name == "resemblyzer")
    speech_checks.check_voices(asked)
    monkeypatch.setattr(speech_checks, "is_importable", lambda name: False)
    with pytest.raises(UserError, match="eval_speaker_similarity`: Resemblyzer is not installed"):
        speech_checks.check_voices(asked)
    speech_checks.check_voices(judged(""))
