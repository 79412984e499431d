"""Compile the kernels: into the cache at the first run, or for a wheel (setup.py, so imports of the standard library
alone)."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "source"
# Path, from the fastest on -> compiler options, and the flags of /proc/cpuinfo that they need.
_AVX2 = ("-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt", "-mf16c")
_AVX2_FLAGS = ("avx2", "fma", "bmi1", "bmi2", "abm", "popcnt", "f16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mprefer-vector-width=512")
_AVX512_FLAGS = (*_AVX2_FLAGS, "avx512f", "avx512dq", "avx512bw", "avx512vl")
PATHS = {
    "avx512_bf16": ((*_AVX512, "-mavx512bf16"), (*_AVX512_FLAGS, "avx512_bf16")),
    "avx512": (_AVX512, _AVX512_FLAGS),
    "avx2": (_AVX2, _AVX2_FLAGS),
}
OPTIONS = (
    "-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC",
    "-Wno-psabi",
)  # fmt: skip
# Not OpenMP's library: its symbols are those of Paddle's runtime, which is loaded before.
LINK_OPTIONS = ("-shared", "-nodefaultlibs", "-lm", "-lc", "-lgcc")
LONGEST_SECONDS = 600


class NoLibraryError(Exception):
    """There is no library, and the text says why."""


def file_name(path: str) -> str:
    """Return the name of the library of a path, which changes with the sources and options that it is made of."""
    digest = hashlib.sha256()
    for file in sorted(SOURCE.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    digest.update(repr((OPTIONS, LINK_OPTIONS, PATHS[path])).encode())
    return f"kernels-{path}-{digest.hexdigest()[:12]}.so"


def cached_library(path: str, *, anew: bool = False) -> Path:
    """Return the library of a path in the cache, `$ERNIEKIT_CACHE/native`, compiled if it is not there.

    Of several processes that need it at once, one compiles and the others wait.

    Args:
        anew: replace the one that is there.

    Raises:
        NoLibraryError: it cannot be compiled, or not be written.
    """
    folder = _cache() / "native"
    target = folder / file_name(path)
    if _is_whole(target) and not anew:
        return target
    find_compiler()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            if anew or not _is_whole(target):
                logger.info(f"compiling the CPU kernels for {path} into {folder}, once")
                compile_library(path, target)
    except OSError as error:
        reason = f"the cache {folder} cannot be written ({error.strerror or error}); set ERNIEKIT_CACHE to a folder"
        raise NoLibraryError(reason) from None
    return target


def _cache() -> Path:
    """Return the folder of ERNIEKit's cache.

    Raises:
        NoLibraryError: it stands in a home directory, and there is none.
    """
    try:
        return Path(os.environ.get("ERNIEKIT_CACHE") or "~/.cache/erniekit").expanduser()
    except RuntimeError:  # a user without an entry in the system's list, as in containers
        raise NoLibraryError("this user has no home directory for the cache; set ERNIEKIT_CACHE to a folder") from None


def compile_library(path: str, target: Path) -> None:
    """Compile the library of a path to the file `target`, which is complete or not there; a compiler for each source.

    Raises:
        NoLibraryError: there is no compiler, or it fails.
        OSError: the file cannot be written.
    """
    command = find_compiler()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        sources = sorted(SOURCE.glob("*.c"))
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        options = [*OPTIONS, *PATHS[path][0]]
        _run_all(
            [[*command, *options, "-c", str(source), "-o", made] for source, made in zip(sources, objects, strict=True)]
        )
        built = Path(folder) / target.name
        _run_all([[*command, *objects, "-o", str(built), *LINK_OPTIONS]])
        _seal(built)
        built.replace(target)


def _seal(library: Path) -> None:
    """Write a digest of the library behind it, which loaders do not read."""
    with library.open("ab") as file:
        file.write(hashlib.sha256(library.read_bytes()).digest())
        file.flush()
        os.fsync(file.fileno())


def _is_whole(library: Path) -> bool:
    """Return whether the library is there, and no part of it is missing: one that a machine left so when it stopped
    ends the process that loads it."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return len(content) > size and hashlib.sha256(content[:-size]).digest() == content[-size:]


def find_compiler() -> list[str]:
    """Return the command of the C compiler: $CC, else cc, gcc or clang.

    Raises:
        NoLibraryError: there is none, or $CC is no command.
    """
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise NoLibraryError(f"the environment variable CC is no command ({error}): {os.environ['CC']}") from None
    if named:
        return named
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        raise NoLibraryError("there is no C compiler (cc, gcc or clang) to make native kernels")
    return [found]


def _run_all(commands: list[list[str]]) -> None:
    """Run compilers side by side; raise NoLibraryError with what the first that fails says."""
    running: list[subprocess.Popen[str]] = []
    deadline = time.monotonic() + LONGEST_SECONDS
    try:
        for command in commands:
            running.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                 text=True, errors="replace", start_new_session=True)
            )  # fmt: skip
        for process in running:
            _, said = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            if process.returncode:
                raise NoLibraryError(f"the C compiler {commands[0][0]} fails: {_first_error(said)}")
    except subprocess.TimeoutExpired:
        raise NoLibraryError(f"the C compiler {commands[0][0]} has not ended after {LONGEST_SECONDS} s") from None
    except OSError as error:  # not there, or not a program
        raise NoLibraryError(f"the C compiler {commands[0][0]} does not run ({error.strerror or error})") from None
    finally:
        for process in running:
            if process.poll() is None:
                with suppress(OSError):  # the programs that it has started, too
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stderr:
                process.stderr.close()


def _first_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it says nothing")


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let one process at a time compile; without locks, as on some network disks, each compiles for itself."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
