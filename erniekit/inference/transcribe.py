"""Transcribe recordings of any length: in chunks, and the chunks of all recordings side by side."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from erniekit.data.conversation import USER, Conversation, Turn
from erniekit.data.media.audio_batch import window_frames
from erniekit.data.media.clip import AudioInputs, Clip, ContentClip
from erniekit.data.media.errors import RecordingError
from erniekit.data.placeholders import EncodedPrompt, Recordings
from erniekit.errors import DataError, UserError
from erniekit.inference.chunks import Chunk, read_chunks
from erniekit.inference.engine import ChatModel
from erniekit.inference.generation import check_prompt
from erniekit.inference.sampling import Sampling

logger = logging.getLogger(__name__)

BATCHES_READ = 4  # whose sound is in memory
TOKENS_PER_SECOND, FURTHER_TOKENS = 20, 32  # of the longest transcript: nobody speaks faster


class Piece(NamedTuple):
    """The transcript of one chunk.

    Attributes:
        start, end: seconds from the beginning of the recording.
        cut: whether the model had not ended when it reached the largest number of tokens.
    """

    start: float
    end: float
    text: str
    cut: bool = False


@dataclass
class Transcript:
    """A recording and what is said in it.

    Attributes:
        pieces: in the order of the recording.
        compute_seconds: that reading it and answering took, its share where a batch has chunks of several recordings.
    """

    path: Path
    pieces: list[Piece] = field(default_factory=list)
    compute_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The length of the recording."""
        return self.pieces[-1].end if self.pieces else 0.0

    @property
    def text(self) -> str:
        """The transcript, with a space between two chunks unless the script has none."""
        text = ""
        for piece in self.pieces:
            own = piece.text.strip()
            has_space = text and own and not (_without_spaces(text[-1]) or _without_spaces(own[0]))
            text += (" " if has_space else "") + own
        return text


@dataclass(frozen=True)
class TranscriptionSettings:
    """How recordings are transcribed.

    Attributes:
        language: as the model's request takes it; "" leaves it to the model or to its run.
        chunk_seconds: the longest chunk; None: a window of the model.
        batch_size: the chunks that are answered side by side.
        max_new_tokens: the longest transcript of a chunk; None: more than anybody says in that time.
    """

    language: str = ""
    chunk_seconds: float | None = None
    batch_size: int = 16
    max_new_tokens: int | None = None


class Failure(NamedTuple):
    """A recording that cannot be transcribed, and why."""

    path: Path
    reason: str


def transcribe(
    model: ChatModel, recordings: Iterable[Path], settings: TranscriptionSettings
) -> Iterator[Transcript | Failure]:
    """Yield the transcript of each recording, or why it has none, as soon as it is known.

    Raises:
        UserError: the model has no audio encoder, or refuses the request; or a chunk is too long for it.
    """
    if model.audio is None:
        raise DataError("the model has no audio encoder, so that it cannot listen")
    transcriber = _Transcriber(model, model.audio, settings)
    for path in recordings:
        try:
            yield from transcriber.read(path)
        except RecordingError as error:
            transcriber.forget(path)
            yield Failure(path, str(error))
    yield from transcriber.finish()


class ChunkPrompts:
    """Makes the prompts that ask for transcripts of chunks.

    Args:
        inputs: what the model's encoder takes.

    Attributes:
        longest: samples of a chunk.

    Raises:
        UserError: the longest chunk leaves no room for its transcript, or the model refuses the request.
    """

    def __init__(self, model: ChatModel, inputs: AudioInputs, settings: TranscriptionSettings) -> None:
        self._model, self._inputs, self._settings = model, inputs, settings
        self._request = _encoded_request(model, settings.language)
        seconds = settings.chunk_seconds or inputs.window_samples / inputs.sampling_rate
        self.longest = max(1, round(seconds * inputs.sampling_rate))
        self._check_room()

    def read(self, path: Path) -> Iterator[Chunk]:
        """Yield the chunks of a recording; raises like `read_chunks`."""
        yield from read_chunks(path, self.longest, self._inputs.sampling_rate)

    def says_nothing(self, chunk: Chunk) -> bool:
        """Return whether a chunk is not asked about: models write something all the same."""
        unheard = not self._inputs.clip_tokens(len(chunk.sound))  # 20 ms give Qwen2-Audio's encoder no state
        return chunk.is_silent or unheard

    def longest_transcript(self, chunk: Chunk) -> int:
        """Return the most tokens of the transcript of a chunk."""
        seconds = len(chunk.sound) / self._inputs.sampling_rate
        return self._settings.max_new_tokens or math.ceil(TOKENS_PER_SECOND * seconds) + FURTHER_TOKENS

    def of(self, chunk: Chunk) -> EncodedPrompt:
        """Return the prompt of a chunk, whose sound is not in it."""
        return self._placed(chunk.clip, len(chunk.sound))

    def _placed(self, clip: Clip, length: int) -> EncodedPrompt:
        recordings = Recordings(self._inputs, {clip: length})
        ids = [token for part in recordings.expand(self._request, [clip]) for token in part]
        return EncodedPrompt(ids, recordings.place(ids, [clip]))

    def _check_room(self) -> None:
        """Raise UserError if the longest chunk leaves no room for its transcript."""
        prompt = self._placed(Clip("chunk"), self.longest)
        try:
            check_prompt(self._model.decoder, prompt.ids, Sampling(), 1)
        except UserError:
            limit = self._model.decoder.config.max_position_embeddings
            windows = len(window_frames(self.longest, self._inputs))
            raise DataError(
                f"a chunk of {self.longest / self._inputs.sampling_rate:g} s ({windows} windows of the model) makes a "
                f"prompt of {len(prompt.ids):,} tokens, and the model has {limit:,} positions; choose a smaller "
                "--chunk-seconds"
            ) from None


class _Transcriber:
    """Collects chunks of recordings, and answers many of them side by side."""

    def __init__(self, model: ChatModel, inputs: AudioInputs, settings: TranscriptionSettings) -> None:
        self._model, self._settings = model, settings
        self._prompts = ChunkPrompts(model, inputs, settings)
        self._waiting: list[tuple[Path, Chunk]] = []
        self._begun: dict[Path, Transcript] = {}  # also those that are read to their end and not answered yet
        self._complete: set[Path] = set()

    def read(self, path: Path) -> Iterator[Transcript]:
        """Read a recording; yield the transcripts that are complete."""
        self._begun[path] = transcript = Transcript(path)
        began = time.perf_counter()
        for chunk in self._prompts.read(path):
            transcript.compute_seconds += time.perf_counter() - began
            self._waiting.append((path, chunk))
            if len(self._waiting) >= BATCHES_READ * self._settings.batch_size:
                self._answer_waiting()
                yield from self._take_complete()
                logger.info(f"{path}: transcribed up to {_times(chunk)[1]:,.0f} s")
            began = time.perf_counter()
        self._complete.add(path)

    def forget(self, path: Path) -> None:
        """Leave a recording out whose end cannot be read."""
        del self._begun[path]
        self._waiting = [(owner, chunk) for owner, chunk in self._waiting if owner != path]

    def finish(self) -> Iterator[Transcript]:
        """Answer what is left."""
        self._answer_waiting()
        yield from self._take_complete()

    def _take_complete(self) -> Iterator[Transcript]:
        for path in [path for path in self._begun if path in self._complete]:
            self._complete.remove(path)
            transcript = self._begun.pop(path)
            transcript.pieces.sort()
            yield transcript

    def _answer_waiting(self) -> None:
        spoken = []
        for path, chunk in self._waiting:
            if self._prompts.says_nothing(chunk):
                self._begun[path].pieces.append(Piece(*_times(chunk), ""))
            else:
                spoken.append((path, chunk))
        self._waiting = []
        if spoken:
            self._answer(spoken)

    def _answer(self, spoken: Sequence[tuple[Path, Chunk]]) -> None:
        began = time.perf_counter()
        sounds = {chunk.clip: chunk.sound for _, chunk in spoken}
        limits = [self._prompts.longest_transcript(chunk) for _, chunk in spoken]
        answers = self._model.answer_batch(
            [self._prompts.of(chunk) for _, chunk in spoken],
            Sampling(),  # greedy
            limits=limits,
            read=lambda placed, inputs: sounds[placed.clip],
            max_running=self._settings.batch_size,
        )
        share = (time.perf_counter() - began) / sum(len(sound) for sound in sounds.values())
        for (path, chunk), tokens, limit in zip(spoken, answers, limits, strict=True):
            text = self._model.tokenizer.decode(tokens)
            self._begun[path].pieces.append(Piece(*_times(chunk), text, cut=len(tokens) >= limit))
            self._begun[path].compute_seconds += share * len(chunk.sound)


def _encoded_request(model: ChatModel, language: str) -> list[list[int]]:
    """Return the ids of the segments of a request for a transcript, with one placeholder."""
    turn = Turn(USER, "", clips=(ContentClip(0, Clip("chunk")),))

    def rendered(language: str) -> list[str]:
        request = Conversation((turn,), transcribes=True, language=language)
        return [segment.text for segment in model.template.render(request)]

    texts = rendered(language)
    if language and texts == rendered("de" if language == "en" else "en"):
        logger.warning("no effect: --language, because the model's request for a transcript names no language")
    return model.tokenizer.encode_batch(texts)


def _times(chunk: Chunk) -> tuple[float, float]:
    assert chunk.clip.end is not None
    return chunk.clip.start, chunk.clip.end


def _without_spaces(character: str) -> bool:
    """Return whether a character is of Chinese or Japanese, which have no spaces between words."""
    return "\u2e80" <= character <= "\u9fff" or "\uf900" <= character <= "\ufaff" or character >= "\U00020000"
