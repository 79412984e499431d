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
from erniekit.model.bf16 import forget_rounded
from erniekit.model.decoder import Decoder
from erniekit.model.lora.lora import named_adapter_weights, without_adapters
from erniekit.model.weights import named_weights
from erniekit.training.collectives import SINGLE_PROCESS, Ranks

# of a batch of pairs: summed log-probabilities of the chosen and the rejected answers, float32 [pairs]; of a batch of
# sampled answers: those of their tokens, float32 [tokens], alone
ReferenceLogps = tuple[Tensor, ...]
ComputeLogps = Callable[[Decoder, Sequence[Any]], Sequence[ReferenceLogps]]  # (model, batches)


class Reference(Protocol):
    """The reference model of a preference loss."""

    def __call__(self, batches: Sequence[Any]) -> Sequence[ReferenceLogps]:
        """Return the summed log-probabilities of the chosen and rejected answers of each batch."""
        ...

    def update(self) -> None:
        """Copy the model's current weights."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the extra state that a checkpoint needs for a resumed run to have the same reference."""
        ...


class AdapterReference:
    """The trained model itself, with its adapters disabled or temporarily replaced by earlier ones.

    Args:
        adapters: the reference's adapters; None: the reference has none.
        ranks: the ranks that share the model.
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
    """A frozen copy of the model.

    Args:
        updated: whether the run calls `update`; otherwise checkpoints need not store the copy, because it is the
            model that the run starts from.
        ranks: the ranks that share the model.
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
        for name, copied in named_weights(self._copy).items():  # one by one: the full model may be too large
            with self._ranks.gather_params([weights[name]]):
                copied.set_value(weights[name])

    def tensors(self) -> Mapping[str, Tensor]:
        return named_weights(self._copy) if self._updated else {}


# The tables of a run, by the names that they have in checkpoints; every rank has the whole of each.
REFERENCE_TABLES = TRAINING, EVALUATION = "training", "evaluation"


class PrecomputedReference:
    """Log-probabilities that were computed before the run.

    Args:
        table: fp32[samples, 2], chosen and rejected; a row for every pair of the dataset, NaN if it is not needed.
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
    """Return whether `batches` need a row of `table` (see `PrecomputedReference`) that is NaN."""
    return any(np.isnan(table[_samples(batch)]).any() for batch in batches)


def precompute_missing_logps(
    table: np.ndarray,
    batches: Iterable[Any],
    model: Decoder,
    measure: ComputeLogps,
    describe_sample: Callable[[int], str] = "pair {}".format,
    ranks: Ranks = SINGLE_PROCESS,
) -> int:
    """Compute the rows of `table` (see `PrecomputedReference`) that `batches` need and that are NaN, on all ranks.

    Args:
        batches: of this rank; the same number on every rank.
        describe_sample: returns the origin of a sample by its number, for errors.

    Returns:
        The number of pairs computed by all ranks.

    Raises:
        TrainingError: log-probabilities are not finite; names one of the pairs.
    """
    count = 0
    batches = iter(batches)
    with eval_mode(model):
        while some := list(islice(batches, ranks.num_forward_batches)):
            lacking = ranks.all_gather_object([bool(np.isnan(table[_samples(batch)]).any()) for batch in some])
            asked = [batch for batch, lack in zip(some, zip(*lacking, strict=True), strict=True) if any(lack)]
            # Ranks that share a model compute together.
            for batch, constants in zip(asked, measure(model, asked) if asked else (), strict=True):
                count += _fill(table, _samples(batch), constants, describe_sample)
    known = ~np.isnan(table)
    filled, ranks_that_know = ranks.sum(np.stack([np.where(known, table, 0.0), known.astype(np.float64)]))
    np.copyto(table, filled / np.maximum(1, ranks_that_know), where=~known & (ranks_that_know > 0), casting="same_kind")
    return int(ranks.sum(np.array([count]))[0])


def _fill(
    table: np.ndarray, samples: np.ndarray, constants: ReferenceLogps, describe_sample: Callable[[int], str]
) -> int:
    """Fill missing rows with the values of these pairs; return the number of pairs."""
    missing = np.isnan(table[samples]).any(axis=1)
    measured = np.stack([values.numpy() for values in constants], axis=1)
    unusable = missing & ~np.isfinite(measured).all(axis=1)
    if unusable.any():
        raise TrainingError(
            f"{describe_sample(int(samples[unusable][0]))}: the reference gives log-probabilities that are not finite "
            f"to {unusable.sum()} of {len(samples)} pairs\n  Its weights are damaged, or contain values that are not "
            "finite; name another model."
        )
    table[samples[missing]] = measured[missing]
    return len(np.unique(samples[missing]))


@contextmanager
def eval_mode(model: Decoder) -> Iterator[None]:
    """Disable gradients and dropout; the model's mode is restored afterwards."""
    was_training = model.training
    model.eval()
    try:
        with paddle.no_grad():
            yield
    finally:
        if was_training:
            model.train()


def clone_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return constant copies under the same names."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def set_values(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Set every tensor to the value of the same name."""
    for name, tensor in tensors.items():
        tensor.set_value(values[name])
    forget_rounded(tensors.values())  # adapters take turns inside of a step


def _samples(batch: Any) -> np.ndarray:
    """Return the dataset index of every pair, int64[pairs]."""
    return np.array([sample for row in batch.samples for sample in row], dtype=np.int64)
