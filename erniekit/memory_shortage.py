"""Turn an allocator's error into what was asked for, what is free, and what to lower."""

from __future__ import annotations

import errno
import logging
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from erniekit.errors import UserError

logger = logging.getLogger(__name__)

# What PaddlePaddle 3.3.1, NumPy and CUDA's libraries say. Paddle wraps errors of a backward pass in other exceptions.
_GPU = re.compile(r"Cannot allocate (?P<asked>[\d.]+ ?\w+) memory on (?P<device>\w+ \d+), (?P<used>[\d.]+ ?\w+) memory")
_GPU_FREE = re.compile(r"available memory is only (?P<free>[\d.]+ ?\w+)")
_HOST = re.compile(r"Fail to alloc memory of (?P<bytes>\d+) size")
_NUMPY = re.compile(r"Unable to allocate (?P<asked>[\d.]+ \w+) for an array")
_OTHER = re.compile(
    r"ResourceExhausted|out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED", re.IGNORECASE
)

_TRAINING = (
    "  What a step holds becomes less, in this order, with\n"
    "    per_device_train_batch_size: 1, and gradient_accumulation_steps raised by the same factor (same results)\n"
    "    max_seq_len, as far as the samples allow\n"
    "    recompute: true\n"
    "    lora: true, and then weight_quantize_algo: weight_only_int8 for the frozen weights\n"
    "    sharding: stage1 to stage3, or tensor_parallel_degree, over several ranks\n"
    "  `erniekit validate CONFIG` estimates the memory of a configuration; docs/memory.md says what each of them saves."
)
_ANSWERING = "  Fewer prompts at a time, --max-model-len and --max-new-tokens lower it."
_ADVICE = {
    "train": _TRAINING,
    "dpo": _TRAINING,
    "eval": "  per_device_eval_batch_size: 1, a shorter max_seq_len, or more ranks lower it.",
    "chat": _ANSWERING,
    "generate": _ANSWERING,
}


class MemoryShortageError(UserError):
    """Memory did not suffice; the message has the figures that are known, and what to lower."""


@contextmanager
def memory_shortage_told(verb: str) -> Iterator[None]:
    """Raise MemoryShortageError in place of an allocator's error in the body.

    Args:
        verb: the verb of the command line that runs, which decides what can be lowered.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (shortage := memory_shortage(error, verb)) is None:
            raise
        logger.debug("an allocator failed", exc_info=error)
        raise shortage from None


def memory_shortage(error: BaseException, verb: str) -> MemoryShortageError | None:
    """Return what to tell in place of an allocator's error; None if `error` is another one."""
    for each in _chain(error):
        text = str(each)
        refused = isinstance(each, OSError) and each.errno == errno.ENOMEM
        if refused or isinstance(each, MemoryError) or any(form.search(text) for form in (_GPU, _HOST, _OTHER)):
            advice = _ADVICE.get(verb, "  End other programs, or run it where more memory is free.")
            return MemoryShortageError(f"not enough memory{_figures(text)}.\n{advice}")
    return None


def _figures(text: str) -> str:
    if found := _GPU.search(text):
        available = _GPU_FREE.search(text)
        free = f", {available['free']} are free" if available else ""
        return f" on {found['device']}: {found['asked']} were asked for{free}, and {found['used']} are in use"
    if found := _HOST.search(text):
        return f": {_gigabytes(int(found['bytes']))} were asked for{_host_limits()}"
    if found := _NUMPY.search(text):
        return f": {found['asked']} were asked for{_host_limits()}"
    return _host_limits().replace(", ", ": ", 1)


def _host_limits() -> str:
    """Return what is known of the memory of this machine, and of a limit on this process."""
    from erniekit.environment import available_memory  # costs every command twenty milliseconds

    free, limit = available_memory(), resource.getrlimit(resource.RLIMIT_AS)[0]
    known = "" if free is None else f", {_gigabytes(free)} are free"
    return known if limit == resource.RLIM_INFINITY else f"{known}, and `ulimit -v` allows {_gigabytes(limit)}"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        seen.append(following)
        yield following
        following = following.__cause__ or following.__context__
