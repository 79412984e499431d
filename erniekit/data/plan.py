"""Which samples make which optimizer step: a function of (seed, epoch) and lengths, so resuming needs one integer."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import OrderedDict

import numpy as np

from erniekit.data.batches import Batch, collate
from erniekit.data.dataset import Dataset
from erniekit.data.mixing import epoch_order
from erniekit.data.packing import Packs, join, pack_greedy, pack_none, pack_sequential
from erniekit.errors import DataError

EPOCHS_KEPT = 2  # prefetching runs into the next epoch while the last one is still in use


class StepPlan:
    """The steps of a run, in any order.

    A step takes `batch_size * accumulation * data_world` packs. They are cut into micro-batches of `batch_size` rows,
    and data rank r takes the micro-batches r, r + data_world, ...; so a step's packs are the same however they are
    spread over rows, micro-batches and ranks. Steps count from 0 over the whole run. An epoch ends with a step of fewer
    packs where they do not divide; a rank that would then have fewer micro-batches than the others gets one of padding.

    An epoch's samples come from mixing.epoch_order. They are packed in windows of at most `window` samples. Packing
    begins with the long ones, so the packs of a window are then shuffled, or put in the order of their first samples.
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
        data_rank: int = 0,
        data_world: int = 1,
        seed: int = 42,
        shuffle: bool = True,
        strategy: str = "concat",
        num_samples_each_epoch: int = 6_000_000,
        repeat_samples: bool = False,
    ) -> None:
        self.dataset = dataset
        self.max_seq_len = max_seq_len
        self._packing, self._greedy, self._window = packing, greedy, window
        self._batch_size, self._data_rank, self._data_world = batch_size, data_rank, data_world
        self.packs_per_step = batch_size * accumulation * data_world
        self._seed, self._shuffle = seed, shuffle
        self._strategy, self._num_samples, self._repeat = strategy, num_samples_each_epoch, repeat_samples
        self._epochs: OrderedDict[int, Packs] = OrderedDict()
        self._first_steps = [0]  # of each epoch that has been counted
        self._lock = threading.Lock()  # prefetching threads share the plan

    def packs(self, epoch: int) -> Packs:
        """The packs of an epoch, as dataset indices. Built on first use; the last two epochs are kept."""
        with self._lock:
            if epoch not in self._epochs:
                self._epochs[epoch] = self._build(epoch)
                while len(self._epochs) > EPOCHS_KEPT:
                    self._epochs.popitem(last=False)
            self._epochs.move_to_end(epoch)
            return self._epochs[epoch]

    def steps_in_epoch(self, epoch: int) -> int:
        return self._first_step(epoch + 1) - self._first_step(epoch)

    def total_steps(self, max_steps: int, num_train_epochs: float) -> int:
        """`max_steps` where it is positive, else the steps of the epochs; a part of an epoch counts rounded up."""
        if max_steps > 0:
            return max_steps
        whole = math.floor(num_train_epochs)
        part = num_train_epochs - whole
        return self._first_step(whole) + (math.ceil(part * self.steps_in_epoch(whole)) if part else 0)

    def epoch_of(self, step: int) -> float:
        """How many epochs are done when `step` begins: 1.5 is the middle of the second epoch."""
        epoch, within = self._locate(step)
        return epoch + within / self.steps_in_epoch(epoch)

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step; every rank gets the same number of them."""
        epoch, within = self._locate(step)
        packs = self.packs(epoch)
        first = within * self.packs_per_step
        last = min(first + self.packs_per_step, len(packs))
        starts = range(first, last, self._batch_size)
        count = math.ceil(len(starts) / self._data_world)
        own = starts[self._data_rank :: self._data_world]
        batches = [
            self._collate([packs[i] for i in range(start, min(start + self._batch_size, last))]) for start in own
        ]
        return batches + [self._collate([np.empty(0, np.int64)])] * (count - len(batches))

    def describe(self, max_steps: int = -1, num_train_epochs: float = 1.0) -> str:
        """The packing of the first epoch and the exact number of steps, as printed before step 1."""
        packs = self.packs(0)
        tokens = int(self.dataset.lengths[packs.members].sum())
        filled = tokens / (len(packs) * self.max_seq_len)
        total = self.total_steps(max_steps, num_train_epochs)
        method = "one sample each" if not self._packing else "greedy" if self._greedy else "in order"
        return (
            f"epoch 0: {len(packs.members):,} samples, {tokens:,} tokens in {len(packs):,} packs of at most "
            f"{self.max_seq_len:,} ({method}), {filled:.1%} full\n"
            f"steps: {self.packs_per_step:,} packs each, {self.steps_in_epoch(0):,} an epoch, {total:,} in total"
        )

    def _collate(self, packs: list[np.ndarray]) -> Batch:
        rows = [[self.dataset.sample(int(index)) for index in pack] for pack in packs]
        return collate(rows, [pack.tolist() for pack in packs], self.dataset.pad_id)

    def _locate(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and the step's number in it."""
        assert step >= 0, "steps count from 0"
        epoch = bisect_right(self._first_steps, step) - 1
        while self._first_step(epoch + 1) <= step:
            epoch += 1
        return epoch, step - self._first_steps[epoch]

    def _first_step(self, epoch: int) -> int:
        for counted in range(len(self._first_steps) - 1, epoch):
            steps = math.ceil(len(self.packs(counted)) / self.packs_per_step)
            if len(self._first_steps) == counted + 1:  # another thread may have been faster
                self._first_steps.append(self._first_steps[counted] + steps)
        return self._first_steps[epoch]

    def _build(self, epoch: int) -> Packs:
        order = epoch_order(
            self.dataset.source_of, self.dataset.probabilities, self._strategy,
            seed=self._seed, epoch=epoch, shuffle=self._shuffle, num_samples=self._num_samples,
            repeat=self._repeat,
        )  # fmt: skip
        if not len(order):
            raise DataError("no sample to train on")
        lengths = self.dataset.lengths[order]
        if not self._packing:
            return pack_none(lengths).of(order)
        if not self._greedy:
            return pack_sequential(lengths, self.max_seq_len).of(order)
        return join([self._window_packs(part, epoch, number) for number, part in enumerate(self._windows(order))])

    def _windows(self, order: np.ndarray) -> list[np.ndarray]:
        """Parts of equal size, at most `window`: a small rest at the end could not be packed well."""
        return np.array_split(order, math.ceil(len(order) / self._window))

    def _window_packs(self, samples: np.ndarray, epoch: int, number: int) -> Packs:
        packs = pack_greedy(self.dataset.lengths[samples], self.max_seq_len)
        if self._shuffle:
            sequence = np.random.default_rng((self._seed, epoch, number)).permutation(len(packs))
        else:
            sequence = np.argsort(np.minimum.reduceat(packs.members, packs.starts[:-1]))
        return packs.reordered(sequence).of(samples)
