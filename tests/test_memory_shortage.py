"""An allocator's error becomes figures and advice, whoever raised it; other errors stay what they are."""

from __future__ import annotations

import errno
import resource

import numpy as np
import paddle
import pytest

from erniekit import environment
from erniekit.cli import main
from erniekit.cli import train as train_verb
from erniekit.errors import DataError
from erniekit.memory_shortage import MemoryShortageError, memory_shortage_told

GPU = """

--------------------------------------
C++ Traceback (most recent call last):
--------------------------------------
ResourceExhaustedError:

Out of memory error on GPU 0. Cannot allocate 18.750000GB memory on GPU 0, 131.512GB memory has been allocated and available memory is only 7.8GB.

Please check whether there is any other process using GPU 0.
"""  # noqa: E501
CPU = (
    "(ResourceExhausted) Fail to alloc memory of 34359738368 size, error code is 12.\n  [Hint: Expected error == 0, but"
    " received error:12 != 0:0.] (at /paddle/paddle/phi/core/memory/allocation/cpu_allocator.cc:44)"
)
HALF_A_PETABYTE = 2**49


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "available_memory", lambda: 6_000_000_000)
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)


def told(error: BaseException, verb: str = "train") -> str:
    with pytest.raises(MemoryShortageError) as raised, memory_shortage_told(verb):
        raise error
    return str(raised.value)


@pytest.mark.parametrize(
    ("error", "figures"),
    [
        (MemoryError(CPU), ": 34.4 GB were asked for, 6.0 GB are free."),
        (OSError(f"(External) in the backward pass: {CPU}"), ": 34.4 GB were asked for, 6.0 GB are free."),
        (
            MemoryError(GPU),
            " on GPU 0: 18.750000GB were asked for, 7.8GB are free, and 131.512GB are in use.",
        ),
        (MemoryError(), ": 6.0 GB are free."),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), ": 6.0 GB are free."),
        (RuntimeError("CUBLAS error(3), CUBLAS_STATUS_ALLOC_FAILED"), ": 6.0 GB are free."),
    ],
)
def test_what_was_asked_for_and_what_is_free(error: Exception, figures: str) -> None:
    lines = told(error).splitlines()
    assert lines[0] == f"not enough memory{figures}"
    assert all(name in "\n".join(lines) for name in ("per_device_train_batch_size", "max_seq_len", "recompute", "lora"))


def test_numpys_error_and_its_consequences() -> None:
    try:
        try:
            np.empty(HALF_A_PETABYTE, np.uint8)
        except MemoryError as error:
            raise ValueError("no batch") from error
    except ValueError as error:
        assert told(error).startswith("not enough memory: 512. TiB were asked for, 6.0 GB are free.\n")


def test_a_limit_on_the_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4 * 10**9, 4 * 10**9))
    assert "6.0 GB are free, and `ulimit -v` allows 4.0 GB" in told(MemoryError(CPU))


def test_each_verb_has_its_own_advice() -> None:
    assert "--max-model-len" in told(MemoryError(), "chat")
    assert "per_device_eval_batch_size" in told(MemoryError(), "eval")
    assert "where more memory is free" in told(MemoryError(), "export")


@pytest.mark.parametrize("error", [DataError("out of memory is a text"), ValueError("a shape"), KeyboardInterrupt()])
def test_other_errors_stay(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, memory_shortage_told("train"):
        raise error
    assert raised.value is error


def test_the_command_line_says_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(words: list[str]) -> int:
        raise MemoryError(CPU)

    monkeypatch.setattr(train_verb, "run", run)
    assert main(["train"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: not enough memory: 34.4 GB were asked for") and "Traceback" not in shown


def test_paddles_allocator_is_recognised() -> None:
    with pytest.raises(MemoryShortageError, match=r"562,950\.0 GB were asked for"), memory_shortage_told("train"):
        paddle.empty([HALF_A_PETABYTE], "uint8")
