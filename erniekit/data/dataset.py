"""The tokenised samples of all sources of a run; `open_dataset.py` opens them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from erniekit.data.code_reader import SpeechFacts, code_reader
from erniekit.data.conversation import Source
from erniekit.data.dataset_report import DatasetReport, SourceReport, length_percentiles
from erniekit.data.drawing import Drawing, EpochSource
from erniekit.data.formats.unused_fields import UnusedField
from erniekit.data.media.clip import AudioInputs
from erniekit.data.packed import PackedIndex
from erniekit.data.recording_facts import audio_counts
from erniekit.data.templates.ernie import Sample
from erniekit.data.token_cache import TokenArrays


class Dataset:
    """All samples of all sources, numbered in the order of the sources.

    Only offsets are in memory (about 20 bytes per sample); tokens are memory-mapped.

    Attributes:
        sources: as given, including those of probability 0, which have no samples.
        lengths: int32[n], positions of each sample; of those that differ from epoch to epoch, in epoch 0.
        source_of: int16[n], index into `sources`.
        pad_id: the token id that fills up rows.
        pairs: whether each sample is a prompt with two answers.
        verdicts: whether the second of them is one to another prompt, and the score difference a verdict on the first.
        audio: what the encoder of the model takes, if it has one: batches then have the arrays of recordings.
        packed: the rows, if the samples come from a pre-packed folder; else None.
        source_arrays: the token arrays of each source.
        report: the counts of every source.
        fingerprint: changes with the content of any file, the tokenizer, the template, and the probabilities.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        arrays: Sequence[TokenArrays],
        *,
        pad_id: int,
        fingerprint: str,
        pairs: bool = False,
        verdicts: bool = False,
        packed: PackedIndex | None = None,
        audio: AudioInputs | None = None,
        drawing: Drawing | None = None,
    ) -> None:
        self.audio = audio
        self.drawing = drawing
        self.sources = tuple(sources)
        self.pad_id = pad_id
        self.pairs, self.verdicts = pairs, verdicts
        self.packed = packed
        self.fingerprint = fingerprint
        self.source_arrays = tuple(arrays)
        counts = [len(tokens.lines) for tokens in arrays]
        self._first = [0, *np.cumsum(counts).tolist()]  # first sample of each source
        self._lengths = np.concatenate([np.diff(tokens.offsets).astype(np.int32) for tokens in arrays])
        self.source_of = np.repeat(np.arange(len(counts), dtype=np.int16), counts)
        self._readers = tuple(code_reader(tokens) for tokens in arrays)
        self._drawn: dict[int, EpochSource] = {
            number: drawing.source(tokens, number, self._readers[number])
            for number, (source, tokens) in enumerate(zip(self.sources, arrays, strict=True))
            if drawing is not None and source.kind == drawing.kind and len(tokens.lines)
        }

    def __len__(self) -> int:
        return self._first[-1]

    @property
    def probabilities(self) -> list[float]:
        return [source.probability for source in self.sources]

    @property
    def varies(self) -> bool:
        """Whether samples differ from epoch to epoch."""
        return bool(self._drawn)

    @property
    def lengths(self) -> np.ndarray:
        return self.lengths_in(0)

    @property
    def levels(self) -> int:
        """The levels of the codes that batches have; 0: none."""
        return 0 if self.drawing is None else self.drawing.levels

    @cached_property
    def speaker_of(self) -> np.ndarray:
        """int32[n], the number of each recording's speaker over all sources; -1: not known, or no recording."""
        numbers: dict[str, int] = {}
        speakers = np.full(len(self), -1, np.int32)
        for first, reader in zip(self._first, self._readers, strict=False):
            if reader is None:
                continue
            own = [numbers.setdefault(name, len(numbers)) for name in reader.facts.speakers]
            of = reader.speaker()
            known = np.flatnonzero(of >= 0)
            speakers[first + known] = np.array(own, np.int32)[of[known]]
        return speakers

    @cached_property
    def milliseconds(self) -> np.ndarray:
        """int32[n], the length of each recording as codes; 0: not known."""
        found = np.zeros(len(self), np.int32)
        for first, reader in zip(self._first, self._readers, strict=False):
            if reader is not None:
                found[first : first + len(reader)] = reader.milliseconds()
        return found

    def codes(self, index: int) -> np.ndarray:
        """Return the codes of a recording, as they are before anything is drawn: int32[C, T].

        Raises:
            DataError: the shard in which they lie was changed.
        """
        source = int(self.source_of[index])
        reader = self._readers[source]
        assert reader is not None, "the sample is a recording as codes"
        return reader.codes(index - self._first[source])

    def lengths_in(self, epoch: int) -> np.ndarray:
        """Return the positions of each sample in an epoch: int32[n]; 0 for one that is left out of it."""
        if not self.varies:
            return self._lengths
        lengths = self._lengths.copy()
        for number, source in self._drawn.items():
            lengths[self._first[number] : self._first[number + 1]] = source.lengths(epoch).positions
        return lengths

    @cached_property
    def longest(self) -> np.ndarray:
        """int32[n], the positions that each sample has at most in any epoch."""
        lengths = self._lengths.copy()
        for number, source in self._drawn.items():
            lengths[self._first[number] : self._first[number + 1]] = source.longest
        return lengths

    def too_long_in(self, epoch: int) -> tuple[int, int]:
        """Return how many samples are too long in an epoch and left out of it, and how many lose segments in it."""
        found = [source.lengths(epoch) for source in self._drawn.values()]
        return sum(lengths.left_out for lengths in found), sum(lengths.shortened for lengths in found)

    def sample(self, index: int, epoch: int = 0) -> Sample:
        """Return the tokens and labels of a sample: views of the mapped files, not copies.

        Args:
            epoch: in which a sample that differs from epoch to epoch is wanted.
        """
        tokens, offset = self._locate(index)
        drawn = self._drawn.get(int(self.source_of[index]))
        return tokens.sample(offset) if drawn is None else drawn.sample(offset, epoch)

    def location(self, index: int) -> str:
        """Return the origin of a sample, as "file.jsonl:17"."""
        if self.packed is not None:
            path = self.packed.files[self.packed.file_of[index]]
        else:
            number = int(self.source_of[index])
            reader = self._readers[number]
            path = "" if reader is None else reader.records_file(index - self._first[number])
            path = path or str(self.sources[number].path)
        return f"{path}:{self.line(index)}"

    def line(self, index: int) -> int:
        """Return the line on which the record of a sample begins."""
        tokens, offset = self._locate(index)
        return int(tokens.lines[offset])

    @cached_property
    def report(self) -> DatasetReport:
        total, lengths = sum(self.probabilities), self.lengths
        own_lengths = [lengths[start:end] for start, end in pairwise(self._first)]
        return DatasetReport(
            tuple(
                SourceReport(
                    path=str(source.path),
                    kind=source.kind,
                    probability=source.probability / total,
                    **self._counts(number),
                    unused_fields=tuple(UnusedField(*field) for field in tokens.metadata["unused_fields"]),
                    first_skipped=tuple((line, problem) for line, problem in tokens.metadata.get("skipped", ())),
                    skipped_file=tokens.metadata.get("skipped_file", ""),
                    samples=len(tokens.lines),
                    tokens=int(own_lengths[number].sum(dtype=np.int64)),
                    lengths=length_percentiles(own_lengths[number]),
                    audio=audio_counts(tokens.metadata),
                    speech=SpeechFacts.of(tokens.metadata),
                    part="" if source.split is None else str(source.split),
                )
                for number, (source, tokens) in enumerate(zip(self.sources, self.source_arrays, strict=True))
            )
        )

    def _counts(self, number: int) -> dict[str, int]:
        """Return the counts of a source; of one that is drawn, what every position of epoch 0 predicts."""
        counts: dict[str, int] = self.source_arrays[number].metadata["counts"]
        if number not in self._drawn:
            return counts
        return {**counts, "targets": int(self._drawn[number].lengths(0).positions.sum(dtype=np.int64))}

    def _locate(self, index: int) -> tuple[TokenArrays, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        source = bisect_right(self._first, index) - 1
        return self.source_arrays[source], index - self._first[source]
