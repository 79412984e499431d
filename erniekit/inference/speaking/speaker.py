"""A model that speaks, with its tokenizer and the codec of its codes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from erniekit.build.checks import answering_folders, tokenizer_folder
from erniekit.build.codec import codec_opener
from erniekit.build.codec_folder import codec_candidates
from erniekit.build.speech import CodecFacts, codec_facts
from erniekit.build.speech_tokens import SpeechTokens
from erniekit.build.text_reading import Pace, TextReading, text_reading_of
from erniekit.codecs.codec import Codec
from erniekit.config.sections.speaking import SpeakingParameters
from erniekit.data.formats.problems import MalformedError
from erniekit.data.media.clip import Clip
from erniekit.data.media.recording import read_clip
from erniekit.data.speech_text import PHONEMES, text_ids
from erniekit.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from erniekit.errors import ConfigurationError, DataError
from erniekit.export.trained_model import ignored_config_keys, run_parameters
from erniekit.inference.sampling import Sampling
from erniekit.inference.speaking import PIECE_BITS, CodeWriter, Piece, PreparedUtterance, Utterance, Voice
from erniekit.inference.speaking.ar_nar import ArNar
from erniekit.inference.speaking.pace import SpokenReference, estimated_frames
from erniekit.inference.speaking.prompts import check_text, masked_prompt
from erniekit.inference.speaking.sound import (
    OF_REFERENCE,
    JoinedSound,
    SoundSettings,
    louder,
    loudness,
    without_silence,
)
from erniekit.inference.speaking.text import joined_text, pieces, with_punctuation
from erniekit.inference.speaking.unmasking import Unmasking
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.speaking import OMNIVOICE, code_layout
from erniekit.model.builder import build_model

logger = logging.getLogger(__name__)


LONG_VOICE = 20.0  # seconds
LONGER_VOICE = 1.1  # times the longest prompt of the training: what a cut at a frame, or at silence, adds


@dataclass(frozen=True)
class Speaking:
    """How texts are divided, and what becomes of their sound.

    Attributes:
        chunk_seconds: about how long each piece of a long text is.
        chunk_threshold: a text that takes longer, in seconds, is divided.
        first_seconds: how long the first piece is, so that it is heard soon; None: as the others.
        denoise: ask for clean sound where the voice is noisy; only models of masked codes.
        max_seconds: of a piece, where the model ends by itself.
        batch_size: texts at once.
    """

    chunk_seconds: float = 15.0
    chunk_threshold: float = 30.0
    first_seconds: float | None = None
    denoise: bool = True
    max_seconds: float = 60.0
    batch_size: int = 8
    sound: SoundSettings = field(default_factory=SoundSettings)


class _Plan(NamedTuple):
    """The pieces of an utterance's text; `frames` of the only one, where it is not divided; what speed is left to apply
    to the pieces."""

    texts: list[str]
    frames: int
    speed: float


class SpeechModel:
    """A decoder of a family that writes codes, with what makes codes of texts and sound of codes.

    Args:
        codec: of the codes; it is opened when sound is made or read for the first time.
        frontend: how texts become ids (`text_frontend`).
        pace: how fast the model's data is spoken (`pace.measured_pace`); None: unknown.
        adapted: the levels that adapters serve (`lora_codebooks`); None: all.
        tells_language: whether the model was told the language of its texts.
        is_published: it was trained by others, with their words for voices (`voice_words.py`).
        longest_prompt: in seconds, that it was trained with; None: unknown.
        seed: of the random draws of codes.
    """

    def __init__(
        self,
        decoder: Any,
        tokenizer: Tokenizer,
        codec: CodecFacts,
        *,
        frontend: str = "tokenizer",
        pace: Pace | None = None,
        adapted: Sequence[int] | None = None,
        seed: int = 42,
        device: str = "auto",
        tells_language: bool = True,
        is_published: bool = False,
        longest_prompt: float | None = None,
    ) -> None:
        self.decoder, self.tokenizer, self.codec_facts = decoder, tokenizer, codec
        self.layout = code_layout(decoder.config)
        self.is_masked = self.layout.kind == OMNIVOICE
        self._pace, self._adapted = pace, adapted
        self._seed, self._device, self.is_published = seed, device, is_published
        self.frontend, self.tells_language = frontend, tells_language
        self._longest_prompt = longest_prompt

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        adapters: Path | None = None,
        codec: Path | None = None,
        seed: int = 42,
        ignored_keys: Sequence[str] = (),
        device: str = "auto",
    ) -> SpeechModel:
        """Load a model folder, an `output_dir` or a checkpoint; a folder of adapters together with its base model.

        Args:
            adapters: a folder of adapters for the model in `folder`.
            codec: its folder; None: the one in the model's folder, or the one that its run was trained with.

        Raises:
            UserError: a folder or one of its files is missing or damaged; the model writes no codes; or the codec is
                not the one of its codes.
        """
        folder, adapters = answering_folders(folder, adapters)
        run = run_parameters(adapters or folder)
        config = ModelConfig.from_folder(folder, (*ignored_keys, *ignored_config_keys(run)))
        if config.architecture.codes is None:
            raise DataError(
                f"{folder}: a model of the family {config.model_type} writes text and no codes, so that it cannot "
                "speak; name one that was trained with stage: TTS"
            )
        home = adapters or folder
        facts = codec_facts(_codec_folder([home, folder], run, codec), levels=code_layout(config).levels)
        _check_codec(config, facts)
        tokenizer = load_tokenizer(tokenizer_folder(folder, adapters))
        decoder = build_model(config, folder, adapters=adapters, seed=seed)
        decoder.eval()  # once, and not in every pass
        found = text_reading_of(run, [home, home.parent, folder])
        reading = found or TextReading()
        return cls(
            decoder,
            tokenizer,
            facts,
            frontend=reading.frontend,
            pace=reading.pace,
            adapted=(tuple(run.get("lora_codebooks") or ()) or None) if adapters else None,
            seed=seed,
            device=device,
            tells_language=reading.tells_language,
            is_published=found is None and code_layout(config).kind == OMNIVOICE,
            longest_prompt=reading.longest_prompt,
        )

    @property
    def frame_rate(self) -> float:
        return self.codec_facts.frame_rate

    @property
    def sampling_rate(self) -> int:
        return self.codec_facts.sampling_rate

    @cached_property
    def codec(self) -> Codec:
        """The codec, opened when it is asked for."""
        return codec_opener(self.codec_facts.folder, self.layout.levels, self._device)()

    def voice(self, recording: Path, text: str, *, keep_silence: bool = False) -> Voice:
        """Return the voice of a recording.

        Args:
            text: what is said in it; a full stop is added where punctuation is missing.
            keep_silence: take the recording and its text as they are.

        Raises:
            UserError: it cannot be read, nothing is heard in it, or it is shorter than a frame.
        """
        sound = read_clip(Clip(str(recording)), self.sampling_rate)
        rms = loudness(sound)
        sound = louder(sound)
        if not keep_silence:
            sound, text = without_silence(sound, self.sampling_rate, OF_REFERENCE), with_punctuation(text)
        hop = round(self.sampling_rate / self.frame_rate)
        if len(sound) < hop:
            raise DataError(
                f"{recording}: expected the recording of a voice, got silence; name another one, or keep its silence "
                "with --keep-reference"
            )
        seconds = len(sound) / self.sampling_rate
        if self._longest_prompt is not None and seconds > LONGER_VOICE * self._longest_prompt:
            logger.warning(
                f"{recording}: the voice has {seconds:,.1f} s, and the model was trained with prompts up to "
                f"{self._longest_prompt:g} s (prompt_seconds); a shorter recording is spoken after more clearly"
            )
        elif seconds > LONG_VOICE:
            logger.warning(f"{recording}: the voice has {seconds:,.1f} s; 3 to 10 s are enough, and faster")
        return Voice(np.asarray(self.codec.encode(sound[: len(sound) // hop * hop]), np.int64), text, rms)

    def speak(
        self,
        utterances: Sequence[Utterance],
        settings: SpeakingParameters,
        sampling: Sampling | None = None,
        speaking: Speaking | None = None,
    ) -> Iterator[Piece]:
        """Yield the sound of utterances, piece by piece, each as soon as it is ready.

        Args:
            settings: how codes are written.
            sampling: how the first level's codes are drawn, where the model writes level after level.

        Raises:
            UserError: a text cannot be spoken; those before it in the order are.
        """
        speaking = speaking or Speaking()
        writer = self.writer(settings, sampling or Sampling(seed=self._seed))
        began = time.perf_counter()
        for start in range(0, len(utterances), speaking.batch_size):
            batch = list(enumerate(utterances))[start : start + speaking.batch_size]
            yield from self._speak_batch(batch, writer, speaking, began)

    def writer(self, settings: SpeakingParameters, sampling: Sampling) -> CodeWriter:
        """Return what writes codes with this model."""
        if self.is_masked:
            return Unmasking(self.decoder, self.layout, settings, self._seed)
        tokens = SpeechTokens.of(self.tokenizer, self.layout.levels)
        return ArNar(self.decoder, self.layout, tokens, settings, sampling, adapted=self._adapted)

    def _speak_batch(
        self, batch: Sequence[tuple[int, Utterance]], writer: CodeWriter, speaking: Speaking, began: float
    ) -> Iterator[Piece]:
        """Yield the pieces of some utterances: their first ones, then their second ones, and so on.

        Where the model chooses the voice, the first piece is the voice of the others.
        """
        plans = [self._plan(utterance, speaking) for _, utterance in batch]
        voices = [utterance.voice for _, utterance in batch]
        joined = [
            JoinedSound(self.sampling_rate, None if voice is None else voice.rms, speaking.sound) for voice in voices
        ]
        for number in range(max(len(plan.texts) for plan in plans)):
            rows = [row for row, plan in enumerate(plans) if number < len(plan.texts)]
            requests = [self._prepared(batch[row][1], plans[row], number, voices[row], speaking) for row in rows]
            for written in writer.write(requests):
                row = rows[written.request]
                if voices[row] is None and written.codes.shape[1]:
                    voices[row] = Voice(written.codes, plans[row].texts[number])
                last = number == len(plans[row].texts) - 1
                yield Piece(
                    batch[row][0],
                    number,
                    last,
                    written.codes,
                    joined[row].add(self._sound(written.codes), last=last),
                    time.perf_counter() - began,
                    written.cut,
                )

    def _sound(self, codes: np.ndarray) -> np.ndarray:
        return np.asarray(self.codec.decode(codes), np.float32) if codes.shape[1] else np.zeros(0, np.float32)

    def _plan(self, utterance: Utterance, speaking: Speaking) -> _Plan:
        """Return the pieces of an utterance's text, and how long it takes to say it."""
        self.check(utterance)
        text = utterance.text
        given = utterance.duration is not None
        frames = self._estimated(text, utterance.voice, 1.0 if given else utterance.speed)
        speed = utterance.speed
        if utterance.duration is not None:
            wanted = max(1, int(utterance.duration * self.frame_rate))
            speed, frames = frames / wanted, wanted
        if frames <= int(speaking.chunk_threshold * self.frame_rate) and speaking.first_seconds is None:
            return _Plan([text], frames, speed)
        per_character = frames / len(text)

        def characters(seconds: float) -> int:
            return max(1, int(seconds * self.frame_rate / per_character))

        first = None if speaking.first_seconds is None else characters(speaking.first_seconds)
        texts = pieces(text, characters(speaking.chunk_seconds), first=first)
        return _Plan(texts, frames, speed)

    def check(self, utterance: Utterance) -> None:
        """Raise DataError for an utterance that this model cannot speak."""
        place = utterance.place or "the text"
        check_text(utterance.text, place)
        if utterance.duration is not None and utterance.duration <= 0:
            raise DataError(f"{place}: duration: expected seconds above 0, got {utterance.duration:g}")
        if not 0.1 <= utterance.speed <= 10:
            raise DataError(f"{place}: speed: expected a number from 0.1 to 10, got {utterance.speed:g}")
        voice_text = "" if utterance.voice is None else utterance.voice.text
        for text in filter(None, (utterance.text, voice_text)):
            try:
                self._encode(text, utterance.language)
            except DataError as error:
                raise DataError(f"{place}: {error}") from None
        if self.is_masked:
            if utterance.continues:
                raise DataError(f"{place}: only a model of tts_objective: ar_nar goes on from what a voice says")
            return
        for name, given in (
            ("duration", utterance.duration is not None),
            ("speed", utterance.speed != 1.0),
            ("instruct", bool(utterance.instruct)),
        ):
            if given:
                raise DataError(
                    f"{place}: {name}: a model of tts_objective: ar_nar decides itself how it speaks; leave it out"
                )

    def _prepared(
        self, utterance: Utterance, plan: _Plan, number: int, voice: Voice | None, speaking: Speaking
    ) -> PreparedUtterance:
        text = plan.texts[number]
        language = utterance.language if self.tells_language else ""

        def encode(part: str) -> list[int]:
            return self._encode(part, utterance.language)

        codes = None if voice is None else voice.codes
        stream = (utterance.number << PIECE_BITS) + number
        if not self.is_masked:
            text_ids = encode(joined_text("", text))
            if voice is not None and utterance.continues and number == 0:
                text_ids = [*encode(voice.text), *self._space, *text_ids]
            return PreparedUtterance(
                text_ids,
                None,
                codes,
                self.tokenizer.encode(self.tokenizer.plain_text(language)) if language else [],
                stream,
                max(1, int(speaking.max_seconds * self.frame_rate)),
                utterance.continues and number == 0,
            )
        if len(plan.texts) == 1:
            frames = plan.frames
        else:  # the first piece, which is the voice of the others, has the speed already
            frames = self._estimated(text, voice, plan.speed if utterance.voice or number == 0 else 1.0)
        ids = masked_prompt(
            self.tokenizer,
            encode,
            joined_text("" if voice is None else voice.text, text),
            language=language,
            instruct=utterance.instruct,
            denoise=speaking.denoise and voice is not None,
        )
        return PreparedUtterance(ids, frames, codes, [], stream)

    @property
    def _space(self) -> list[int]:
        """The ids between the text of a voice and the one that goes on from it."""
        return [] if self.frontend == PHONEMES else self.tokenizer.encode(" ")

    def _estimated(self, text: str, voice: Voice | None, speed: float) -> int:
        reference = None if voice is None else SpokenReference(voice.text, voice.codes.shape[1])
        return estimated_frames(text, self.frame_rate, reference, speed=speed, pace=self._pace)

    def _encode(self, text: str, language: str) -> list[int]:
        """Return the ids of a text as the run encoded those of its data."""
        (ids,) = text_ids([text], [language], self.tokenizer, self.frontend)
        if isinstance(ids, MalformedError):
            raise DataError(f"{ids.field}: expected {ids.expected}, got {ids.got}")
        return ids


def _codec_folder(folders: Sequence[Path], run: Mapping[str, Any], named: Path | None) -> Path:
    """Return the folder of the codec: the named one, that in the model's folder, or that of the run and its data.

    Raises:
        UserError: it is unknown, or no longer there.
    """
    if named is not None:
        return named
    candidates = codec_candidates(folders, run)
    found = next((folder for folder in candidates if folder.is_dir()), None)
    if found is None:
        gone = f" ({candidates[0]}, of its training, is not there)" if candidates else ""
        raise ConfigurationError(
            f"{folders[0]}: nothing says which codec makes sound of this model's codes{gone}; name its folder with "
            "--codec DIR"
        )
    return found


def _check_codec(config: ModelConfig, codec: CodecFacts) -> None:
    """Raise ConfigurationError for a codec that is not of a model's codes, as far as its sizes tell."""
    layout = code_layout(config)
    if codec.codebook_size != layout.codebook_size:
        raise ConfigurationError(
            f"{codec.folder}: this codec has {codec.codebook_size:,} codes a level, and the model writes "
            f"{layout.codebook_size:,}: name the folder of its own codec with --codec DIR"
        )
