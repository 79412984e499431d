"""/v1/audio: transcripts equal those of `erniekit transcribe`, sound equals that of `erniekit speak`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from erniekit.config.sections.speaking import SpeakingParameters
from erniekit.inference.engine import ChatModel
from erniekit.inference.sampling import Sampling
from erniekit.inference.speaking import Utterance
from erniekit.inference.speaking.speaker import SpeechModel
from erniekit.inference.transcribe import TranscriptionSettings, transcribe
from erniekit.serving.served import Served
from tests.inference.listener import listener_folder, write_sound
from tests.inference.speaking.speaker_folder import speaker_folder
from tests.serving.asking import app_of, ask, serving


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = listener_folder(tmp_path_factory.mktemp("listener"))
    with serving(lambda: ChatModel.load(folder)) as served:
        yield served


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = speaker_folder(tmp_path_factory.mktemp("speaker"))
    with serving(lambda: SpeechModel.load(folder)) as served:
        served.speaking = SpeakingParameters(unmask_steps=2)
        yield served


def post_form(served: Served, path: Path, **fields: str) -> Any:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app_of(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            files = {"file": (path.name, path.read_bytes(), "audio/wav")}
            return await client.post("/v1/audio/transcriptions", files=files, data={"model": "tiny", **fields})

    return asyncio.run(run())


def test_transcripts_are_those_of_transcribe(listener: Served, tmp_path: Path) -> None:
    path = write_sound(tmp_path / "a.wav", 1.3)
    (expected,) = transcribe(listener.chat, [path], TranscriptionSettings())
    assert len(expected.pieces) > 1 and expected.text
    assert post_form(listener, path).json() == {"text": expected.text}
    whole = post_form(listener, path, response_format="verbose_json").json()
    assert [segment["text"] for segment in whole["segments"]] == [piece.text.strip() for piece in expected.pieces]
    assert whole["duration"] == pytest.approx(1.3)
    assert post_form(listener, path, response_format="srt").text.startswith("1\n00:00:00,000 --> ")


def test_what_is_no_recording_is_refused(listener: Served, served: Served, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"no sound")
    broken = post_form(listener, tmp_path / "a.wav")
    assert broken.status_code == 400 and str(tmp_path) not in broken.text and "recording" in broken.text
    assert ask(listener, "/v1/audio/transcriptions", b"x").status_code == 400
    assert post_form(listener, tmp_path / "a.wav", response_format="doc").json()["error"]["param"] == "response_format"
    assert post_form(listener, tmp_path / "a.wav", prompt="words").json()["error"]["code"] == "unknown_field"
    assert post_form(served, tmp_path / "a.wav").json()["error"]["code"] == "wrong_model"
    assert listener.places.taken == 0


def test_a_recording_within_a_message(listener: Served, tmp_path: Path) -> None:
    path = write_sound(tmp_path / "a.wav", 0.3)
    sound = {"data": base64.b64encode(path.read_bytes()).decode(), "format": "wav"}
    parts = [{"type": "input_audio", "input_audio": sound}, {"type": "text", "text": "What is said?"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 6}
    answered = ask(listener, "/v1/chat/completions", body)
    assert answered.status_code == 200, answered.text
    other = ask(listener, "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": parts[1:]}]})
    assert other.json()["usage"]["prompt_tokens"] < answered.json()["usage"]["prompt_tokens"]
    parts[0]["input_audio"] = {**sound, "data": "?"}
    assert "base64" in ask(listener, "/v1/chat/completions", body).json()["error"]["message"]


def test_sound_is_that_of_speak(speaker: Served) -> None:
    (piece,) = speaker.speech.speak([Utterance("one two")], SpeakingParameters(unmask_steps=2), Sampling())
    for form in ("wav", "flac"):
        response = ask(speaker, "/v1/audio/speech", {"input": "one two", "voice": "alloy", "response_format": form})
        assert response.status_code == 200 and response.headers["content-type"] == f"audio/{form}", response.text
        sound, rate = soundfile.read(BytesIO(response.content), dtype="float32")
        assert rate == 8000 and np.abs(sound - piece.sound).max() < 1e-3
    raw = ask(speaker, "/v1/audio/speech", {"input": "one two", "voice": "alloy", "response_format": "pcm"})
    assert len(raw.content) == 2 * len(piece.sound)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": "x" * 5000}, "input"),
        ({"input": "x", "voice": "onyx"}, "voice"),
        ({"input": "x", "response_format": "mp3"}, "response_format"),
        ({"input": "x", "speed": 9}, "speed"),
        ({"input": "x", "stream_format": "sse"}, "stream_format"),
    ],
)
def test_what_cannot_be_spoken_is_refused(speaker: Served, body: dict, param: str) -> None:
    response = ask(speaker, "/v1/audio/speech", body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_a_model_that_speaks_writes_no_text(speaker: Served) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert ask(speaker, "/v1/chat/completions", body).json()["error"]["code"] == "wrong_model"
    assert ask(speaker, "/v1/audio/speech", {"input": " "}).status_code == 400
    assert speaker.places.taken == 0
