"""A teacher's likeliest tokens at every target position of a dataset, written once and read again.

A folder holds `top_k.json` and the folder that it names, which has three arrays for each of n parts: `tokens-R.npy`,
int32 [N, k], the likeliest first; `logprobs-R.npy`, float32 [N, k], natural logarithms of probabilities over the whole
vocabulary at the temperature 1; and `starts-R.npy`, int64 [samples + 1], the rows of each sample. Part r has the
samples r, r + n, r + 2 n, ... `top_k.json` is written last, so a folder without it is not complete. Every run writes
arrays of its own: of several that write the same table at the same time, one is read by later ones.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from erniekit.data.batch import Batch
from erniekit.data.dataset import Dataset
from erniekit.data.templates.ernie import IGNORE_INDEX
from erniekit.errors import ConfigurationError
from erniekit.model.decoder import Decoder
from erniekit.model.decoder_layer import BatchContext
from erniekit.model.distillation_head import TeacherOfRows, TeacherRows, target_states
from erniekit.model.divergence import log_softmax
from erniekit.model.head import chunk_rows
from erniekit.model.new_rows import logits_of
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel
from erniekit.training.objectives.distillation import Teacher
from erniekit.training.objectives.forward import DecoderForward, run_forward

VERSION = 2  # raise it when the same teacher and data give other files
INDEX = "top_k.json"


class TopK(NamedTuple):
    """The likeliest tokens of T positions.

    Attributes:
        tokens: int [T, k], the likeliest first.
        logprobs: float32 [T, k].
    """

    tokens: Any
    logprobs: Any

    def named_tensors(self) -> Mapping[str, Tensor]:
        return self._asdict()


def check_complete(folder: Path, fingerprint: Mapping[str, Any], parameter: str) -> bool:
    """Return whether a folder holds a complete table of this fingerprint; false where it holds none.

    Raises:
        ConfigurationError: it is that of another teacher, of other data or of another k.
    """
    try:
        stored = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise ConfigurationError(f"{parameter}: {folder.parent} is a file\n  Name a folder.") from None
    except (OSError, ValueError):
        stored = {}
    different = [name for name, value in fingerprint.items() if stored.get(name) != value]
    if different:
        told = ", ".join(f"{name} {stored.get(name)} (this run: {fingerprint[name]})" for name in different)
        raise ConfigurationError(
            f"{parameter}: {folder} is not what this run needs: {told}\n"
            "  Remove the folder, and it is written anew, or name another one."
        )
    return True


def write_part(
    folder: Path, dataset: Dataset, batches: Iterable[tuple[Batch, TopK]], part: int, parts: int, k: int
) -> None:
    """Write a part of a table from the batches of its samples, in order; nothing larger than a batch is in memory.

    Args:
        folder: of the arrays of this run, see `arrays_folder`.

    Raises:
        ConfigurationError: the folder cannot be written.
    """
    counts = [target_count(dataset, index) for index in range(part, len(dataset), parts)]
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
    row = 0
    with _told(folder), ExitStack() as opened:
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"starts-{part}.npy", starts)
        files = {}
        for name, dtype in (("tokens", "<i4"), ("logprobs", "<f4")):
            # written as it comes: a full disk is an error, and would end a process that writes to mapped memory
            files[name] = opened.enter_context(open(folder / f"{name}-{part}.npy", "wb"))
            header = {"descr": dtype, "fortran_order": False, "shape": (int(starts[-1]), k)}
            np.lib.format.write_array_header_1_0(files[name], header)
        for _, found in batches:
            for name, values in found._asdict().items():
                files[name].write(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())
            row += len(found.tokens)
    assert row == starts[-1], "a teacher says something of every target"


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Inside, an error of the disk becomes a ConfigurationError."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"teacher_top_k: {folder} cannot be written: {error.strerror or error}\n"
            "  Free some space, or name a folder elsewhere: teacher_top_k_dir."
        ) from None


def arrays_folder(folder: Path, run: str) -> Path:
    """Return where a run writes the arrays of a table.

    Args:
        run: a name that no other run has, the same on all of its ranks.
    """
    return folder / f"arrays-{run}"


def finish(folder: Path, fingerprint: Mapping[str, Any], parts: int, run: str) -> None:
    """Make a folder complete, of which this run has written all parts; if another run has done so, forget them."""
    arrays = arrays_folder(folder, run)
    if (folder / INDEX).exists():
        shutil.rmtree(arrays)
        return
    temporary = folder / f".{INDEX}.{run}"
    stored = {**fingerprint, "parts": parts, "arrays": arrays.name}
    with _told(folder):
        temporary.write_text(json.dumps(stored, indent=1), encoding="utf-8")
        os.replace(temporary, folder / INDEX)


def target_count(dataset: Dataset, index: int) -> int:
    """Return how many positions of a sample have a label."""
    return int(np.count_nonzero(dataset.sample(index).labels != IGNORE_INDEX))


def measure_top_k(
    teacher: Decoder, batches: Iterable[Batch], k: int, *, columns: int | None = None, dense_mask: bool = False
) -> Iterator[tuple[Batch, TopK]]:
    """Yield each batch with the teacher's likeliest tokens at the positions that have a label, as arrays.

    Args:
        columns: how many of the teacher's rows of logits may have tokens; None: all.
    """

    def head(decoder: Decoder, hidden_BSH: Tensor, context: BatchContext, batch: Batch, _: None) -> TopK:
        states_TH = target_states(decoder, hidden_BSH, paddle.to_tensor(batch.labels))
        own = decoder.head
        tokens, logprobs = [np.zeros((0, k), np.int32)], [np.zeros((0, k), np.float32)]
        chunk = chunk_rows(*own.projection.shape)
        for start in range(0, states_TH.shape[0], chunk):
            logits_TV = logits_of(states_TH[start : start + chunk], own.projection, own.new_rows_here)
            whole_TV = log_softmax(own.tp.gather_from_tp(logits_TV)[:, :columns], NO_TENSOR_PARALLEL)
            values, places = paddle.topk(whole_TV, k)
            tokens.append(places.numpy().astype(np.int32))
            logprobs.append(values.astype("float32").numpy())
        return TopK(np.concatenate(tokens), np.concatenate(logprobs))

    forward: DecoderForward[TopK] = DecoderForward(head, dense_mask)
    for batch in batches:
        with paddle.no_grad():
            found = run_forward(forward, teacher, batch)
        yield batch, found


class TopKTable:
    """A complete table, of which only what is asked for is read.

    Raises:
        ConfigurationError: a file of it is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            arrays, parts = folder / index["arrays"], range(index["parts"])
            self._starts = [np.load(arrays / f"starts-{part}.npy") for part in parts]
            self._tokens, self._logprobs = (
                [np.load(arrays / f"{name}-{part}.npy", mmap_mode="r") for part in parts]
                for name in ("tokens", "logprobs")
            )
        except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"teacher_top_k: {folder} is damaged: {error}\n  Remove the folder, and it is written anew."
            ) from None

    def of_batch(self, batch: Batch) -> TopK:
        """Return the rows of a batch's positions that have a label, in order."""
        found = [self._of_sample(index) for row in batch.samples for index in row]
        if not found:
            k = self._tokens[0].shape[1]
            return TopK(np.zeros((0, k), np.int32), np.zeros((0, k), np.float32))
        tokens, logprobs = zip(*found, strict=True)
        return TopK(np.concatenate(tokens), np.concatenate(logprobs))

    def _of_sample(self, index: int) -> TopK:
        number, part = divmod(index, len(self._starts))
        start, stop = self._starts[part][number : number + 2]
        return TopK(self._tokens[part][start:stop], self._logprobs[part][start:stop])


def top_k_teacher(table: TopKTable, tp: TensorParallel) -> Teacher:
    """Return the teacher that gives all its probability to its k likeliest tokens: q[v] is exp(log q[v] / T) over their
    sum at the temperature T, and 0 for all others.

    Args:
        tp: the ranks that divide the student's vocabulary.
    """

    def of_batches(batches: Sequence[Batch]) -> Sequence[TeacherOfRows]:
        return [_of_rows(table.of_batch(batch), batch, tp) for batch in batches]

    return of_batches


def _of_rows(found: TopK, batch: Batch, tp: TensorParallel) -> Callable[[int, int, float, int], TeacherRows]:
    assert len(found.tokens) == batch.target_count, "the table is of these samples"

    def rows(start: int, stop: int, temperature: float, width: int) -> TeacherRows:
        tokens_Tk = paddle.to_tensor(found.tokens[start:stop].astype(np.int64))
        logprobs_Tk = paddle.to_tensor(np.array(found.logprobs[start:stop]))
        log_q_Tk = log_softmax(logprobs_Tk, NO_TENSOR_PARALLEL, temperature)
        count = stop - start
        local_Tk = tokens_Tk - tp.rank * width
        here_Tk = (local_Tk >= 0) & (local_Tk < width)
        places_Tk = paddle.where(
            here_Tk, paddle.arange(count).unsqueeze(1) * width + local_Tk, paddle.full_like(local_Tk, count * width)
        )
        flat = paddle.full([count * width + 1], -math.inf, log_q_Tk.dtype)
        flat = paddle.scatter(flat, places_Tk.flatten(), log_q_Tk.flatten())
        return TeacherRows(flat[:-1].reshape([count, width]), tokens_Tk[:, 0])

    return rows
