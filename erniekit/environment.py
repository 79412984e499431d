"""Settings of the CPU, applied before Paddle is imported, and the one import of Paddle that the verbs share.

Measured reasons (docs/benchmarks.md): Paddle's wheel bundles an MKL that takes a slow path on AMD processors
(4.7 times slower matrix products), and uses one thread unless told otherwise.
"""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from erniekit import __version__
from erniekit.errors import UserError

# What asks a program to end: Ctrl-C, an operator or a cluster, a terminal that was closed.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MKL_FAST_PATH_ON_AMD = "7"  # the AVX-512 code path; type 5 is AVX2


def answer_stop_signals(answer: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Let `answer` handle the signals that ask for an end, in the main thread; return the earlier handlers by signal.

    A SIGHUP that is ignored stays ignored: `nohup` has asked for that.
    """
    heard = [number for number in STOP_SIGNALS if not (number == signal.SIGHUP and _is_ignored(number))]
    return {number: signal.signal(number, answer) for number in heard}


def _is_ignored(number: int) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN


def apply_cpu_settings(threads: int | None = None) -> dict[str, str]:
    """Set the environment variables that Paddle's libraries read when they are loaded.

    A variable that the user has set is kept. Must run before `import paddle`; afterwards it changes nothing.

    Args:
        threads: compute threads; default `usable_cores`, shared between the ranks of one machine.

    Returns:
        The settings in force, name -> value.
    """
    if "paddle" not in sys.modules:
        ranks = int(os.environ.get("PADDLE_LOCAL_SIZE") or os.environ.get("PADDLE_TRAINERS_NUM") or 1)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads or max(1, usable_cores() // ranks)))
        # Milliseconds that a thread waits awake for the next kernel. 0 costs small models a third of their speed, and
        # Paddle's 200 takes the processor from others, which starves the run itself on a busy machine.
        os.environ.setdefault("KMP_BLOCKTIME", "1")
        if _is_amd_with_avx512():
            os.environ.setdefault("MKL_DEBUG_CPU_TYPE", MKL_FAST_PATH_ON_AMD)
    return cpu_settings()


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many cores this process may use by its affinity and its container's quota (cgroup 1 or 2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        if (cgroup / "cpu.max").is_file():
            quota, period = (cgroup / "cpu.max").read_text(encoding="utf-8").split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ((cgroup / "cpu" / name).read_text(encoding="utf-8").strip() for name in names)
        allowed = int(quota) // int(period)  # rounded down: a thread above the quota stalls the others
    except (OSError, ValueError, ZeroDivisionError):  # no control group, or "max": no quota
        return cores
    return cores if int(quota) < 0 else max(1, min(cores, allowed))


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the bytes that can be allocated without swapping; None where the system does not say."""
    try:
        lines = meminfo.read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def cpu_settings() -> dict[str, str]:
    """Return the settings in force that change speed or rounding on a CPU, name -> value ("" where unset)."""
    return rounding_settings() | {"KMP_BLOCKTIME": os.environ.get("KMP_BLOCKTIME", "")}


def rounding_settings() -> dict[str, str]:
    """Return those on which the last bits of results depend; recorded in checkpoints."""
    return {name: os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE")}


@lru_cache(maxsize=1)
def _is_amd_with_avx512() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "AuthenticAMD" in text and "avx512f" in text


def package_versions() -> dict[str, str]:
    """Return the packages that results depend on, package -> version; recorded in checkpoints."""
    packages = ("paddlepaddle", "paddlepaddle-gpu", "numpy")
    return {"erniekit": __version__} | {name: metadata.version(name) for name in packages if _is_installed(name)}


def cache_folder(chosen: str = "") -> Path:
    """Return the folder of what is kept from run to run: `chosen`, else $ERNIEKIT_CACHE, else ~/.cache/erniekit."""
    return Path(chosen or os.environ.get("ERNIEKIT_CACHE") or "~/.cache/erniekit").expanduser()


def is_importable(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def import_paddle() -> None:
    """Import Paddle with the CPU settings applied; every verb that computes calls this first.

    Raises:
        UserError: no Paddle is installed.
    """
    apply_cpu_settings()
    if "PADDLE_TRAINER_ID" in os.environ:  # a rank, whichever launcher has started it
        os.environ.setdefault("GLOG_minloglevel", "1")  # without Paddle's notes on how ranks connect
    try:
        with _signals_blocked(), warnings.catch_warnings(), _thread_warning_suppressed():
            warnings.simplefilter("ignore")  # Paddle warns about a missing ccache, which only its developers need
            import paddle

            paddle.disable_signal_handler()  # it would answer SIGTERM with a C++ dump
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)  # Python's again
    except ImportError as error:
        if error.name != "paddle":
            raise
        raise UserError(
            "PaddlePaddle is not installed, and this command needs it.\n"
            "  on a CPU:  pip install 'erniekit[cpu]'   (paddlepaddle 3.3.1)\n"
            "  on a GPU:  see README.md, 'On a GPU' (paddlepaddle-gpu comes from Paddle's own index)"
        ) from None


def import_paddlenlp(reason: str) -> ModuleType:
    """Import paddlenlp with the CPU settings applied. It takes 5 to 10 s, so a line on standard error says why.

    Raises:
        UserError: no paddlenlp, or no Paddle, is installed.
    """
    if "paddlenlp" not in sys.modules:
        print(f"{reason}: importing paddlenlp for its tokenizers, which takes several seconds", file=sys.stderr)
    import_paddle()
    try:
        with _signals_blocked(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own dependencies
            import paddlenlp
            import paddlenlp.transformers
    except ImportError as error:
        raise UserError(
            f"{reason}: this needs paddlenlp 3.0.0b4, which cannot be imported: {error}\n"
            "  Install it (pip install 'erniekit[paddlenlp]'), or convert the tokenizer to tokenizer.json"
        ) from None
    return paddlenlp


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Deliver the signals that ask for an end after the body: an extension module that is interrupted while it loads
    reports an ImportError, or forgets the interruption."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


@contextmanager
def _thread_warning_suppressed() -> Iterator[None]:
    """Keep back the two lines in which Paddle advises against the threads that `apply_cpu_settings` chose."""
    captured = io.StringIO()
    try:
        with redirect_stderr(captured):
            yield
    finally:
        advice = ("WARNING: OMP_NUM_THREADS", "PLEASE USE OMP_NUM_THREADS")
        lines = captured.getvalue().splitlines(keepends=True)
        sys.stderr.write("".join(line for line in lines if not line.startswith(advice)))
