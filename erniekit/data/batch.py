"""A micro-batch: named arrays, each with a rule that pads it.

A data kind adds an array by adding a row to `ARRAY_SPECS` (or by `register_array`). Collating, padding and shipping
between ranks loop over the arrays, so nothing else has to list them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from erniekit.data.media.clip import AudioInputs
from erniekit.data.templates.ernie import IGNORE_INDEX

PadWidths = Sequence[tuple[int, int]]  # as np.pad takes them: for each axis, how much to add before and after
PadFunction = Callable[[np.ndarray, PadWidths], np.ndarray]


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Describe one array of a batch.

    Attributes:
        dtype: NumPy's name of its type.
        axes: one character for each axis: "B" for the rows of the batch, "S" for the positions; any other character is
            an axis that padding leaves as it is. For example "BSC" for C codes at each position.
        pad: the value of added rows and positions, or a function that adds them.
    """

    dtype: str
    axes: str
    pad: float | PadFunction

    def full(self, rows: int, length: int, *other_sizes: int) -> np.ndarray:
        """Return an array of padding only; `other_sizes` are those of the axes that are neither "B" nor "S"."""
        assert not callable(self.pad), "an array with a pad function has no value for padding"
        others = iter(other_sizes)
        sizes = [{"B": rows, "S": length}[axis] if axis in "BS" else next(others) for axis in self.axes]
        return np.full(sizes, self.pad, self.dtype)

    def padded(self, array: np.ndarray, rows: int, length: int) -> np.ndarray:
        """Return the array with at least its own number of rows and positions."""
        sizes = {"B": rows, "S": length}
        widths = [(0, sizes.get(axis, size) - size) for axis, size in zip(self.axes, array.shape, strict=True)]
        if callable(self.pad):
            return self.pad(array, widths)
        return np.pad(array, widths, constant_values=self.pad)


def extend_padding(indices_B1Sn: np.ndarray, widths: PadWidths) -> np.ndarray:
    """Pad FlashMask's indices: new columns hold the start of their row's padding, as its last column does in the first
    of its values; new rows hold 0."""
    rows, _, columns, _ = widths
    length, values = indices_B1Sn.shape[2:]
    longer = np.pad(indices_B1Sn[..., :1], [(0, 0), (0, 0), columns, (0, values - 1)], mode="edge")
    longer[:, :, :length] = indices_B1Sn
    return np.pad(longer, [rows, (0, 0), (0, 0), (0, 0)])


ARRAY_SPECS: dict[str, ArraySpec] = {
    "input_ids": ArraySpec("int64", "BS", 0),
    "position_ids": ArraySpec("int64", "BS", 0),
    "labels": ArraySpec("int64", "BS", IGNORE_INDEX),
    "startend_row_indices": ArraySpec("int32", "B1Sn", extend_padding),
    "answers": ArraySpec("int32", "BS", -1),
    "score_differences": ArraySpec("float32", "P", 0),
    # Of batches for a model with an audio encoder: A windows of T frames with M mel bins, the frames of sound in each
    # (the others are silence), and for each position the encoder's state that stands there: w x window_tokens + t for
    # state t of window w, -1 where there is none.
    "audio_features": ArraySpec("float32", "AMT", 0),
    "audio_frames": ArraySpec("int32", "A", 0),
    "audio_states": ArraySpec("int64", "BS", -1),
    # Of batches of codes, C levels: the rows of the model's code tables that each position reads, and the code of each
    # level that it should predict; `CodePart` says what the targets of a position belong to.
    "codes": ArraySpec("int64", "BSC", -1),
    "code_labels": ArraySpec("int64", "BSC", IGNORE_INDEX),
    "code_part": ArraySpec("int8", "BS", 0),
    # Of batches of sampled answers, at the positions that predict their tokens: the number of the answer in its batch;
    # its advantage; the log-probabilities of the token where it was sampled, before the first update, and under the
    # reference. Of each of P answers F figures, such as its reward.
    "answer_of": ArraySpec("int32", "BS", -1),
    "advantages": ArraySpec("float32", "BS", 0),
    "sampled_logps": ArraySpec("float32", "BS", 0),
    "old_logps": ArraySpec("float32", "BS", 0),
    "reference_logps": ArraySpec("float32", "BS", 0),
    "answer_figures": ArraySpec("float32", "PF", 0),
}


def register_array(name: str, spec: ArraySpec) -> None:
    """Add an array that batches may have.

    Raises:
        ValueError: `name` has another specification already.
    """
    if ARRAY_SPECS.setdefault(name, spec) != spec:
        raise ValueError(f"batch array {name!r}: registered already as {ARRAY_SPECS[name]}; choose another name")


def array_spec(name: str) -> ArraySpec:
    """Return the specification of an array.

    Raises:
        ValueError: there is none, so nothing says how to pad the array.
    """
    if name not in ARRAY_SPECS:
        raise ValueError(
            f"batch array {name!r}: it has no pad rule; add one with register_array({name!r}, ArraySpec(...))"
        )
    return ARRAY_SPECS[name]


@dataclass(frozen=True, slots=True)
class PairSpans:
    """Where the answers of a micro-batch of pairs are; a view of two of its arrays.

    Pairs are numbered in the order of rows, and in each row from left to right.

    Attributes:
        answers: int32[B, S]; 2 p at positions with a label of the chosen answer of pair p, 2 p + 1 at those of the
            rejected answer, -1 elsewhere.
        score_differences: float32[P], NaN where the records have no scores.
    """

    answers: np.ndarray
    score_differences: np.ndarray

    @property
    def count(self) -> int:
        """P, the number of pairs."""
        return len(self.score_differences)


class CodePart(IntEnum):
    """What the targets of a position belong to, of batches for objectives that weigh these parts."""

    NONE = 0
    TEXT = 1
    PROMPT = 2
    RESPONSE = 3
    TRANSCRIPT = 4


@dataclass(frozen=True, slots=True)
class CodeTargets:
    """What the positions of a micro-batch of codes read and predict; a view of its arrays.

    Attributes:
        codes: int64[B, S, C]; rows of the model's code tables whose sum a position reads, -1 for none. A position
            without any reads its token.
        labels: int64[B, S, C]; the code of level c that a position should predict, -100 for none.
        part: int8[B, S], the `CodePart` of each position's targets; None where the objective does not ask.
    """

    codes: np.ndarray
    labels: np.ndarray
    part: np.ndarray | None

    @property
    def counts(self) -> np.ndarray:
        """int64[C], the number of labels of each level."""
        return np.count_nonzero(self.labels != IGNORE_INDEX, axis=(0, 1))


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One micro-batch of B rows, each a pack of documents, padded to the longest row (S positions).

    Attributes:
        arrays: by name; `ARRAY_SPECS` says what each looks like. Every batch has these:
            input_ids: int64[B, S].
            position_ids: int64[B, S], from 0 in each document; 0 in the padding. In both answers of a pair they
                continue those of the prompt.
            labels: int64[B, S], already shifted; -100 where nothing is trained.
            startend_row_indices: int32[B, 1, S, n]. With n = 1 FlashMask's causal form: for each key column the first
                query row that may not see it, the end of its document. The columns of a pair's chosen answer end where
                its rejected one begins, or its prompt comes again. With n = 2 its form without causality, in which
                documents that are read both ways share a row with causal ones: the same row, and the first row that may
                see the column (see `collate.columns`). The columns of the padding hold its start in every value: no
                row sees them, and the rows of the padding see nothing.
            Batches of pairs also have those of `PairSpans`, batches of codes those of `CodeTargets`.
        samples: dataset indices of the documents in each row; an empty row holds padding only.
        token_count: the number of positions without padding.
        target_count: the number of labels; a position may have one for each level of codes.
        seconds: the length of the recordings that were encoded beforehand, as codes.

    Raises:
        ValueError: an array has no specification, or does not follow it; the message names the array.
    """

    arrays: Mapping[str, np.ndarray]
    samples: tuple[tuple[int, ...], ...]
    token_count: int
    target_count: int
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, array in self.arrays.items():
            spec = array_spec(name)
            expected = [dict(zip("BS", self.shape, strict=True)).get(axis) for axis in spec.axes]
            fits = len(expected) == array.ndim and all(
                size in (None, found) for size, found in zip(expected, array.shape, strict=True)
            )
            if array.dtype != spec.dtype or not fits:
                raise ValueError(
                    f"batch array {name!r}: {array.dtype}{list(array.shape)} is not {spec.dtype} with the axes "
                    f"{spec.axes} of a batch of B, S = {list(self.shape)}"
                )

    @property
    def shape(self) -> tuple[int, int]:
        """B and S."""
        rows, length = self.arrays["input_ids"].shape
        return rows, length

    @property
    def input_ids(self) -> np.ndarray:
        return self.arrays["input_ids"]

    @property
    def position_ids(self) -> np.ndarray:
        return self.arrays["position_ids"]

    @property
    def labels(self) -> np.ndarray:
        return self.arrays["labels"]

    @property
    def startend_row_indices(self) -> np.ndarray:
        return self.arrays["startend_row_indices"]

    @property
    def document_ends(self) -> np.ndarray:
        """int32[B, S]: the index just after each position's document (of a chosen answer, just after that answer); in
        the padding the start of the padding."""
        return self.startend_row_indices[:, 0, :, 0]

    @property
    def is_token(self) -> np.ndarray:
        """bool[B, S]: false in the padding."""
        return self.document_ends > np.arange(self.shape[1])

    @property
    def audio_seconds(self) -> float:
        """The length of its recordings, in seconds; 0.0 where there are none."""
        frames = int(self.arrays["audio_frames"].sum()) if "audio_frames" in self.arrays else 0
        return self.seconds + frames * AudioInputs.hop / AudioInputs.sampling_rate

    @property
    def pairs(self) -> PairSpans | None:
        """The answers of the pairs; None where the samples are documents."""
        if "answers" not in self.arrays:
            return None
        return PairSpans(self.arrays["answers"], self.arrays["score_differences"])

    @property
    def codes_view(self) -> CodeTargets | None:
        """What the positions of a batch of codes read and predict; None where the samples have no codes."""
        if "codes" not in self.arrays:
            return None
        return CodeTargets(self.arrays["codes"], self.arrays["code_labels"], self.arrays.get("code_part"))

    def with_arrays(self, **arrays: np.ndarray) -> Batch:
        """Return the batch with further arrays, or with others in the place of its own."""
        return replace(self, arrays={**self.arrays, **arrays})

    def padded(self, rows: int, length: int) -> Batch:
        """Return the batch padded to the shape [rows, length], which is at least its own."""
        return replace(
            self,
            arrays={name: array_spec(name).padded(array, rows, length) for name, array in self.arrays.items()},
            samples=(*self.samples, *((),) * (rows - self.shape[0])),
        )
