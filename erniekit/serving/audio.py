"""POST /v1/audio/transcriptions and /v1/audio/speech."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from erniekit.data.media.clip import AudioInputs
from erniekit.data.placeholders import EncodedPrompt
from erniekit.inference.audio_prompts import prompt_inputs
from erniekit.inference.chunks import Chunk
from erniekit.inference.engine import ChatModel
from erniekit.inference.generation import make_request
from erniekit.inference.sampling import Sampling
from erniekit.inference.speaking import Piece as SpokenPiece
from erniekit.inference.speaking import Utterance
from erniekit.inference.speaking.sound_files import samples_of, sound_bytes, wav_header
from erniekit.inference.speaking.speaker import Speaking
from erniekit.inference.transcribe import ChunkPrompts, Piece, Transcript, TranscriptionSettings
from erniekit.inference.transcript_files import content
from erniekit.serving.answers import Answer, Question, answer_pieces
from erniekit.serving.endpoint import Reply, once
from erniekit.serving.errors import RefusedError
from erniekit.serving.fields import Fields, body_of
from erniekit.serving.merged import merged
from erniekit.serving.served import Served

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
CHUNKS_AT_ONCE = 16
MEDIA_TYPES = {"wav": "audio/wav", "flac": "audio/flac", "pcm": "audio/pcm"}
LONGEST_TEXT = 4096  # characters, as OpenAI has it


async def transcriptions(request: Request, served: Served) -> Reply:
    """Write down what is said in a recording that is sent as a form."""
    model = served.chat
    if model.audio is None:
        raise RefusedError(f"{served.name} has no audio encoder, so that it cannot listen", code="wrong_model")
    try:
        form = await request.form(max_files=1, max_fields=20)
    except MultiPartException as error:
        raise RefusedError(f"the body is no form: {error.message}") from None
    try:
        file = form.get("file")
        fields = Fields({name: value for name, value in form.items() if name != "file"})
        if not isinstance(file, UploadFile):
            raise RefusedError("file: expected a recording", param="file", code="missing_field")
        adapters = served.adapters_of(fields.text("model", ""))
        language, kind = fields.text("language", ""), fields.choice("response_format", FORMATS, "json")
        if fields.text("temperature", "0") not in ("0", "0.0"):
            raise RefusedError("temperature: transcripts take the likeliest words; leave it out", param="temperature")
        fields.end()
        with TemporaryDirectory(prefix="erniekit-server-") as folder:
            path = Path(folder) / f"recording{_suffix(file.filename)}"
            path.write_bytes(await file.read())
            listening = _Listening(served, model, path, TranscriptionSettings(language), adapters)
            transcript: Transcript = await once(request, listening.transcript())
    finally:
        await form.close()
    return Reply(_written(transcript, kind, language))


def _suffix(name: str | None) -> str:
    suffix = Path(name or "").suffix.lower()
    return suffix if suffix[1:].isalnum() and len(suffix) <= 6 else ".wav"


class _Listening:
    """Transcribes one recording: its chunks are answered side by side with the requests of others."""

    def __init__(
        self, served: Served, model: ChatModel, path: Path, settings: TranscriptionSettings, adapters: str
    ) -> None:
        self._served, self._model, self._path = served, model, path
        self._settings, self._adapters = settings, adapters

    async def transcript(self) -> Transcript:
        """Return the transcript.

        Raises:
            RecordingError: the recording cannot be read.
        """
        served, transcript = self._served, Transcript(self._path)
        with served.places.take():
            prompts, chunks = await served.prepare(self._open)
            while asked := await served.prepare(lambda: self._questions(prompts, chunks, transcript)):
                parts = [answer_pieces(served.engine, self._model, question) for _, question in asked]
                answers = [Answer() for _ in asked]
                async with aclosing(merged(parts)) as pieces:
                    async for number, piece in pieces:
                        answers[number].add(piece)
                for (chunk, _), answer in zip(asked, answers, strict=True):
                    transcript.pieces.append(_piece(chunk, answer.text, cut=answer.finished == "length"))
        transcript.pieces.sort()
        return transcript

    def _open(self) -> tuple[ChunkPrompts, Iterator[Chunk]]:
        assert self._model.audio is not None
        prompts = ChunkPrompts(self._model, self._model.audio, self._settings)
        return prompts, prompts.read(self._path)

    def _questions(
        self, prompts: ChunkPrompts, chunks: Iterator[Chunk], transcript: Transcript
    ) -> list[tuple[Chunk, Question]]:
        """Read the next chunks; what is silent among them is transcribed here, with nothing."""
        asked: list[tuple[Chunk, Question]] = []
        while len(asked) < CHUNKS_AT_ONCE and (chunk := next(chunks, None)) is not None:
            if prompts.says_nothing(chunk):
                transcript.pieces.append(_piece(chunk, ""))
                continue
            encoded, sound = prompts.of(chunk), chunk.sound
            arrays = _arrays(encoded, sound, self._model.audio)
            greedy = Sampling(max_new_tokens=prompts.longest_transcript(chunk))
            sampling = self._model.with_stop_tokens(greedy)
            request = make_request(self._model.decoder, encoded.ids, sampling, inputs=partial(dict, arrays))
            asked.append((chunk, Question(replace(request, adapters=self._adapters))))
        return asked


def _arrays(prompt: EncodedPrompt, sound: np.ndarray, inputs: AudioInputs | None) -> dict[str, np.ndarray]:
    """Return what the model reads of a chunk beside its tokens."""
    read = prompt_inputs(prompt, inputs, lambda placed, of: sound)
    assert read is not None
    return dict(read())


def _piece(chunk: Chunk, text: str, *, cut: bool = False) -> Piece:
    assert chunk.clip.end is not None
    return Piece(chunk.clip.start, chunk.clip.end, text, cut)


def _written(transcript: Transcript, kind: str, language: str) -> Response:
    if kind == "json":
        return JSONResponse({"text": transcript.text})
    if kind != "verbose_json":
        return PlainTextResponse(content(transcript, kind, language))
    segments = [
        {"id": number, "start": piece.start, "end": piece.end, "text": piece.text.strip()}
        for number, piece in enumerate(transcript.pieces)
    ]
    body = {"task": "transcribe", "language": language or None, "duration": transcript.seconds}
    return JSONResponse({**body, "text": transcript.text, "segments": segments})


async def speech(request: Request, served: Served) -> Reply:
    """Speak a text."""
    fields = body_of(await request.body())
    model = served.speech
    served.adapters_of(fields.text("model", ""))
    text = fields.text("input")
    if len(text) > LONGEST_TEXT:
        raise RefusedError(
            f"input: has {len(text):,} characters, and {LONGEST_TEXT:,} are spoken at once at most", param="input"
        )
    voice = fields.text("voice", "default")
    if voice not in ("default", "alloy"):  # the official client wants one to be named
        raise RefusedError("voice: there is one voice here, the model's own: default", param="voice", code="no_voice")
    form = fields.choice("response_format", tuple(MEDIA_TYPES), "wav")
    streams = fields.choice("stream_format", ("audio", "sse"), "audio")
    if streams == "sse":
        raise RefusedError("stream_format: sound is sent as it is, piece by piece: audio", param="stream_format")
    utterance = Utterance(
        text,
        language=fields.text("language", ""),
        instruct=fields.text("instructions", ""),
        speed=float(fields.number("speed", 1.0, least=0.25, most=4.0)),
        number=fields.whole("seed", 0, least=0, most=2**31),
        place="input",
    )
    fields.end()
    model.check(utterance)

    def speak() -> Iterator[SpokenPiece]:
        return model.speak([utterance], served.speaking, served.defaults, Speaking())

    async def sound() -> AsyncGenerator[SpokenPiece, None]:
        with served.places.take():
            async with aclosing(served.engine.iterate(speak)) as pieces:
                async for piece in pieces:
                    yield piece

    async def stream() -> AsyncGenerator[bytes, None]:
        header = wav_header(model.sampling_rate) if form == "wav" else b""
        async with aclosing(sound()) as pieces:
            async for piece in pieces:
                yield header + samples_of(piece.sound)
                header = b""

    async def whole() -> Response:
        parts = []
        async with aclosing(sound()) as pieces:
            async for piece in pieces:
                parts.append(piece.sound)
        return Response(sound_bytes(np.concatenate(parts), model.sampling_rate, form), media_type=MEDIA_TYPES[form])

    return Reply(await once(request, whole())) if form == "flac" else Reply(stream(), MEDIA_TYPES[form])
