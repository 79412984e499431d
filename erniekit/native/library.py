"""Find or compile the library of our CPU kernels, and choose the path for this processor.

`source/*.c` is compiled once for each path, a set of instructions. A wheel may hold the libraries; else the first run
compiles that of its processor into the cache, and without a compiler Paddle's operators run. The library has no OpenMP
of its own: it uses the threads of the runtime in Paddle's wheel, as MKL and oneDNN do.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent / "source"
PREBUILT = Path(__file__).parent / "lib"
# From the fastest on: compiler options, and the flags of /proc/cpuinfo that they need.
PATHS = {
    "avx512_bf16": (
        ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
        ("avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_bf16"),
    ),
    "avx512": (
        ("-march=x86-64-v4", "-mprefer-vector-width=512"),
        ("avx512f", "avx512dq", "avx512bw", "avx512vl"),
    ),
    "avx2": (("-march=x86-64-v3",), ("avx2", "fma")),
}
COMMON_OPTIONS = (
    "-std=c11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared",
    "-Wno-psabi", "-nodefaultlibs",
)  # fmt: skip
LIBRARIES = ("-lm", "-lc", "-lgcc")  # not OpenMP's: the symbols are those of Paddle's runtime, loaded before
TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float, "d": ctypes.c_double}


def function(name: str, arguments: str) -> Any:
    """Return a kernel as a function; None where Paddle's operators run.

    Args:
        arguments: a letter for each: p a pointer (an int), l int64, i int32, f float, d double.
    """
    library = load_library()
    return None if library is None else _function(name, arguments)


@cache
def _function(name: str, arguments: str) -> Any:
    kernel = getattr(load_library(), name)
    kernel.argtypes, kernel.restype = [TYPES[letter] for letter in arguments], None
    return kernel


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL | None:
    """Return the library for this processor, compiled if it must be; None if there is none."""
    path = processor_path()
    if path is None:
        return None
    file = find_library(path) or compile_library(path)
    if file is None or not _share_openmp():
        return None
    return ctypes.CDLL(str(file))


def processor_path(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the fastest path that the processor has; None: not even AVX2."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    flags = next((line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags")), [])
    return next((path for path, (_, needed) in PATHS.items() if set(needed) <= set(flags)), None)


def find_library(path: str) -> Path | None:
    """Return the library of a path that the wheel or the cache holds for exactly these sources."""
    candidates = (folder / _file_name(path) for folder in (PREBUILT, _cache()))
    return next((file for file in candidates if file.is_file()), None)


def compile_library(path: str) -> Path | None:
    """Compile the library of a path into the cache; None without a compiler, or if it fails."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    target = _cache() / _file_name(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        files = [str(file) for file in sorted(SOURCE.glob("*.c"))]
        command = [compiler, *COMMON_OPTIONS, *PATHS[path][0], *files, "-o", str(built), *LIBRARIES]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        built.replace(target)
    return target


def _file_name(path: str) -> str:
    digest = hashlib.sha256()
    for file in sorted(SOURCE.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    digest.update(repr((COMMON_OPTIONS, PATHS[path])).encode())
    return f"kernels-{path}-{digest.hexdigest()[:12]}.so"


def _cache() -> Path:
    return Path(os.environ.get("ERNIEKIT_CACHE") or "~/.cache/erniekit").expanduser() / "native"


def _share_openmp() -> bool:
    """Make the symbols of Paddle's OpenMP runtime visible to libraries loaded later; False without one."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or spec.origin is None:
        return False
    file = Path(spec.origin).parent / "libs" / "libiomp5.so"
    if not file.is_file():
        return False
    ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    return True
