"""Decide which samples make which optimizer step.

The plan is a function of (seed, epoch) and of the lengths of the samples, so resuming needs one integer, the step.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from erniekit.data.batch import Batch
from erniekit.data.collate import collate
from erniekit.data.dataset import Dataset
from erniekit.data.media.audio_batch import audio_arrays
from erniekit.data.media.clip import AudioInputs
from erniekit.data.mixing import Purpose, epoch_order, generator
from erniekit.data.packing import Packs, concatenate_packs, group_by_length, pack_greedy, pack_none, pack_sequential
from erniekit.data.speakers import speaker_order
from erniekit.data.templates.ernie import Sample
from erniekit.errors import ConfigurationError, DataError

BatchSource = Callable[[Callable[[], list[Batch]]], list[Batch]]

MAX_CACHED_EPOCHS = 2  # prefetching runs into the next epoch while the last one is still in use
MAX_COUNTED_EPOCHS = 10_000  # where each has to be packed to know how many steps it has


def local_batches(read: Callable[[], list[Batch]]) -> list[Batch]:
    """Read in this process."""
    return read()


def takes_recordings(dataset: Dataset, batch_seconds: float) -> np.ndarray:
    """Return which samples are no longer than micro-batches may be, in seconds (0: any length): bool[n]."""
    if not batch_seconds:
        return np.ones(len(dataset), bool)
    return dataset.milliseconds <= round(1000 * batch_seconds)


class StepPlan:
    """The steps of a run; they can be read in any order.

    A step takes `batch_size * accumulation * dp_world_size` packs. They are cut into micro-batches of `batch_size`
    rows, and data rank r takes the micro-batches r, r + dp_world_size, ... So a step has the same packs however they
    are spread over rows, micro-batches and ranks. Steps count from 0 over the whole run. Where the packs do not divide,
    an epoch ends with a step of fewer packs, and a rank that would have fewer micro-batches than the others gets one of
    padding.

    `mixing.epoch_order` gives the samples of an epoch. They are packed in windows of at most `window` samples. Packing
    begins with long samples, so afterwards the packs of a window are shuffled, or sorted by their first samples.

    Args:
        batch_tokens: samples of similar length share a micro-batch, each in its own row, and rows x longest row is at
            most this number. A step then takes `accumulation * dp_world_size` such micro-batches. They are grouped in
            the same windows and ordered as packs are. 0 groups nothing.
        batch_seconds: the same with the seconds of recordings in the place of positions; longer ones are left out.
        shortest, longest: samples that are shorter or longer are left out.
        sorted_first: the first epoch goes from the shortest sample to the longest: packs are filled in that order, and
            groups keep it. Later epochs are not affected.
        by_duration: the first epoch is sorted by the duration of recordings in the place of positions.
        by_speaker: `speakers.speaker_order` gives the samples of an epoch, in which every speaker is heard equally
            often; sources are not mixed.
        packs: every epoch has these packs, in this order.
        multiple_of: the length of rows is a multiple of it, with padding where samples do not fill them.
        batch_source: reads the micro-batches for this process, perhaps in another one. It is called with the function
            that would read them here, in the order in which the loop asks for them.
        source: only samples of this source of the dataset (see `eval_sampler`).
        embeds: whether this rank makes the hidden states of the first layer; the sound of recordings is read for it
            alone.

    Where samples are both shuffled and packed (or grouped), the number of packs of an epoch depends on its order, so
    such epochs are packed to be counted; where samples differ from epoch to epoch (`Dataset.varies`), all are.
    Otherwise all epochs have the same number of packs, and without shuffling the same packs.

    Whoever changes any of this must raise `erniekit.data.PLAN_VERSION`.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        max_seq_len: int,
        packing: bool,
        greedy: bool,
        window: int,
        batch_size: int,
        accumulation: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        seed: int = 42,
        shuffle: bool = True,
        strategy: str = "concat",
        num_samples_each_epoch: int = 6_000_000,
        repeat_samples: bool = False,
        batch_tokens: int = 0,
        max_batch_samples: int = 0,
        shortest: int = 1,
        longest: int | None = None,
        batch_seconds: float = 0.0,
        sorted_first: bool = False,
        by_duration: bool = False,
        by_speaker: bool = False,
        source: int | None = None,
        packs: Packs | None = None,
        multiple_of: int = 1,
        batch_source: BatchSource = local_batches,
        embeds: bool = True,
    ) -> None:
        assert (packing, batch_tokens > 0, batch_seconds > 0).count(True) <= 1, "samples are packed or grouped"
        self.dataset = dataset
        self.max_seq_len = max_seq_len
        self.batch_source = batch_source
        self._multiple_of = multiple_of
        self._embeds = embeds
        self._packing, self._greedy, self._window = packing, greedy, window
        self._batch_tokens, self._max_batch_samples = batch_tokens, max_batch_samples
        self._batch_seconds = batch_seconds
        self._grouped = bool(batch_tokens or batch_seconds)
        self._shortest, self._longest = shortest, longest
        self._by_duration, self._by_speaker = by_duration, by_speaker
        self._batch_size = 1 if self._grouped else batch_size  # a group is a whole micro-batch
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
        self.packs_per_step = self._batch_size * accumulation * dp_world_size
        self._seed, self._shuffle = seed, shuffle
        self._strategy, self._num_samples, self._repeat = strategy, num_samples_each_epoch, repeat_samples
        self._sorted_first, self._source, self._prepacked = sorted_first, source, packs
        self._varies = packs is None and dataset.varies
        sized = packing or self._grouped
        self._equal_epochs = not (sized and (shuffle or sorted_first)) and not self._varies and not by_speaker
        self._epochs: OrderedDict[int, Packs] = OrderedDict()
        self._first_steps = [0]  # of each epoch that had to be counted
        self._lock = threading.RLock()  # prefetching threads share the plan

    def packs(self, epoch: int) -> Packs:
        """Return the packs (or groups) of an epoch, as dataset indices. Two epochs are cached."""
        key = self._epoch_with_same_packs(epoch)
        with self._lock:
            if key not in self._epochs:
                self._epochs[key] = self._build(key)
                while len(self._epochs) > MAX_CACHED_EPOCHS:
                    self._epochs.popitem(last=False)
            self._epochs.move_to_end(key)
            return self._epochs[key]

    def steps_in_epoch(self, epoch: int) -> int:
        return self._first_step(epoch + 1) - self._first_step(epoch)

    def total_steps(self, max_steps: int, num_train_epochs: float) -> int:
        """Return `max_steps` where it is positive, else the number of steps of the epochs; the last one may be a part,
        whose steps are rounded up as in transformers.

        Raises:
            ConfigurationError: more than MAX_COUNTED_EPOCHS epochs would have to be packed to be counted.
        """
        if max_steps > 0:
            return max_steps
        if num_train_epochs > MAX_COUNTED_EPOCHS and not self._equal_epochs:
            raise ConfigurationError(
                f"num_train_epochs {num_train_epochs:,}: with packing (or batch_tokens) and random_shuffle (or "
                "curriculum), and with records of aligned_units or of codes, every epoch has to be packed "
                f"to know its steps, which is done for at most {MAX_COUNTED_EPOCHS:,}\n  Set max_steps instead."
            )
        whole = int(num_train_epochs)
        steps = self._first_step(whole)
        part = num_train_epochs - whole
        return steps + (math.ceil(part * self.steps_in_epoch(whole)) if part else 0)

    def epoch_of(self, step: int) -> float:
        """Return how many epochs are done when `step` begins: 1.5 is the middle of the second epoch."""
        epoch, within = self._locate(step)
        return epoch + (within / self.steps_in_epoch(epoch) if within else 0.0)

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of a step; every rank gets the same number of them."""
        return self.batch_source(lambda: self.read(step))

    def read(self, step: int) -> list[Batch]:
        """Return the same micro-batches, read by this process."""
        epoch, within = self._locate(step)
        packs = self.packs(epoch)
        first = within * self.packs_per_step
        last = min(first + self.packs_per_step, len(packs))
        starts = range(first, last, self._batch_size)
        count = math.ceil(len(starts) / self.dp_world_size)
        local_starts = starts[self.dp_rank :: self.dp_world_size]
        batches = [
            self._collate([packs[i] for i in range(start, min(start + self._batch_size, last))], epoch)
            for start in local_starts
        ]
        return batches + [self.padding()] * (count - len(batches))

    def padding(self) -> Batch:
        """Return a micro-batch without samples."""
        return self._collate([np.empty(0, np.int64)], 0)

    @cached_property
    def excluded_counts(self) -> tuple[int, int]:
        """The number of samples that are too short to take part, and of those that are too long."""
        lengths = self.dataset.lengths
        too_long = 0 if self._longest is None else int(np.count_nonzero(lengths > self._longest))
        return int(np.count_nonzero((lengths > 0) & (lengths < self._shortest))), too_long

    @cached_property
    def _takes_part(self) -> np.ndarray:
        """bool[n], false for recordings that are longer than micro-batches may be."""
        return takes_recordings(self.dataset, self._batch_seconds)

    def describe(self, max_steps: int = -1, num_train_epochs: float = 1) -> str:
        """Describe the packing of the first epoch and the exact number of steps, for the lines before step 1."""
        packs = self.packs(0)
        lengths = self.dataset.lengths_in(0)[packs.members]
        tokens = int(lengths.sum())
        total = self.total_steps(max_steps, num_train_epochs)
        if self._grouped:
            unit = "batches"
            positions = int((np.maximum.reduceat(lengths, packs.starts[:-1]) * np.diff(packs.starts)).sum())
            limit, method = f"{self._batch_tokens:,} tokens", "of similar length"
            if self._batch_seconds:
                limit, method = f"{self._batch_seconds:g} seconds", "of similar duration"
            filled = f"{1 - tokens / positions:.1%} padding"
        else:
            unit = "packs"
            limit = f"{self.max_seq_len:,}"
            greedy = self._greedy and not self._sorted_first
            method = "one sample each" if not self._packing else "greedy" if greedy else "in order"
            filled = f"{tokens / (len(packs) * self.max_seq_len):.1%} full"
        method = "as they were packed" if self._prepacked is not None else method
        method += ", short ones first" if self._sorted_first else ""
        method += ", every speaker equally often" if self._by_speaker else ""
        too_short, too_long = self.excluded_counts
        longer = int(np.count_nonzero(~self._takes_part))
        beyond = f"left out: {longer:,} recordings longer than batch_seconds {self._batch_seconds:g}"
        left_out = f"left out: {too_short:,} samples shorter than {self._shortest:,}"
        left_out += f", {too_long:,} longer than {self._longest:,}" if self._longest is not None else ""
        return "\n".join(
            [
                *([left_out] if too_short or too_long else []),
                *([beyond] if longer else []),
                *self._describe_too_long(),
                f"epoch 0: {len(packs.members):,} samples, {tokens:,} tokens in {len(packs):,} {unit} of at most "
                f"{limit} ({method}), {filled}",
                f"steps: {self.packs_per_step:,} {unit} each, {self.steps_in_epoch(0):,} an epoch, {total:,} in total",
            ]
        )

    def _describe_too_long(self) -> list[str]:
        """Describe what `over_length_policy` does to samples that differ from epoch to epoch; [] if nothing."""
        left_out, shortened = self.dataset.too_long_in(0)
        counts = ((left_out, "left out"), (shortened, "without their oldest segments"))
        parts = [f"{count:,} {what}" for count, what in counts if count]
        return [f"epoch 0: of the samples that came out longer than max_seq_len, {', '.join(parts)}"] if parts else []

    def _epoch_with_same_packs(self, epoch: int) -> int:
        """Return the first epoch that has the same packs."""
        if self._shuffle or self._varies or self._by_speaker:
            return epoch
        return min(epoch, 1) if self._sorted_first else 0

    def _collate(self, packs: list[np.ndarray], epoch: int) -> Batch:
        if self._grouped:
            packs = np.split(packs[0], range(1, len(packs[0])))  # each sample in a row of its own
        rows = [[self.dataset.sample(int(index), epoch) for index in pack] for pack in packs]
        numbers = [pack.tolist() for pack in packs]
        batch = collate(rows, numbers, self.dataset.pad_id, pairs=self.dataset.pairs, **self._code_arrays)
        if self.dataset.audio is not None and self._embeds:
            batch = batch.with_arrays(**self._audio_arrays(rows, batch, self.dataset.audio))
        count, length = batch.input_ids.shape
        return batch.padded(count, length + -length % self._multiple_of) if length % self._multiple_of else batch

    @property
    def _code_arrays(self) -> dict[str, Any]:
        """The arguments of `collate` for samples that are drawn of codes; empty for others."""
        drawing = self.dataset.drawing
        if drawing is None or not drawing.levels:
            return {}
        return {"arrays": drawing.arrays, "both_ways": True, "levels": drawing.levels}

    def _audio_arrays(self, rows: list[list[Sample]], batch: Batch, inputs: AudioInputs) -> dict[str, np.ndarray]:
        """Read the recordings of a micro-batch.

        Raises:
            DataError: one cannot be read, or is not what it was when the samples were made.
        """
        try:
            return audio_arrays(rows, batch.shape, inputs)
        except DataError:  # whose recording is it?
            for indices, row in zip(batch.samples, rows, strict=True):
                for index, sample in zip(indices, row, strict=True):
                    try:
                        audio_arrays([[sample]], (1, len(sample.input_ids)), inputs)
                    except DataError as error:
                        raise DataError(f"{self.dataset.location(index)}: {error}") from None
            raise

    def _locate(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and the step's number in it, without counting the epochs that begin later."""
        assert step >= 0, "steps count from 0"
        if self._equal_epochs:
            return divmod(step, self._first_step(1))
        with self._lock:
            while self._first_steps[-1] < step:
                self._first_step(len(self._first_steps))
            epoch = bisect_right(self._first_steps, step) - 1
            return epoch, step - self._first_steps[epoch]

    def _first_step(self, epoch: int) -> int:
        """Return how many steps the epochs before this one have together."""
        with self._lock:  # between looking at the list and adding to it, no other thread may add
            counted = min(epoch, 1) if self._equal_epochs else epoch
            while len(self._first_steps) <= counted:
                steps = math.ceil(self._count(len(self._first_steps) - 1) / self.packs_per_step)
                self._first_steps.append(self._first_steps[-1] + steps)
            return epoch * self._first_steps[counted] if self._equal_epochs else self._first_steps[epoch]

    def _count(self, epoch: int) -> int:
        """Count the packs of an epoch, without evicting from the cache the epochs that are trained on first."""
        if self._epoch_with_same_packs(epoch) in self._epochs or len(self._epochs) < MAX_CACHED_EPOCHS:
            return len(self.packs(epoch))
        return len(self._build(epoch))

    def _build(self, epoch: int) -> Packs:
        if self._prepacked is not None:
            return self._prepacked
        all_lengths = self.dataset.lengths_in(epoch)
        order = self._order(epoch, all_lengths)
        if self._sorted_first and epoch == 0:
            by = self.dataset.milliseconds if self._by_duration else all_lengths
            order = order[np.argsort(by[order], kind="stable")]
            if self._grouped:
                return self._groups(order, all_lengths).select_from(order)
            lengths = all_lengths[order]
            packs = pack_sequential(lengths, self.max_seq_len) if self._packing else pack_none(lengths)
            return packs.select_from(order)
        if not (self._packing or self._grouped):
            return pack_none(all_lengths[order]).select_from(order)
        if self._packing and not self._greedy:
            return pack_sequential(all_lengths[order], self.max_seq_len).select_from(order)
        return concatenate_packs(
            [self._window_packs(part, all_lengths, epoch, number) for number, part in enumerate(self._windows(order))]
        )

    def _order(self, epoch: int, all_lengths: np.ndarray) -> np.ndarray:
        """Return the samples of an epoch in order, without those that are left out.

        Raises:
            DataError: none is left.
        """
        if self._by_speaker:
            fitting = np.flatnonzero(self._takes_part)
            speakers = self.dataset.speaker_of[fitting]
            order = fitting[speaker_order(speakers, seed=self._seed, epoch=epoch, shuffle=self._shuffle)]
        else:
            order = epoch_order(
                self.dataset.source_of, self.dataset.probabilities, self._strategy,
                seed=self._seed, epoch=epoch, shuffle=self._shuffle, num_samples=self._num_samples,
                repeat=self._repeat,
            )  # fmt: skip
        if self._source is not None:
            order = order[self.dataset.source_of[order] == self._source]
        if (
            any(self.excluded_counts) or self._varies or not self._takes_part.all()
        ):  # a sample of no length is left out of this epoch
            lengths = all_lengths[order]
            fits = (lengths >= self._shortest) & (lengths <= (self._longest or lengths))
            order = order[fits & self._takes_part[order]]
        if not len(order):
            what = (
                "; all are shorter than min_sample_len or longer than max_sample_len"
                if any(self.excluded_counts)
                else f"; all are longer than batch_seconds {self._batch_seconds:g}"
                if not self._takes_part.any()
                else f"; all are longer than max_seq_len {self.max_seq_len:,} in epoch {epoch}"
                if self._varies
                else ""
            )
            raise DataError(f"no sample to train on{what}")
        return order

    def _windows(self, order: np.ndarray) -> list[np.ndarray]:
        """Split into equal parts of at most `window` samples, because a small rest at the end would be packed badly."""
        return np.array_split(order, math.ceil(len(order) / self._window))

    def _window_packs(self, samples: np.ndarray, all_lengths: np.ndarray, epoch: int, number: int) -> Packs:
        if self._grouped:
            packs = self._groups(samples, all_lengths)
        else:
            packs = pack_greedy(all_lengths[samples], self.max_seq_len)
        if self._shuffle:
            sequence = generator(Purpose.PACK_ORDER, self._seed, epoch, number).permutation(len(packs))
        else:
            sequence = np.argsort(np.minimum.reduceat(packs.members, packs.starts[:-1]))
        return packs.reordered(sequence).select_from(samples)

    def _groups(self, samples: np.ndarray, all_lengths: np.ndarray) -> Packs:
        """Group samples of similar length, or recordings of similar duration, by their places in `samples`."""
        if self._batch_seconds:
            sizes, budget = np.maximum(1, self.dataset.milliseconds[samples]), round(1000 * self._batch_seconds)
        else:
            sizes, budget = all_lengths[samples], self._batch_tokens
        return group_by_length(sizes, budget, self._max_batch_samples)
