"""`erniekit train CONFIG --try` for a model that speaks: learn one recording by heart, and say it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.build.checks import TRANSCRIPT_LIBRARIES
from erniekit.build.codec import codec_opener
from erniekit.build.data import training_dataset
from erniekit.build.speech import codec_of_run
from erniekit.build.speech_checks import POCKETSPHINX
from erniekit.build.speech_tokens import SpeechTokens
from erniekit.config import Config
from erniekit.config.sections.speaking import SpeakingParameters
from erniekit.data.ar_nar_codes import TTS, ArNarCodes
from erniekit.data.batch import Batch
from erniekit.data.code_reader import CodeReader
from erniekit.data.collate import collate
from erniekit.data.dataset import Dataset
from erniekit.data.masked_codes import MaskedCodes
from erniekit.data.speech_text import PHONEMES
from erniekit.data.templates.ernie import Sample
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.environment import is_importable
from erniekit.errors import ConfigurationError, DataError
from erniekit.inference.sampling import Sampling
from erniekit.inference.speaking import CodeWriter, PreparedUtterance
from erniekit.inference.speaking.ar_nar import ArNar
from erniekit.inference.speaking.judge import Judge, heard, open_judge
from erniekit.inference.speaking.sound_files import write_sound
from erniekit.inference.speaking.unmasking import Unmasking
from erniekit.model.architectures.speaking import code_layout
from erniekit.model.decoder import Decoder
from erniekit.training.objectives.reference import eval_mode

SPOKEN, ORIGINAL = "spoken.wav", "original.wav"
DRAWS = 4  # of masks in a step: one alone says little of what the next one needs
EXACTLY = SpeakingParameters(guidance_scale=0.0, position_temperature=0.0, class_temperature=0.0)


@dataclass(frozen=True)
class RecordingToLearn:
    """A recording of the training data, and what its samples are drawn from.

    Attributes:
        location: of its record, "file.jsonl:17".
        codes: int64[C, T].
        utterance: what a model is asked for that has learned it.
        text: what is said.
        judge: writes down what the model says; None: nobody does.
    """

    config: Config
    tokenizer: Tokenizer
    dataset: Dataset
    index: int
    location: str
    codes: np.ndarray
    utterance: PreparedUtterance
    text: str = ""
    judge: Judge | None = None

    def batches(self) -> Iterator[Batch]:
        """Return the batch of each step: the recording under some masks, others at each step, or as all its levels."""
        drawing = always_told(self.dataset.drawing)
        if isinstance(drawing, MaskedCodes):
            masked = _source(self.dataset, self.index, drawing)
            return (self._batch([masked(epoch) for epoch in range(first, first + DRAWS)]) for first in count(0, DRAWS))
        levels = [_source(self.dataset, self.index, one_level(drawing, level)) for level in range(drawing.levels)]
        return repeat(self._batch([source(0) for source in levels]))

    def say(self, model: Decoder) -> tuple[float, str]:
        """Let the model say the text, and write its sound and that of the recording's own codes.

        Returns:
            The share of the codes that it wrote as they are, and a text for people.
        """
        written = self._written_by(model)
        share = equal_share(written, self.codes)
        path, sound, rate = self._write_sound(written)
        words = "" if self.judge is None else f", {heard(self.judge, self.text, sound, rate)}"
        return share, f", {share:.1%} of the codes, {path}{words}"

    def _written_by(self, model: Decoder) -> np.ndarray:
        """Return the codes int64[C, T] that the model writes for the text, without a random draw."""
        layout = code_layout(model.config)
        writer: CodeWriter
        if isinstance(self.dataset.drawing, MaskedCodes):
            writer = Unmasking(model, layout, EXACTLY, self.config.training.seed)
        else:
            tokens = SpeechTokens.of(self.tokenizer, layout.levels)
            writer = ArNar(model, layout, tokens, EXACTLY, Sampling(temperature=0.0))
        with eval_mode(model):
            (written,) = writer.write([self.utterance])
        return written.codes

    def _write_sound(self, written: np.ndarray) -> tuple[Path, np.ndarray, int]:
        """Write the sound of the recording's own codes and of written ones; return the file of these, their sound and
        its samples a second."""
        codec = codec_of_run(self.config)
        opened = codec_opener(codec.folder, codec.levels, self.config.basic.device)()
        folder = self.config.output_dir.with_name(f"{self.config.output_dir.name}-try")
        for name, codes in ((ORIGINAL, self.codes), (SPOKEN, written)):
            sound = np.asarray(opened.decode(codes), np.float32) if codes.shape[1] else np.zeros(0, np.float32)
            write_sound(folder / name, sound, codec.sampling_rate)
        return folder / SPOKEN, sound, codec.sampling_rate

    def _batch(self, samples: list[Sample]) -> Batch:
        assert self.dataset.drawing is not None
        return collate(
            [[sample] for sample in samples],
            [[self.index]] * len(samples),
            self.dataset.pad_id,
            arrays=self.dataset.drawing.arrays,
            both_ways=True,
            levels=self.dataset.levels,
        )


def first_recording(config: Config, tokenizer: Tokenizer) -> RecordingToLearn:
    """Return the first recording of the training data that fits `max_seq_len`.

    Raises:
        DataError: a record is malformed, or none fits.
    """
    dataset = training_dataset(config, tokenizer, None)
    drawing = always_told(dataset.drawing)
    for index in range(len(dataset)):
        sample = _source(dataset, index, drawing)(0)
        if len(sample.input_ids):
            break
    else:
        raise DataError(
            f"train_dataset_path: none of {len(dataset):,} records fits max_seq_len {config.training.max_seq_len:,}; "
            "raise it, or give shorter ones"
        )
    codes = dataset.codes(index).astype(np.int64)
    utterance = _utterance(dataset, index, sample, codes)
    text = _text(dataset, index, tokenizer)
    judge = _judge(config, text)
    return RecordingToLearn(config, tokenizer, dataset, index, dataset.location(index), codes, utterance, text, judge)


def _text(dataset: Dataset, index: int, tokenizer: Tokenizer) -> str:
    """Return what is said in a recording."""
    number, offset = _place(dataset, index)
    return tokenizer.decode(CodeReader(dataset.source_arrays[number]).texts(offset)[0].tolist())


def _judge(config: Config, text: str) -> Judge | None:
    """Return who writes down what is said: the judge of the configuration, else CMU Sphinx where it is installed and
    knows the words.

    Raises:
        UserError: the judge of the configuration cannot be opened.
    """
    named = config.evaluation.speech_judge
    if named:
        return open_judge(named, [text])
    if config.speech.text_frontend == PHONEMES or not all(map(is_importable, (POCKETSPHINX, *TRANSCRIPT_LIBRARIES))):
        return None
    try:
        return open_judge(POCKETSPHINX, [text])
    except ConfigurationError:
        return None


def equal_share(written: np.ndarray, codes: np.ndarray) -> float:
    """Return the share of codes [C, T] that are written as they are, out of those of the longer of both."""
    frames = min(written.shape[1], codes.shape[1])
    longest = max(written.shape[1], codes.shape[1])
    return float((written[:, :frames] == codes[:, :frames]).sum() / (len(codes) * longest))


def always_told(drawing: Any) -> MaskedCodes | ArNarCodes:
    """Return a drawing whose samples are all told the same, so that one prompt asks for what they teach."""
    if isinstance(drawing, MaskedCodes):
        told = replace(drawing, condition_dropout=0.0, language=1.0, instruct=1.0, only_instruct=0.0, pinyin=0.0)
        return replace(told, prompt_ratio=(0.0, 0.0))
    return replace(drawing, tasks=(TTS,), condition_dropout=0.0, prompt_dropout=1.0, language=1.0)


def one_level(drawing: ArNarCodes, level: int) -> ArNarCodes:
    """Return a drawing of which every sample has this level."""
    return replace(drawing, level_weights=tuple(float(each == level) for each in range(drawing.levels)))


def _place(dataset: Dataset, index: int) -> tuple[int, int]:
    """Return the number of a sample's source, and that of the sample in it."""
    number = int(dataset.source_of[index])
    return number, index - int(np.searchsorted(dataset.source_of, number))


def _source(dataset: Dataset, index: int, drawing: MaskedCodes | ArNarCodes) -> Any:
    """Return what draws a sample for an epoch."""
    number, offset = _place(dataset, index)
    arrays = dataset.source_arrays[number]
    return partial(drawing.source(arrays, number, CodeReader(arrays)).sample, offset)


def _utterance(dataset: Dataset, index: int, sample: Sample, codes: np.ndarray) -> PreparedUtterance:
    frames = codes.shape[1]
    if isinstance(dataset.drawing, MaskedCodes):
        return PreparedUtterance(sample.input_ids[:-frames].tolist(), frames, None, [], 0)
    number, offset = _place(dataset, index)
    text, _, language, _ = CodeReader(dataset.source_arrays[number]).texts(offset)
    return PreparedUtterance(text.tolist(), None, None, language.tolist(), 0, most_frames=2 * frames + 1)
