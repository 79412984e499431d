"""Recordings of any length become transcripts: chunks in order, batches that change nothing, files that say when."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from erniekit.data.conversation import USER, Conversation, Turn
from erniekit.data.media.clip import Clip, ContentClip
from erniekit.data.templates.transcription import Request
from erniekit.errors import DataError
from erniekit.export.trained_model import PARAMETERS_FILE
from erniekit.inference import transcribe as module
from erniekit.inference.engine import ChatModel
from erniekit.inference.sampling import Sampling
from erniekit.inference.transcribe import Failure, Piece, Transcript, TranscriptionSettings, transcribe
from erniekit.inference.transcript_files import content, plan, write_transcript
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.weights import save_model_folder
from tests.data.vocabularies import write_tekken
from tests.inference.listener import WINDOW_SECONDS, listener_folder, write_sound
from tests.model.tiny_audio import VOXTRAL

SHORT = TranscriptionSettings(max_new_tokens=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ChatModel:
    return ChatModel.load(listener_folder(tmp_path_factory.mktemp("listener")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    for number, seconds in enumerate((1.3, 0.2, 0.9)):
        write_sound(folder / f"{number}.wav", seconds, number)
    return folder


def by_name(results: Any) -> dict[str, Transcript | Failure]:
    return {result.path.name: result for result in results}


def test_neither_batches_nor_other_recordings_change_a_transcript(
    model: ChatModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = sorted(folder.glob("*.wav"))
    alone = {path.name: next(iter(transcribe(model, [path], SHORT))) for path in paths}
    monkeypatch.setattr(module, "BATCHES_READ", 2)
    together = by_name(transcribe(model, paths, replace(SHORT, batch_size=2)))
    assert {name: found.pieces for name, found in together.items()} == {
        name: found.pieces for name, found in alone.items()
    }
    lengths = {name: found.seconds for name, found in together.items()}
    assert lengths == pytest.approx({"0.wav": 1.3, "1.wav": 0.2, "2.wav": 0.9}, abs=1e-3)
    for found in together.values():
        ends = [piece.end for piece in found.pieces]
        assert [0.0, *ends[:-1]] == [piece.start for piece in found.pieces]
        assert max(piece.end - piece.start for piece in found.pieces) <= WINDOW_SECONDS + 1e-6
        assert found.compute_seconds > 0


def test_a_short_recording_is_asked_for_as_in_training(model: ChatModel, folder: Path) -> None:
    path = folder / "1.wav"
    heard = Turn(USER, "", clips=(ContentClip(0, Clip(str(path))),))
    prompt = model.encode(Conversation((heard,), transcribes=True))
    (tokens,) = model.answer_batch([prompt], Sampling(max_new_tokens=6))
    (found,) = transcribe(model, [path], SHORT)
    assert [piece.text for piece in found.pieces] == [model.tokenizer.decode(tokens)]


def test_chunks_may_be_shorter_or_longer_than_a_window(model: ChatModel, folder: Path) -> None:
    for seconds, chunks in ((0.3, 5), (0.7, 2), (2.0, 1)):
        (found,) = transcribe(model, [folder / "0.wav"], replace(SHORT, chunk_seconds=seconds))
        assert len(found.pieces) >= chunks and found.seconds == pytest.approx(1.3, abs=1e-3)
    with pytest.raises(DataError, match=r"a chunk of 900 s .* --chunk-seconds"):
        list(transcribe(model, [folder / "0.wav"], replace(SHORT, chunk_seconds=900)))


def test_silence_is_not_transcribed(model: ChatModel, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "quiet.wav", np.zeros(8000), 16_000)
    (found,) = transcribe(model, [tmp_path / "quiet.wav"], SHORT)
    assert {piece.text for piece in found.pieces} == {""} and found.seconds == 0.5
    soundfile.write(tmp_path / "click.wav", np.full(300, 0.5), 16_000)  # two frames: no state of the encoder
    (found,) = transcribe(model, [tmp_path / "click.wav"], SHORT)
    assert [piece.text for piece in found.pieces] == [""]


def test_one_that_cannot_be_read_leaves_the_others(model: ChatModel, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.wav").write_text("no sound")
    results = by_name(transcribe(model, [tmp_path / "bad.wav", folder / "1.wav", tmp_path / "absent.wav"], SHORT))
    assert isinstance(results["1.wav"], Transcript)
    assert "bad.wav" in results["bad.wav"].reason and "no such file" in results["absent.wav"].reason


def test_a_recording_whose_end_is_missing_has_no_transcript(
    model: ChatModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.read_chunks

    def broken(path: Path, *rest: Any) -> Any:
        for number, chunk in enumerate(real(path, *rest)):
            if path.name == "0.wav" and number == 2:
                raise module.RecordingError(chunk.clip, "sound", "none")
            yield chunk

    monkeypatch.setattr(module, "read_chunks", broken)
    monkeypatch.setattr(module, "BATCHES_READ", 1)
    results = by_name(transcribe(model, sorted(folder.glob("*")), replace(SHORT, batch_size=1)))
    assert isinstance(results["0.wav"], Failure) and len(results) == 3
    assert isinstance(results["2.wav"], Transcript)


def test_a_model_that_reads_text_is_refused(model: ChatModel, folder: Path) -> None:
    with pytest.raises(DataError, match="no audio encoder"):
        list(transcribe(replace(model, audio=None), [folder / "0.wav"], SHORT))


def test_a_language_without_a_place_is_told(model: ChatModel, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    list(transcribe(model, [folder / "1.wav"], replace(SHORT, language="de")))
    assert "no effect: --language" in caplog.text


SAID = Transcript(
    Path("a.wav"),
    [Piece(0.0, 1.5, " one two"), Piece(1.5, 3.25, ""), Piece(3.25, 3725.0, "three & <four>\nfive", cut=True)],
    compute_seconds=37.25,
)


def test_what_the_files_hold() -> None:
    assert content(SAID, "text") == "one two three & <four> five\n"
    assert content(SAID, "srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\none two\n\n2\n00:00:03,250 --> 01:02:05,000\nthree & <four> five\n"
    )
    assert content(SAID, "vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\none two\n"
        "\n00:00:03.250 --> 01:02:05.000\nthree &amp; &lt;four&gt; five\n"
    )
    record = json.loads(content(SAID, "json", "en"))
    assert record["chunks"][2] == {"start": 3.25, "end": 3725.0, "text": "three & <four>\nfive", "cut": True}
    assert (record["seconds"], record["language"], record["real_time_factor"]) == (3725.0, "en", 0.01)
    assert json.loads(content(SAID, "json"))["language"] is None


def test_chinese_chunks_are_joined_without_spaces() -> None:
    pieces = [Piece(0, 1, "今天"), Piece(1, 2, "天气好"), Piece(2, 3, "OK"), Piece(3, 4, "bye")]
    assert Transcript(Path("a"), pieces).text == "今天天气好OK bye"


def test_folders_keep_their_shape(tmp_path: Path) -> None:
    for name in ("in/a.WAV", "in/b/c.mp3", "in/notes.txt", "in/b/d.m4a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    jobs = plan([tmp_path / "in", tmp_path / "in/a.WAV"], tmp_path / "out", "srt")
    assert [str(job.target.relative_to(tmp_path)) for job in jobs if job.target] == [
        "out/a.srt", "out/b/c.srt", "out/b/d.srt",
    ]  # fmt: skip
    (tmp_path / "links").mkdir()
    (tmp_path / "links/gone.wav").symlink_to(tmp_path / "absent.wav")
    assert len(plan([tmp_path / "links"], None, "text")) == 1  # told at the end, not left out
    with pytest.raises(DataError, match="no recording"):
        plan([tmp_path / "out"], None, "text") if (tmp_path / "out").mkdir() is None else None
    (tmp_path / "in/a.mp3").write_text("x")
    with pytest.raises(DataError, match=r"a\.WAV and .*a\.mp3|a\.mp3 and .*a\.WAV"):
        plan([tmp_path / "in"], tmp_path / "out", "srt")
    with pytest.raises(DataError, match="is one file"):
        plan([tmp_path / "in"], tmp_path / "all.txt", "text")
    (tmp_path / "one.txt").write_text("kept")
    with pytest.raises(DataError, match="never overwritten"):
        plan([tmp_path / "in/a.mp3"], tmp_path / "one.txt", "text")
    for name in ("all.jsonl", "other.WAV"):  # a folder of that name is hardly meant
        with pytest.raises(DataError, match=rf"--output .*{name}: is not a folder; a file of one transcript ends with"):
            plan([tmp_path / "in"], tmp_path / name, "text")
    with pytest.raises(DataError, match="never overwritten"):
        write_transcript("new", tmp_path / "one.txt")
    with pytest.raises(DataError, match=r"one\.txt/inner\.txt: cannot be written"):  # below a file
        write_transcript("new", tmp_path / "one.txt/inner.txt")
    assert (tmp_path / "one.txt").read_text() == "kept" and not list(tmp_path.glob(".writing*"))


def test_other_words_leave_the_language_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = listener_folder(tmp_path)
    (model / PARAMETERS_FILE).write_text("asr_prompt: 'Write {language}:'\nasr_language: de\n")
    assert ChatModel.load(model).request == Request("Write {language}:", "de")
    assert ChatModel.load(model, asr_prompt="In {language}:").request == Request("In {language}:", "de")
    assert "no effect" not in caplog.text


def test_voxtral_is_told_the_language(tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = write_tekken(tmp_path / "voxtral")
    shape = {
        **VOXTRAL,
        "text_config": {**VOXTRAL["text_config"], "vocab_size": 360},
        "audio_config": {**VOXTRAL["audio_config"], "max_source_positions": 20},
    }
    save_model_folder(build_model(ModelConfig.from_json(shape), None, seed=3), base)
    voxtral = ChatModel.load(base, asr_prompt="Write:")
    assert "no effect: asr_prompt, because the request for transcripts of this model has no words" in caplog.text
    asked: list[str] = []
    answer_batch = ChatModel.answer_batch

    def observed(self: ChatModel, prompts: Any, *rest: Any, **named: Any) -> Any:
        asked.append(self.tokenizer.decode(prompts[0].ids, skip_special_tokens=False))
        return answer_batch(self, prompts, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatModel, "answer_batch", observed)
        for language in ("", "en", "de"):
            (found,) = transcribe(voxtral, [folder / "1.wav"], replace(SHORT, language=language))
            assert isinstance(found, Transcript)
    assert ["lang:" in text for text in asked] == [False, True, True] and "lang:de" in asked[2]
    with pytest.raises(DataError, match="two-letter"):
        list(transcribe(voxtral, [folder / "1.wav"], replace(SHORT, language="german")))
