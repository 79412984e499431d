"""`erniekit train --try` of a model that speaks: one recording by heart, and its sound."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile

from erniekit.build.model import open_tokenizer
from erniekit.config import Config
from erniekit.errors import DataError, UserError
from erniekit.runners import overfit_speech
from erniekit.runners.overfit_check import overfit_check
from erniekit.runners.overfit_speech import equal_share, first_recording
from tests.runners.coded_speech import coded_speech


@pytest.mark.parametrize(
    ("written", "share"),
    [([[1, 2, 3], [4, 5, 6]], 1.0), ([[1, 2], [4, 5]], 4 / 6), ([[1, 2, 9, 9], [4, 5, 6, 9]], 5 / 8), ([[], []], 0.0)],
)
def test_codes_are_compared_place_by_place(written: list[list[int]], share: float) -> None:
    expected = np.array([[1, 2, 3], [4, 5, 6]])
    assert equal_share(np.array(written, np.int64).reshape(2, -1), expected) == pytest.approx(share)


def test_a_recording_that_fits_is_looked_for(make_config: Callable[..., Config], tmp_path: Path) -> None:
    values: dict[str, Any] = {"stage": "TTS", "tts_objective": "masked", "train_dataset_type": "codes"}
    folder = str(coded_speech(tmp_path / "codes"))
    config = make_config(**values, train_dataset_path=folder, max_seq_len=16)
    with pytest.raises(DataError, match=r"none of \d+ records fits max_seq_len 16; raise it"):
        first_recording(config, open_tokenizer(config)[0])


def test_codes_are_written_by_the_seed_and_heard_on_the_device(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def record(*values: Any) -> Any:
        given.append(values[-1])
        raise UserError("enough")

    monkeypatch.setattr(overfit_speech, "code_layout", lambda config: None)
    monkeypatch.setattr(overfit_speech, "codec_of_run", lambda config: SimpleNamespace(folder=Path("codec"), levels=2))
    monkeypatch.setattr(overfit_speech, "Unmasking", record)
    monkeypatch.setattr(overfit_speech, "codec_opener", record)
    monkeypatch.setattr(overfit_speech, "MaskedCodes", SimpleNamespace)
    dataset = SimpleNamespace(drawing=SimpleNamespace())
    recording: Any = SimpleNamespace(config=make_config(stage="TTS", seed=7, device="cpu"), dataset=dataset)
    for method, argument in (("_written_by", SimpleNamespace(config=None)), ("_write_sound", None)):
        with pytest.raises(UserError, match="enough"):
            getattr(overfit_speech.RecordingToLearn, method)(recording, argument)
    assert given == [7, "cpu"]


def test_who_listens_is_the_judge_that_is_named(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(overfit_speech, "open_judge", lambda name, texts: asked.append(name))
    monkeypatch.setattr(overfit_speech, "is_importable", lambda module: True)
    speech = {"stage": "TTS", "train_dataset_type": "codes", "eval_dataset_path": "codes", "eval_dataset_type": "codes"}
    judged = {"eval_answers": 4, "do_eval": True, "speech_judge": "ears"}
    for values in (judged, {}, {"text_frontend": "phonemes"}):
        overfit_speech._judge(make_config(**speech, **values), "one two")
    assert asked == ["ears", "pocketsphinx"]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["masked", "ar_nar"])
def test_a_recording_is_learned_and_said(
    make_config: Callable[..., Config], tmp_path: Path, logged: list[str], objective: str
) -> None:
    values: dict[str, Any] = {"stage": "TTS", "tts_objective": objective, "train_dataset_type": "codes"}
    config = make_config(**values, train_dataset_path=str(coded_speech(tmp_path / "codes")))
    assert overfit_check(config, seconds=math.inf, steps=300)
    folder = tmp_path / "run-try"
    assert sorted(path.name for path in folder.iterdir()) == ["original.wav", "spoken.wav"]
    lengths = {len(soundfile.read(folder / name)[0]) for name in ("original.wav", "spoken.wav")}
    assert len(lengths) == 1 and lengths.pop() > 0
    assert logged[-1].startswith("OK: the model learned the sample")
    written = re.search(r"([\d.]+)% of the codes, ", logged[-1])
    assert written and float(written[1]) >= 99.0
    assert not (tmp_path / "run").exists()
