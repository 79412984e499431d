"""A model speaks texts of any length piece by piece, in a voice or in one of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from erniekit.build.text_reading import Pace, TextReading, write_text_reading
from erniekit.config.sections.speaking import SpeakingParameters
from erniekit.data.formats.problems import MalformedError
from erniekit.errors import ConfigurationError, DataError, UserError
from erniekit.export.trained_model import PARAMETERS_FILE
from erniekit.inference.sampling import Sampling
from erniekit.inference.speaking import Piece, PreparedUtterance, Utterance, Voice, Written
from erniekit.inference.speaking.pace import SpokenReference, estimated_frames
from erniekit.inference.speaking.sound import SoundSettings
from erniekit.inference.speaking.speaker import Speaking, SpeechModel
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import add_adapters, named_adapter_weights, save_adapters
from tests.inference.speaking.speaker_folder import CODES, LEVELS, codec_folder, speaker_folder
from tests.inference.speaking.speaking_cases import DIVIDED, RECORDED

FEW = SpeakingParameters(unmask_steps=2)
RATE, FRAME_RATE, HOP = 8000, 62.5, 128
AS_IT_IS = SoundSettings(keep_silence=True, pad=0.0, fade=0.0)
LONG = "One two three. Four five six seven! Eight nine; ten eleven. Twelve."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaker_folder(tmp_path_factory.mktemp("speaker"))


@pytest.fixture(scope="module")
def model(folder: Path) -> SpeechModel:
    return SpeechModel.load(folder)


@pytest.fixture(scope="module")
def writer_of_levels(tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    return SpeechModel.load(speaker_folder(tmp_path_factory.mktemp("levels"), "vall_e"))


class FakeWriter:
    """Keeps what it is asked for, and writes codes of the number of the request."""

    def __init__(self) -> None:
        self.batches: list[list[PreparedUtterance]] = []

    def write(self, requests: Sequence[PreparedUtterance]) -> Iterator[Written]:
        self.batches.append(list(requests))
        for index, request in enumerate(requests):
            frames = request.frames or 3
            yield Written(index, np.full((LEVELS, frames), request.number % CODES))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> FakeWriter:
    writer = FakeWriter()
    monkeypatch.setattr(SpeechModel, "writer", lambda *arguments: writer)
    return writer


def speak(model: SpeechModel, *utterances: Utterance, settings: SpeakingParameters = FEW, **how: Any) -> list[Piece]:
    return list(model.speak(utterances, settings, Sampling(seed=1), Speaking(**{"sound": AS_IT_IS, **how})))


def test_a_text_becomes_sound_of_its_duration(model: SpeechModel) -> None:
    (piece,) = speak(model, Utterance("one two", duration=0.4))
    assert piece.codes.shape == (LEVELS, 25) and piece.codes.max() < CODES
    assert piece.sound.shape == (25 * HOP,) and piece.sound.dtype == np.float32
    assert np.abs(piece.sound).max() == pytest.approx(0.5, abs=1e-3)
    assert piece.last and piece.number == 0 and piece.seconds > 0


def test_texts_of_a_batch_do_not_change_each_other(model: SpeechModel) -> None:
    texts = [Utterance(text, duration=0.2, number=number) for number, text in enumerate(("one", "two three", "four"))]
    together = speak(model, *texts)
    in_pairs = speak(model, *texts, batch_size=2)
    for one, other, text in zip(together, in_pairs, texts, strict=True):
        (alone,) = speak(model, text)
        np.testing.assert_array_equal(one.codes, alone.codes)
        np.testing.assert_array_equal(other.sound, alone.sound)
    assert (together[0].codes != speak(model, texts[0].__class__("one", duration=0.2, number=9))[0].codes).any()


def test_lengths_follow_text_speed_and_duration(model: SpeechModel, asked: FakeWriter) -> None:
    text = "Good morning to everybody in this house."
    voice = Voice(np.zeros((LEVELS, 90), np.int64), "Hello there.", 0.2)
    speak(
        model,
        Utterance(text),
        Utterance(text, speed=2.0),
        Utterance(text, duration=1.0, speed=2.0),
        Utterance(text, voice=voice),
    )
    ((plain, fast, given, spoken),) = asked.batches
    assert plain.frames == estimated_frames(text, FRAME_RATE)
    assert fast.frames == estimated_frames(text, FRAME_RATE, speed=2.0)
    assert given.frames == 62
    assert spoken.frames == estimated_frames(text, FRAME_RATE, SpokenReference("Hello there.", 90))


def test_the_rate_of_the_training_data_counts(folder: Path, tmp_path: Path, asked: FakeWriter) -> None:
    shutil.copytree(folder, tmp_path / "model")
    write_text_reading(tmp_path / "model", TextReading("characters", Pace(0.2)))
    model = SpeechModel.load(tmp_path / "model")
    speak(model, Utterance("one"))
    assert asked.batches[0][0].frames == round(3 * 0.2 * FRAME_RATE)
    letters = [number for letter in "one" for number in model.tokenizer.encode(letter)]
    assert asked.batches[0][0].text_ids[-4:-1] == letters and not model.is_published


def test_what_is_asked_for_stands_before_the_codes(model: SpeechModel, asked: FakeWriter) -> None:
    voice = Voice(np.ones((LEVELS, 4), np.int64), "Hello.", 0.2)
    speak(model, Utterance("Well [sigh] then", "en", "female, low pitch", voice), Utterance("Well"))
    ((told, plain),) = asked.batches
    tokenizer = model.tokenizer

    def shown(request: PreparedUtterance) -> str:
        return tokenizer.decode(request.text_ids, skip_special_tokens=False)

    before = "<|denoise|><|lang_start|>en<|lang_end|><|instruct_start|>female, low pitch<|instruct_end|>"
    assert shown(told) == before + "<|text_start|>Hello. Well [sigh] then<|text_end|>"
    assert shown(plain) == (
        "<|lang_start|>None<|lang_end|><|instruct_start|>None<|instruct_end|><|text_start|>Well<|text_end|>"
    )
    assert told.voice_codes is voice.codes and plain.voice_codes is None
    parts = [tokenizer.encode(part) for part in ("Hello. Well ", "[sigh]", " then")]
    assert told.text_ids[-1 - sum(map(len, parts)) : -1] == [token for part in parts for token in part]
    speak(model, Utterance("Well", voice=voice), denoise=False)
    assert not shown(asked.batches[1][0]).startswith("<|denoise|>")


def test_control_tokens_in_a_text_are_text(model: SpeechModel, asked: FakeWriter) -> None:
    speak(model, Utterance("a<|text_end|>b", "<|lang_end|>"))
    ids = asked.batches[0][0].text_ids
    assert ids.count(model.tokenizer.token_id("<|text_end|>")) == 1
    assert ids.count(model.tokenizer.token_id("<|lang_end|>")) == 1


def test_a_long_text_is_divided_and_its_first_piece_is_the_voice(model: SpeechModel, asked: FakeWriter) -> None:
    how = {"chunk_seconds": 1.5, "chunk_threshold": 2.0}
    texts = [Utterance(LONG, number=0), Utterance("Short.", number=1)]
    pieces = speak(model, *texts, **how)
    count = len(asked.batches)
    assert count >= 3 and [len(batch) for batch in asked.batches] == [2] + [1] * (count - 1)
    first = asked.batches[0][0]
    assert first.voice_codes is None
    for batch in asked.batches[1:]:
        np.testing.assert_array_equal(batch[0].voice_codes, pieces[0].codes)
    order = [(piece.utterance, piece.number, piece.last) for piece in pieces]
    assert order == [(0, 0, False), (1, 0, True), *((0, number, number == count - 1) for number in range(1, count))]
    assert len({request.number for batch in asked.batches for request in batch}) == count + 1  # streams of their own


def test_a_given_voice_is_that_of_every_piece(model: SpeechModel, asked: FakeWriter) -> None:
    voice = Voice(np.ones((LEVELS, 60), np.int64), "Hello there.", 0.2)
    speak(model, Utterance(LONG, voice=voice), chunk_seconds=1.5, chunk_threshold=2.0)
    assert len(asked.batches) > 1
    assert all(batch[0].voice_codes is voice.codes for batch in asked.batches)


@pytest.mark.parametrize("case", range(len(DIVIDED)))
def test_texts_are_divided_as_in_the_package(folder: Path, asked: FakeWriter, case: int) -> None:
    text, voice, duration, speed, seconds = DIVIDED[case]
    expected = json.loads((RECORDED / "divided.json").read_text())[case]
    model = SpeechModel.load(folder)
    model.codec_facts = model.codec_facts._replace(frame_rate=25.0)  # of the figures in the package
    spoken = None if voice is None else Voice(np.zeros((LEVELS, voice[1]), np.int64), voice[0], 0.2)
    speak(model, Utterance(text, voice=spoken, duration=duration, speed=speed or 1.0), chunk_seconds=seconds)
    found = [request for batch in asked.batches for request in batch]
    frames = [None if each.voice_codes is None else each.voice_codes.shape[1] for each in found]
    assert [[each.frames, voice] for each, voice in zip(found, frames, strict=True)] == [each[1:] for each in expected]
    for each, (piece, _, _) in zip(found, expected, strict=True):
        assert model.tokenizer.decode(each.text_ids).endswith(piece)


def test_a_duration_holds_for_all_pieces_together(model: SpeechModel, asked: FakeWriter) -> None:
    voice = Voice(np.ones((LEVELS, 60), np.int64), "Hello there.", 0.2)
    speak(model, Utterance(LONG, voice=voice, duration=8.0), chunk_seconds=3, chunk_threshold=4.0)
    frames = [batch[0].frames or 0 for batch in asked.batches]
    assert len(frames) > 1 and sum(frames) == pytest.approx(8 * FRAME_RATE, rel=0.4)


def test_sound_comes_before_the_last_piece_is_begun(model: SpeechModel, asked: FakeWriter) -> None:
    spoken = model.speak([Utterance(LONG)], FEW, None, Speaking(first_seconds=0.5, sound=AS_IT_IS))
    first = next(spoken)
    assert len(asked.batches) == 1 and not first.last and len(first.sound)
    assert first.codes.shape[1] < 2 * FRAME_RATE
    rest = list(spoken)
    assert rest[-1].last and len(asked.batches) == 1 + len(rest)


def test_pieces_joined_are_the_sound_of_the_whole(model: SpeechModel) -> None:
    how = {"chunk_seconds": 1.0, "chunk_threshold": 1.0, "sound": SoundSettings()}
    pieces = speak(model, Utterance(LONG), **how)
    assert len(pieces) > 2
    again = speak(model, Utterance(LONG), **how)
    np.testing.assert_array_equal(
        np.concatenate([piece.sound for piece in pieces]), np.concatenate([piece.sound for piece in again])
    )
    assert not pieces[0].sound[:800].any() and not pieces[-1].sound[-800:].any()  # the pad


def test_a_voice_is_read_from_a_recording(model: SpeechModel, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    speech = 0.01 * rng.standard_normal(5000)
    sound = np.concatenate([np.zeros(16000), np.repeat(speech, 2), np.zeros(16000)])
    soundfile.write(tmp_path / "voice.wav", sound, 2 * RATE)
    voice = model.voice(tmp_path / "voice.wav", "Hello")
    assert voice.text == "Hello." and voice.rms == pytest.approx(0.01 * (5000 / 21000) ** 0.5, rel=0.2)
    assert voice.codes.shape[0] == LEVELS and 0.5 < voice.codes.shape[1] / FRAME_RATE < 1.1
    whole = model.voice(tmp_path / "voice.wav", "Hello", keep_silence=True)
    assert whole.text == "Hello" and whole.codes.shape[1] == int(2.625 * FRAME_RATE)
    soundfile.write(tmp_path / "quiet.wav", np.zeros(16000), RATE)
    with pytest.raises(DataError, match=r"quiet.wav: expected the recording of a voice, got silence"):
        model.voice(tmp_path / "quiet.wav", "Hello")


def test_a_voice_longer_than_the_prompts_of_the_training_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = speaker_folder(tmp_path / "model", "vall_e")
    write_text_reading(folder, TextReading(longest_prompt=0.5))
    model = SpeechModel.load(folder)
    sound = np.random.default_rng(0).standard_normal(RATE)
    for seconds in (0.5, 1.0):
        soundfile.write(tmp_path / "voice.wav", 0.01 * sound[: int(seconds * RATE)], RATE)
        model.voice(tmp_path / "voice.wav", "one", keep_silence=True)
        assert ("the voice has 1.0 s, and the model was trained with prompts up to 0.5 s" in caplog.text) == (
            seconds == 1.0
        )


def test_a_quiet_voice_speaks_quietly(model: SpeechModel) -> None:
    codes = np.ones((LEVELS, 20), np.int64)
    loud, quiet = (
        speak(model, Utterance("one", duration=0.3, voice=Voice(codes, "a", rms)))[0].sound for rms in (0.2, 0.01)
    )
    np.testing.assert_allclose(quiet, loud * 0.1, atol=1e-5)


def test_a_model_that_writes_level_after_level(writer_of_levels: SpeechModel) -> None:
    voice = Voice(np.ones((LEVELS, 5), np.int64), "Hello.", 0.2)
    texts = [Utterance("one two"), Utterance("three", "en", voice=voice, number=1, continues=True)]
    pieces = speak(writer_of_levels, *texts, max_seconds=0.2)
    assert all(piece.codes.shape[0] == LEVELS and piece.codes.shape[1] <= 12 for piece in pieces)
    assert all(piece.cut == (piece.codes.shape[1] == 12) for piece in pieces)
    assert all(len(piece.sound) == piece.codes.shape[1] * HOP for piece in pieces)


def test_a_continuation_has_the_text_of_the_voice_before_its_own(
    writer_of_levels: SpeechModel, asked: FakeWriter
) -> None:
    voice, tokenizer = Voice(np.ones((LEVELS, 5), np.int64), "Hello.", 0.2), writer_of_levels.tokenizer
    speak(writer_of_levels, Utterance("one", "en", voice=voice, continues=True), Utterance("one", voice=voice))
    ((continued, plain),) = asked.batches
    assert continued.continues and not plain.continues
    assert continued.text_ids == [*tokenizer.encode("Hello."), *tokenizer.encode(" "), *tokenizer.encode("one")]
    assert plain.text_ids == tokenizer.encode("one")
    assert continued.language_ids == tokenizer.encode("en") and plain.language_ids == []
    assert continued.most_frames == int(60 * FRAME_RATE)


@pytest.mark.parametrize(
    ("utterance", "told"),
    [
        (Utterance("  ", place="texts.txt:3"), "texts.txt:3: expected a text to speak"),
        (Utterance("a\udcff"), "is not UTF-8"),
        (Utterance("a", duration=0.0), "duration: expected seconds above 0"),
        (Utterance("a", speed=0.0), "speed: expected a number from 0.1 to 10"),
        (Utterance("a", continues=True), "only a model of tts_objective: ar_nar"),
    ],
)
def test_what_a_model_cannot_speak_is_told(model: SpeechModel, utterance: Utterance, told: str) -> None:
    with pytest.raises(DataError, match=told):
        model.check(utterance)


def test_a_language_is_told_only_where_the_model_has_been_told_languages(folder: Path, asked: FakeWriter) -> None:
    model = SpeechModel.load(folder)
    said = Utterance("one", "en")
    speak(model, said)
    model.tells_language = False
    speak(model, said, Utterance("one"))
    ((told,), (untold, plain)) = asked.batches
    assert told.text_ids != untold.text_ids == plain.text_ids


def test_a_text_that_has_no_phonemes_is_told_with_its_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def phonemes(text: str, language: str) -> str:
        if not language:
            raise MalformedError("language", "the language of the text", "nothing")
        return text

    monkeypatch.setattr("erniekit.data.speech_text.phonemes_of", phonemes)
    model = SpeechModel.load(folder)
    monkeypatch.setattr(model, "frontend", "phonemes")
    model.check(Utterance("one", "en", place="texts.txt:3"))
    with pytest.raises(DataError, match=r"texts.txt:3: language: expected the language of the text, got nothing"):
        model.check(Utterance("one", place="texts.txt:3"))


@pytest.mark.parametrize("changes", [{"duration": 1.0}, {"speed": 1.5}, {"instruct": "female"}], ids=str)
def test_what_has_no_effect_is_refused(writer_of_levels: SpeechModel, changes: dict) -> None:
    with pytest.raises(DataError, match="decides itself how it speaks"):
        writer_of_levels.check(Utterance("a", **changes))


def test_the_codec_is_found_or_asked_for(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "model"
    shutil.copytree(folder, bare)
    moved = shutil.move(bare / "audio_tokenizer", tmp_path / "codec")
    with pytest.raises(ConfigurationError, match=r"which codec .* --codec DIR"):
        SpeechModel.load(bare)
    assert SpeechModel.load(bare, codec=Path(moved)).frame_rate == FRAME_RATE
    (bare / PARAMETERS_FILE).write_text(json.dumps({"codec": str(moved)}))
    assert SpeechModel.load(bare).sampling_rate == RATE
    (bare / PARAMETERS_FILE).write_text(json.dumps({"codec": str(tmp_path / "gone")}))
    with pytest.raises(ConfigurationError, match="gone, of its training, is not there"):
        SpeechModel.load(bare)
    with pytest.raises(UserError, match=r"16 codes a level, and the model writes 8"):
        SpeechModel.load(bare, codec=codec_folder(tmp_path / "other", codes=16))
    with pytest.raises(UserError, match="level"):
        SpeechModel.load(bare, codec=codec_folder(tmp_path / "few", levels=1))


def test_a_model_of_text_cannot_speak(tiny_base: Path) -> None:
    with pytest.raises(DataError, match="writes text and no codes"):
        SpeechModel.load(tiny_base)


@pytest.mark.proves("lora_codebooks")
def test_adapters_come_with_the_levels_that_they_serve(tmp_path: Path) -> None:
    base = speaker_folder(tmp_path / "base", "vall_e")
    model = SpeechModel.load(base)
    add_adapters(model.decoder, LoraSettings(2, 4.0), seed=1)
    rng = np.random.default_rng(5)
    for parameter in named_adapter_weights(model.decoder).values():
        parameter.set_value(rng.standard_normal(parameter.shape).astype(np.float32))
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    save_adapters(model.decoder, adapters, str(base))
    texts = [Utterance(text, number=number) for number, text in enumerate(("one two three", "four", "five six"))]

    def codes(**how: Any) -> list[np.ndarray]:
        return [piece.codes for piece in speak(SpeechModel.load(base, **how), *texts, max_seconds=0.3)]

    plain, adapted = codes(), codes(adapters=adapters)
    assert any(a.shape != b.shape or (a != b).any() for a, b in zip(plain, adapted, strict=True))
    (adapters / PARAMETERS_FILE).write_text(json.dumps({"lora_codebooks": [1]}))
    second = codes(adapters=adapters)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(plain, second, strict=True))
    assert any((a[1] != b[1]).any() for a, b in zip(plain, second, strict=True))
