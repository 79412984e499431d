"""Encode recordings in several processes, each with a codec of its own."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from typing import NamedTuple

import numpy as np

from erniekit.codecs.codec import Codec
from erniekit.data.media.clip import Clip
from erniekit.data.media.errors import RecordingError, describe_clip
from erniekit.data.media.recording import clip_length, read_clip
from erniekit.errors import DataError

_WAITING = 4  # recordings for each process that are read ahead; the order of results costs no more memory

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Reading:
    """How recordings are read before they are encoded.

    Attributes:
        shortest, longest: the seconds of those that are encoded.
        peak: the amplitude of the largest sample after scaling; 0 does not scale.
    """

    shortest: float = 0.0
    longest: float = float("inf")
    peak: float = 0.0


class Encoded(NamedTuple):
    """A recording as codes int32[levels, frames], and its seconds."""

    codes: np.ndarray
    seconds: float


class Skipped(NamedTuple):
    """A recording that is too short or too long."""

    seconds: float


class Failed(NamedTuple):
    """A recording that cannot be read or encoded, and why."""

    reason: str


Result = Encoded | Skipped | Failed


def read_sound(clip: Clip, sampling_rate: int, reading: Reading) -> np.ndarray | Skipped:
    """Return the sound float32[samples] of a recording; its header alone is read where it is too short or too long.

    Raises:
        RecordingError: it cannot be read.
    """
    seconds = clip_length(clip, sampling_rate) / sampling_rate
    if not reading.shortest <= seconds <= reading.longest:
        return Skipped(seconds)
    sound = read_clip(clip, sampling_rate)
    peak = float(np.abs(sound).max())
    factor = min(reading.peak / peak, _LARGEST) if peak else 0.0
    return sound * np.float32(factor) if factor else sound


def encode_clip(codec: Codec, clip: Clip, reading: Reading) -> Result:
    """Read and encode a recording.

    Raises:
        DataError: a package is missing that reads recordings.
    """
    try:
        sound = read_sound(clip, codec.sampling_rate, reading)
    except RecordingError as error:
        return Failed(str(error))
    if isinstance(sound, Skipped):
        return sound
    try:
        codes = codec.encode(sound)
    except DataError as error:
        return Failed(f"{describe_clip(clip)}: {error}")
    if not codes.shape[1]:
        return Failed(f"{describe_clip(clip)}: {len(sound):,} samples are too short for a frame of the codec")
    return Encoded(codes, len(sound) / codec.sampling_rate)


def encode_clips(
    clips: Iterable[Clip], open_codec: Callable[[], Codec], reading: Reading, workers: int
) -> Iterator[Result]:
    """Yield a result for each recording, in their order, whatever the number of processes.

    Args:
        open_codec: opens the codec; each process calls it once, so it can be sent to one.
        workers: the number of processes, each of one thread where it computes on the CPU and the environment does not
            say otherwise; with another number of threads sums may be rounded in another way.

    Raises:
        DataError: a process has ended, for example because the system had no memory left.
    """
    waiting: deque[Future[Result]] = deque()
    with _one_thread():
        with _deaf_to_the_terminal():  # starts a process that keeps semaphores
            pool = ProcessPoolExecutor(
                workers, get_context("spawn"), initializer=_begin, initargs=(open_codec, reading)
            )
        try:
            for clip in clips:
                with _deaf_to_the_terminal():  # `submit` starts the processes
                    waiting.append(pool.submit(_encode, clip))
                if len(waiting) >= _WAITING * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise DataError(
                "a process that encodes recordings has ended without a word; the system may have no memory left: "
                "write a smaller codes_workers, or encode shorter recordings. The same command continues"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let processes that are started compute with one thread; the libraries read it when they are loaded."""
    names = [name for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if name not in os.environ]
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


@contextmanager
def _deaf_to_the_terminal() -> Iterator[None]:
    """Let processes that are started never hear what a terminal sends to all of them; the first one ends the others.

    They inherit the mask of signals, so this holds while they import their modules, too. What arrives here meanwhile is
    heard afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In a worker process.

_own: list[tuple[Codec, Reading]] = []


def _begin(open_codec: Callable[[], Codec], reading: Reading) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _own.append((open_codec(), reading))


def _end_with_parent() -> None:
    """End this process when the first one has been killed; it would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _encode(clip: Clip) -> Result:
    codec, reading = _own[0]
    return encode_clip(codec, clip, reading)
