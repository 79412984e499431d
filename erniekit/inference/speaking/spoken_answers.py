"""Speak held-out texts in evaluation, let a judge write them down, and compare the words and the voices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from erniekit.build.speech import CodecFacts
from erniekit.build.speech_checks import POCKETSPHINX
from erniekit.build.text_reading import read_text_reading
from erniekit.config.sections.speaking import SpeakingParameters
from erniekit.data.code_reader import CodeReader
from erniekit.data.dataset import Dataset
from erniekit.data.eval_sampler import source_names
from erniekit.data.formats.problems import RecordProblem
from erniekit.data.media.code_shards import CodePlace
from erniekit.data.split import read_part
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.data.units import SpokenText
from erniekit.inference.error_rates import ErrorRates
from erniekit.inference.sampling import Sampling
from erniekit.inference.speaking import Utterance, Voice
from erniekit.inference.speaking.judge import Judge, open_judge, plain
from erniekit.inference.speaking.similarity import Voices, open_voices, similarity
from erniekit.inference.speaking.sound import SoundSettings
from erniekit.inference.speaking.sound_files import write_sound
from erniekit.inference.speaking.speaker import Speaking, SpeechModel
from erniekit.model.decoder import Decoder
from erniekit.training.evaluation import ExtraMetrics
from erniekit.training.objectives.reference import eval_mode

SPEECH_FOLDER = "eval_speech"  # in output_dir: the sound of the last evaluation
MAX_SECONDS = 30.0  # of an utterance whose end the model chooses
AS_WRITTEN = SoundSettings(pad=0.0, fade=0.0)  # recognisers hear words in the silence of a pad


@dataclass(frozen=True)
class SpokenAnswerSettings:
    """How held-out texts are spoken and judged.

    Attributes:
        count: of each file, spread evenly over it; -1: all.
        judge: a value of `speech_judge`; "": nobody, and no words are compared.
        normalizer: a value of `text_normalizer`.
        samples: the file to write, a line for each text.
        sounds: the folder of the sound; None: it is not written.
        run: the folder in which `speech.json` may lie.
        voice_seconds: the longest voice of models that write level after level.
        frontend, adapted, seed, device, tells_language: as of `SpeechModel`.
        tells_instruct: whether the model is told the descriptions of voices.
        speaking: how codes are written.
        sampling: of the first level, where levels are written one after the other.
    """

    count: int
    judge: str
    normalizer: str
    samples: Path
    sounds: Path | None
    run: Path
    voice_seconds: float
    frontend: str
    seed: int
    device: str
    adapted: tuple[int, ...] | None = None
    tells_language: bool = True
    tells_instruct: bool = True
    speaking: SpeakingParameters = field(default_factory=SpeakingParameters)
    sampling: Sampling = field(default_factory=Sampling)


class _HeldOut(NamedTuple):
    place: str
    number: int
    record: SpokenText


class SpokenAnswers:
    """Speaks the same texts at every evaluation, with the same random draws.

    A model that writes level after level speaks in the voice of another recording of the same speaker, if there is one;
    one of masked codes chooses the voice. Its resemblance to the voice of the text's own recording is a metric where
    Resemblyzer is installed.

    Args:
        dataset: of the held-out recordings.

    Raises:
        ConfigurationError: the judge, or the library that compares words, is missing; or it does not know a word.
    """

    def __init__(
        self, dataset: Dataset, tokenizer: Tokenizer, codec: CodecFacts, settings: SpokenAnswerSettings
    ) -> None:
        self._dataset, self._tokenizer, self._codec, self._settings = dataset, tokenizer, codec, settings
        asked = [number for number, source in enumerate(dataset.sources) if source.probability > 0]
        names = source_names([str(dataset.sources[number].path) for number in asked])
        self._texts = {
            name: _spread(list(_held_out(dataset, number)), settings.count)
            for name, number in zip(names, asked, strict=True)
        }
        texts = [each.record.text for own in self._texts.values() for each in own]
        self._judge: Judge | None = open_judge(settings.judge, texts) if settings.judge else None
        self._spelled: Callable[[str], str] = plain if settings.judge == POCKETSPHINX else str
        self._voices = open_voices()
        self._recorded: dict[int, np.ndarray | None] = {}  # embeddings of the held-out recordings, by number

    def __call__(self, decoder: Decoder) -> ExtraMetrics:
        """Speak every text, write it with what was heard to `samples`, and return the metrics."""
        settings = self._settings
        reading = read_text_reading([settings.run])
        model = SpeechModel(
            decoder,
            self._tokenizer,
            self._codec,
            frontend=settings.frontend,
            pace=None if reading is None else reading.pace,
            adapted=settings.adapted,
            seed=settings.seed,
            device=settings.device,
            tells_language=settings.tells_language,
        )
        scores: dict[str, ErrorRates] = {}
        alike: dict[str, list[float]] = {name: [] for name in self._texts}
        with eval_mode(decoder), open(settings.samples, "w", encoding="utf-8") as file:
            for name, texts in self._texts.items():
                if self._judge is not None:
                    scores[name] = ErrorRates(settings.normalizer)
                for each, sound in zip(texts, self._spoken(model, texts), strict=True):
                    line = self._line(each, sound, model.sampling_rate, scores.get(name))
                    if self._voices is not None:
                        alike[name].append(self._similarity(self._voices, model, each.number, sound))
                        line["speaker_similarity"] = round(alike[name][-1], 4)
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
        counts = {name: {"answers": float(len(texts))} for name, texts in self._texts.items()}
        together = {"answers": sum(own["answers"] for own in counts.values())}
        if self._judge is not None:
            merged = ErrorRates(settings.normalizer)
            for own_scores in scores.values():
                merged.merge(own_scores)
            together = merged.metrics() | together
            counts = {name: scores[name].metrics() | own for name, own in counts.items()}
        if self._voices is not None:
            together["speaker_similarity"] = _mean([each for own in alike.values() for each in own])
            counts = {name: own | {"speaker_similarity": _mean(alike[name])} for name, own in counts.items()}
        return ExtraMetrics(together, counts)

    def _spoken(self, model: SpeechModel, texts: Sequence[_HeldOut]) -> list[np.ndarray]:
        """Return the sound of each text."""
        utterances = [
            Utterance(
                each.record.text,
                each.record.language,
                each.record.instruct if model.is_masked and self._settings.tells_instruct else "",
                None if model.is_masked else self._voice(each.number),
                number=each.number,
                place=each.place,
            )
            for each in texts
        ]
        sounds: list[list[np.ndarray]] = [[] for _ in texts]
        how = Speaking(max_seconds=MAX_SECONDS, sound=AS_WRITTEN)
        for piece in model.speak(utterances, self._settings.speaking, self._settings.sampling, how):
            sounds[piece.utterance].append(piece.sound)
        return [np.concatenate(parts) for parts in sounds]

    def _voice(self, index: int) -> Voice | None:
        """Return the voice of the next recording of the same speaker; None: there is none."""
        speakers = self._dataset.speaker_of
        others = np.flatnonzero(speakers == speakers[index]) if speakers[index] >= 0 else np.zeros(0, np.int64)
        if len(others) < 2:
            return None
        other = int(others[(np.searchsorted(others, index) + 1) % len(others)])
        frames = int(self._settings.voice_seconds * self._codec.frame_rate)
        return Voice(self._dataset.codes(other)[:, :frames].astype(np.int64), "")

    def _similarity(self, voices: Voices, model: SpeechModel, number: int, sound: np.ndarray) -> float:
        """Return how alike the voices of a sound and of a recording are."""
        if number not in self._recorded:
            codes = self._dataset.codes(number).astype(np.int64)
            recorded = np.asarray(model.codec.decode(codes), np.float32)
            self._recorded[number] = voices.embedding(recorded, model.sampling_rate)
        return similarity(voices.embedding(sound, model.sampling_rate), self._recorded[number])

    def _line(self, each: _HeldOut, sound: np.ndarray, sampling_rate: int, scores: ErrorRates | None) -> dict[str, Any]:
        """Return what is written of a text; its sound is written into a file of its own."""
        line: dict[str, Any] = {"place": each.place, "expected": each.record.text}
        if self._settings.sounds is not None:
            path = self._settings.sounds / f"{each.number:06d}.wav"
            write_sound(path, sound, sampling_rate)
            line["sound"] = str(path)
        if self._judge is None or scores is None:
            return line
        heard = self._judge.write_down(sound, sampling_rate)
        own = scores.add(self._spelled(each.record.text), heard)
        return line | {"answer": heard} | {name: round(value, 4) for name, value in own.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _held_out(dataset: Dataset, number: int) -> Iterator[_HeldOut]:
    """Yield the records of a source whose recordings are in the dataset."""
    source = dataset.sources[number]
    own = np.flatnonzero(dataset.source_of == number).tolist()
    reader = CodeReader(dataset.source_arrays[number])
    by_place = {(_shard(reader.place(offset)), dataset.line(index)): index for offset, index in enumerate(own)}
    for item in read_part(source):
        if isinstance(item, RecordProblem):  # skipped; the dataset was opened before, and has said so
            continue
        line, record = item
        if not isinstance(record, SpokenText) or not record.text.strip():
            continue
        index = by_place.get((_shard(record.place), line))
        if index is not None:
            yield _HeldOut(dataset.location(index), index, record)


def _shard(place: CodePlace | None) -> int:
    """Return the number of the shard whose lines are counted; -1: those of the source itself."""
    return -1 if place is None else place.file


def _spread(texts: Sequence[_HeldOut], count: int) -> list[_HeldOut]:
    """Return so many texts, evenly spread; -1: all."""
    if count < 0 or count >= len(texts):
        return list(texts)
    return [texts[number * len(texts) // count] for number in range(count)]
