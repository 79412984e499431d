"""The reference of a preference loss: the model as it was at the start of the run, or when it was last updated.

Three ways to the same log-probabilities:

| | memory | time |
|---|---|---|
| `AdapterReference` | none, or that of the adapters | a forward pass with every batch |
| `FrozenReference` | that of the weights | a forward pass with every batch |
| `PrecomputedReference` | 8 bytes a pair | a forward pass for every pair, once |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

import numpy as np
import paddle
from paddle import Tensor

from erniekit.errors import TrainingError
from erniekit.model.decoder import Decoder
from erniekit.model.lora.lora import named_adapter_weights, without_adapters
from erniekit.model.weights import named_weights
from erniekit.training.collectives import SINGLE_PROCESS, Ranks

ReferenceLogps = tuple[
    Tensor, Tensor
]  # of a batch: summed log-probabilities of its chosen and its rejected answers, [pairs]
ComputeLogps = Callable[[Decoder, Sequence[Any]], Sequence[ReferenceLogps]]  # (model, batches)


class Reference(Protocol):
    """What a preference loss asks of its reference, and a run of it."""

    def __call__(self, batches: Sequence[Any]) -> Sequence[ReferenceLogps]:
        """The summed log-probabilities of the chosen and rejected answers of each batch."""
        ...

    def update(self) -> None:
        """Become the model as it is now."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """What a checkpoint must hold, beside the model, for a resumed run to have the same reference."""
        ...


class AdapterReference:
    """The trained model itself, with its adapters put aside or replaced by earlier ones for the moment.

    Args:
        adapters: the reference's adapters, where they are not without effect.
        ranks: among which the model is divided.
    """

    def __init__(
        self,
        model: Decoder,
        measure: ComputeLogps,
        adapters: Mapping[str, Tensor] | None = None,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        self._model, self._measure, self._adapters, self._ranks = model, measure, adapters, ranks

    def __call__(self, batches: Sequence[Any]) -> Sequence[ReferenceLogps]:
        if self._adapters is None:
            with without_adapters(self._model), eval_mode(self._model):
                return self._measure(self._model, batches)
        trained = named_adapter_weights(self._model)
        with self._ranks.gather_params(trained.values()), eval_mode(self._model):
            own = clone_tensors(trained)
            set_values(trained, self._adapters)
            try:
                return self._measure(self._model, batches)
            finally:
                set_values(trained, own)

    def update(self) -> None:
        trained = named_adapter_weights(self._model)
        with self._ranks.gather_params(trained.values()):
            self._adapters = clone_tensors(trained)

    def tensors(self) -> Mapping[str, Tensor]:
        return self._adapters or {}


class FrozenReference:
    """A second model that is not trained.

    Args:
        updated: whether the run calls `update`; otherwise checkpoints need not hold the copy, for it is the model that
            the run starts from.
        ranks: among which the model is divided.
    """

    def __init__(
        self, copy: Decoder, model: Decoder, measure: ComputeLogps, *, updated: bool, ranks: Ranks = SINGLE_PROCESS
    ) -> None:
        self._copy, self._model, self._measure, self._updated, self._ranks = copy, model, measure, updated, ranks
        copy.eval()
        for parameter in copy.parameters():
            parameter.stop_gradient = True

    def __call__(self, batches: Sequence[Any]) -> Sequence[ReferenceLogps]:
        with paddle.no_grad():
            return self._measure(self._copy, batches)

    def update(self) -> None:
        weights = named_weights(self._model)
        for name, copied in named_weights(self._copy).items():  # one by one: the whole model may be too large
            with self._ranks.gather_params([weights[name]]):
                copied.set_value(weights[name])

    def tensors(self) -> Mapping[str, Tensor]:
        return named_weights(self._copy) if self._updated else {}


class PrecomputedReference:
    """Log-probabilities that were measured before the run.

    Args:
        table: fp32[samples, 2], chosen and rejected; a row for every pair of the dataset, NaN where it is not needed.
    """

    def __init__(self, table: np.ndarray) -> None:
        self.table = table

    def __call__(self, batches: Sequence[Any]) -> Sequence[ReferenceLogps]:
        return [self._of(batch) for batch in batches]

    def _of(self, batch: Any) -> ReferenceLogps:
        values = self.table[_samples(batch)]
        assert not np.isnan(values).any(), "a pair was not measured before the run"
        return paddle.to_tensor(values[:, 0]), paddle.to_tensor(values[:, 1])

    def update(self) -> None:
        raise AssertionError("a table of log-probabilities cannot follow the model")

    def tensors(self) -> Mapping[str, Tensor]:
        return {}


def has_missing_logps(table: np.ndarray, batches: Iterable[Any]) -> bool:
    """Whether `batches` need a row of `table` (see `PrecomputedReference`) that is NaN."""
    return any(np.isnan(table[_samples(batch)]).any() for batch in batches)


def precompute_missing_logps(
    table: np.ndarray,
    batches: Iterable[Any],
    model: Decoder,
    measure: ComputeLogps,
    describe_sample: Callable[[int], str] = "pair {}".format,
    ranks: Ranks = SINGLE_PROCESS,
) -> int:
    """Fill the rows of `table` (see `PrecomputedReference`) that `batches` need and that are NaN, here and on the
    other ranks.

    Args:
        batches: those of this rank, on every rank as many.
        describe_sample: where the sample of a number comes from, for errors.

    Returns:
        How many pairs were measured, by all ranks.

    Raises:
        TrainingError: log-probabilities are not finite; names one of the pairs.
    """
    count = 0
    batches = iter(batches)
    with eval_mode(model):
        while some := list(islice(batches, ranks.num_forward_batches)):
            lacking = ranks.all_gather_object([bool(np.isnan(table[_samples(batch)]).any()) for batch in some])
            asked = [batch for batch, lack in zip(some, zip(*lacking, strict=True), strict=True) if any(lack)]
            # ranks that share a model go through it together
            for batch, constants in zip(asked, measure(model, asked) if asked else (), strict=True):
                count += _fill(table, _samples(batch), constants, describe_sample)
    known = ~np.isnan(table)
    filled, ranks_that_know = ranks.sum(np.stack([np.where(known, table, 0.0), known.astype(np.float64)]))
    np.copyto(table, filled / np.maximum(1, ranks_that_know), where=~known & (ranks_that_know > 0), casting="same_kind")
    return int(ranks.sum(np.array([count]))[0])


def _fill(
    table: np.ndarray, samples: np.ndarray, constants: ReferenceLogps, describe_sample: Callable[[int], str]
) -> int:
    """Put what was measured of these pairs where the table lacks it; returns of how many pairs."""
    missing = np.isnan(table[samples]).any(axis=1)
    measured = np.stack([values.numpy() for values in constants], axis=1)
    unusable = missing & ~np.isfinite(measured).all(axis=1)
    if unusable.any():
        raise TrainingError(
            f"{describe_sample(int(samples[unusable][0]))}: the reference gives log-probabilities that are not finite "
            f"to {unusable.sum()} of {len(samples)} pairs\n  Its weights are damaged, or hold numbers that are not "
            "finite; name another model."
        )
    table[samples[missing]] = measured[missing]
    return len(np.unique(samples[missing]))


@contextmanager
def eval_mode(model: Decoder) -> Iterator[None]:
    """Without gradients and dropout; the model's mode is put back afterwards."""
    was_training = model.training
    model.eval()
    try:
        with paddle.no_grad():
            yield
    finally:
        if was_training:
            model.train()


def clone_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Constant copies, by the same names."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def set_values(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Give every tensor the value of its name."""
    for name, tensor in tensors.items():
        tensor.set_value(values[name])


def _samples(batch: Any) -> np.ndarray:
    """The dataset's index of every pair, int64[pairs]."""
    return np.array([sample for row in batch.samples for sample in row], dtype=np.int64)
