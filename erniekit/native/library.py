"""The library of our CPU kernels: which path of instructions it takes, and where its file comes from.

`source/*.c` is compiled once for each path. A wheel may hold the libraries; else the first run compiles the one that it
needs into the cache, and where neither is possible Paddle's operators run. The library has no OpenMP of its own: it
uses the threads of the runtime in Paddle's wheel, as MKL and oneDNN do.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from erniekit.errors import ConfigurationError
from erniekit.native import compiler, openmp
from erniekit.native.compiler import PATHS, NoLibraryError

PREBUILT = Path(__file__).parent / "lib"
AUTO, PADDLE = "auto", "paddle"
TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "l": ctypes.c_int64,
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}


@dataclass(frozen=True)
class Kernels:
    """The kernels that run.

    Attributes:
        path: one of `PATHS`; "paddle": Paddle's operators.
        reason: for people: where the library comes from, or why Paddle's operators run.
    """

    path: str
    reason: str
    library: ctypes.CDLL | None = None


_wanted = AUTO


def use(wanted: str) -> Kernels:
    """Use the kernels of a path from now on: one of `PATHS`, "auto" for the fastest one, or "paddle" for none.

    The choice is global to the process. A library that does not exist yet is compiled, which takes seconds.

    Raises:
        ConfigurationError: a path that is named cannot run here.
    """
    global _wanted
    opened = _open(wanted)
    _wanted = wanted
    return opened


def kernels() -> Kernels:
    """Return the kernels in use; until something else is chosen, those of "auto"."""
    return _open(_wanted)


def function(name: str, arguments: str) -> Any:
    """Return a kernel as a function; None where Paddle's operators run.

    Args:
        arguments: a letter for each: p a pointer (an int), l int64, i int32, f float, d double.
    """
    library = kernels().library
    return None if library is None else _function(library, name, arguments)


def function_if_open(name: str, arguments: str) -> Any:
    """Return `function`, or None where no kernel has been asked for yet: what is small is not worth a compilation."""
    return function(name, arguments) if _open.cache_info().currsize else None


@cache
def _function(library: ctypes.CDLL, name: str, arguments: str) -> Any:
    kernel = library[name]  # not an attribute, which would share its types between signatures
    kernel.argtypes, kernel.restype = [TYPES[letter] for letter in arguments], None
    return kernel


def processor_paths(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return the paths that this processor can take, the fastest first; none on other systems than Linux on x86-64."""
    if platform.machine() != "x86_64":
        return []
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    flags = next((set(line.split(":", 1)[1].split()) for line in text.splitlines() if line.startswith("flags")), set())
    return [path for path, (_, needed) in PATHS.items() if flags.issuperset(needed)]


@cache
def _open(wanted: str) -> Kernels:
    if wanted == PADDLE:
        return Kernels(PADDLE, "cpu_kernels: paddle")
    possible = processor_paths()
    if wanted != AUTO and wanted not in possible:
        have = f"it has {', '.join(possible)}" if possible else "native kernels need Linux and AVX2"
        raise ConfigurationError(
            f"cpu_kernels: {wanted}: this processor lacks some of its instructions; {have}.\n"
            f"  Write cpu_kernels: {AUTO}, which takes the fastest path of the processor"
        )
    problems = []
    for path in possible if wanted == AUTO else [wanted]:
        try:
            return Kernels(path, *_library(path))
        except NoLibraryError as error:
            problems.append(str(error))
    if wanted != AUTO:
        raise ConfigurationError(
            f"cpu_kernels: {wanted}: {problems[0]}.\n  Write cpu_kernels: {AUTO} to compute without native kernels"
        )
    return Kernels(PADDLE, problems[0] if problems else "native kernels need Linux and a processor with AVX2")


def _library(path: str) -> tuple[str, ctypes.CDLL]:
    """Return where the library of a path comes from, and the library.

    Raises:
        NoLibraryError: there is none, and it cannot be made.
    """
    _share_openmp()
    shipped = PREBUILT / compiler.file_name(path)
    if shipped.is_file():
        try:
            return "of the wheel", ctypes.CDLL(str(shipped))
        except OSError:  # made for a newer C library than this system's
            pass
    file = compiler.cached_library(path)
    try:
        return f"compiled into {file.parent}", ctypes.CDLL(str(file))
    except OSError:  # left incomplete by a machine that stopped, or of another system that shares the cache
        file = compiler.cached_library(path, anew=True)
    try:
        return f"compiled into {file.parent}", ctypes.CDLL(str(file))
    except OSError as error:
        raise NoLibraryError(f"the compiled library cannot be loaded: {error}") from None


def _share_openmp() -> None:
    """Make the symbols of Paddle's OpenMP runtime visible to libraries that are loaded later.

    Raises:
        NoLibraryError: this build of Paddle has another runtime, or there is no Paddle.
    """
    if openmp.runtime() is None:
        raise NoLibraryError("native kernels need the OpenMP runtime of Paddle's wheel for CPUs, libiomp5.so")
