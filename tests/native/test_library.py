"""Which kernels run: of the wheel, of the cache, compiled now, or Paddle's operators, and why."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from erniekit.errors import ConfigurationError
from erniekit.native import compiler, library

PATHS = library.processor_paths()
BEST = PATHS[0] if PATHS else ""
needs_avx2 = pytest.mark.skipif(not PATHS, reason="native kernels need Linux and a processor with AVX2")


def compiles() -> bool:
    try:
        return bool(compiler.find_compiler())
    except compiler.NoLibraryError:
        return False


needs_compiler = pytest.mark.skipif(not compiles() or not PATHS, reason="there is no C compiler, or no AVX2")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """An empty cache, no library in the package, one small source, and the choice of the process put back."""
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(library, "PREBUILT", tmp_path / "wheel")
    monkeypatch.setattr(library, "_wanted", "auto")
    source = tmp_path / "source"
    source.mkdir()
    (source / "half.c").write_text("void half(long n, float* x) { for (long i = 0; i < n; i++) x[i] *= 0.5f; }\n")
    monkeypatch.setattr(compiler, "SOURCE", source)
    library._open.cache_clear()
    yield
    library._open.cache_clear()


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.rglob("*") if file.is_file())


def halved() -> list[float]:
    values = (ctypes.c_float * 3)(2, 4, 6)
    library.function("half", "lp")(2, ctypes.addressof(values))
    return list(values)


def cpuinfo(tmp_path: Path, flags: str) -> Path:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\nbugs\t\t:\n")
    return file


@pytest.mark.parametrize(
    ("lacks", "paths"),
    [
        ((), ["avx512_bf16", "avx512", "avx2"]),
        (("avx512_bf16",), ["avx512", "avx2"]),
        (("avx512_bf16", "avx512dq"), ["avx2"]),
        (("fma",), []),
    ],
)
def test_paths_follow_the_flags_of_the_processor(tmp_path, monkeypatch, lacks, paths) -> None:
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    flags = set(compiler.PATHS["avx512_bf16"][1]) - set(lacks)
    assert library.processor_paths(cpuinfo(tmp_path, " ".join(flags))) == paths
    assert library.processor_paths(tmp_path / "absent") == []
    monkeypatch.setattr(library.platform, "machine", lambda: "aarch64")
    assert library.processor_paths(cpuinfo(tmp_path, " ".join(flags))) == []


@needs_compiler
def test_the_first_run_compiles_into_the_cache_and_says_so(tmp_path, logged) -> None:
    kernels = library.kernels()
    folder = tmp_path / "cache/native"
    assert (kernels.path, kernels.reason) == (BEST, f"compiled into {folder}")
    assert logged == [f"compiling the CPU kernels for {BEST} into {folder}, once"]
    assert files(folder) == [compiler.file_name(BEST)]
    assert halved() == [1, 2, 6]


@needs_compiler
def test_later_runs_need_no_compiler(tmp_path, monkeypatch, logged) -> None:
    library.kernels()
    library._open.cache_clear()
    monkeypatch.setattr(compiler, "find_compiler", lambda: pytest.fail("a compiler was asked for"))
    assert library.kernels().path == BEST and halved() == [1, 2, 6] and len(logged) == 1


@needs_compiler
def test_other_sources_are_another_library(tmp_path) -> None:
    name = compiler.file_name("avx2")
    (compiler.SOURCE / "half.c").write_text("void half(long n, float* x) { x[0] = n; }\n")
    assert compiler.file_name("avx2") != name
    library.kernels()
    assert halved() == [2, 4, 6]


@needs_compiler
def test_a_library_of_the_wheel_comes_first(tmp_path) -> None:
    library.PREBUILT.mkdir()
    compiler.compile_library(BEST, library.PREBUILT / compiler.file_name(BEST))
    assert (library.kernels().path, library.kernels().reason) == (BEST, "of the wheel")
    assert not (tmp_path / "cache").exists() and halved() == [1, 2, 6]


@needs_compiler
@pytest.mark.parametrize("place", ["wheel", "cache/native"])
def test_a_damaged_library_is_replaced(tmp_path, place) -> None:
    file = tmp_path / place / compiler.file_name(BEST)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\x7fELF")
    assert library.kernels().reason == f"compiled into {tmp_path / 'cache/native'}" and halved() == [1, 2, 6]


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "zeros", "other"])
def test_a_library_in_the_cache_that_is_not_whole_is_compiled_again(tmp_path, damage) -> None:
    """The system ends a process that loads a file whose second half is not there."""
    file = compiler.cached_library(BEST)
    content = file.read_bytes()
    half = len(content) // 2
    rest = {"cut": b"", "zeros": bytes(len(content) - half), "other": content[half:-40] + b"?" + content[-39:]}
    file.write_bytes(content[:half] + rest[damage])
    assert library.kernels().path == BEST and halved() == [1, 2, 6]
    assert len(file.read_bytes()) == len(content) and len(files(tmp_path / "cache/native")) == 1


def _no_compiler(monkeypatch, tmp_path) -> str:
    monkeypatch.setenv("PATH", str(tmp_path))
    return "there is no C compiler (cc, gcc or clang) to make native kernels"


def _compiler_that_is_not_there(monkeypatch, tmp_path) -> str:
    monkeypatch.setenv("CC", "no-such-cc -m64")
    return "the C compiler no-such-cc does not run (No such file or directory)"


def _compiler_with_half_a_quote(monkeypatch, tmp_path) -> str:
    monkeypatch.setenv("CC", "gcc '-m64")
    return "the environment variable CC is no command (No closing quotation): gcc '-m64"


def _user_without_a_home(monkeypatch, tmp_path) -> str:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("ERNIEKIT_CACHE")
    monkeypatch.setattr(compiler.Path, "expanduser", no_home)
    return "this user has no home directory for the cache; set ERNIEKIT_CACHE to a folder"


def _compiler_that_fails(monkeypatch, tmp_path) -> str:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'hm' >&2\necho 'half.c:1: error: cannot do it' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    return f"the C compiler {broken} fails: half.c:1: error: cannot do it"


def _compiler_that_never_ends(monkeypatch, tmp_path) -> str:
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    monkeypatch.setenv("CC", str(hangs))
    monkeypatch.setattr(compiler, "LONGEST_SECONDS", 0.05)
    return f"the C compiler {hangs} has not ended after 0.05 s"


def _cache_that_cannot_be_written(monkeypatch, tmp_path) -> str:
    monkeypatch.setenv("CC", sys.executable)
    (tmp_path / "cache").write_text("a file where the folder should be")
    return f"the cache {tmp_path}/cache/native cannot be written (Not a directory); set ERNIEKIT_CACHE to a folder"


def _library_of_another_system(monkeypatch, tmp_path) -> str:
    makes_text = tmp_path / "cc"
    makes_text.write_text(f"#!{sys.executable}\nimport sys\nopen(sys.argv[sys.argv.index('-o') + 1], 'w').write('a')\n")
    makes_text.chmod(0o755)
    monkeypatch.setenv("CC", str(makes_text))
    return "the compiled library cannot be loaded: "


def _no_openmp(monkeypatch, tmp_path) -> str:
    monkeypatch.setattr(library.openmp, "runtime", lambda: None)
    return "native kernels need the OpenMP runtime of Paddle's wheel for CPUs, libiomp5.so"


TROUBLES = [
    _no_compiler, _compiler_that_is_not_there, _compiler_that_fails, _compiler_that_never_ends,
    _compiler_with_half_a_quote, _user_without_a_home, _cache_that_cannot_be_written, _library_of_another_system,
    _no_openmp,
]  # fmt: skip


@needs_avx2
@pytest.mark.parametrize("trouble", TROUBLES)
def test_paddles_operators_run_where_there_is_no_library(monkeypatch, tmp_path, trouble) -> None:
    reason = trouble(monkeypatch, tmp_path)
    kernels = library.use("auto")
    assert (kernels.path, kernels.library) == ("paddle", None) and kernels.reason.startswith(reason)
    assert library.function("half", "lp") is None
    assert [name for name in files(tmp_path / "cache") if name.endswith((".so", ".o"))] == [] or "loaded" in reason
    # a path that is named has to run
    with pytest.raises(ConfigurationError) as caught:
        library.use(BEST)
    assert str(caught.value).startswith(f"cpu_kernels: {BEST}: {reason}") and "cpu_kernels: auto" in str(caught.value)
    assert library.kernels().path == "paddle"  # the choice is that of before


def test_paddles_operators_by_choice() -> None:
    kernels = library.use("paddle")
    assert (kernels.path, kernels.reason, library.function("half", "lp")) == ("paddle", "cpu_kernels: paddle", None)


@pytest.mark.parametrize(
    ("have", "words"),
    [(["avx2"], "it has avx2."), ([], "native kernels need Linux and AVX2.")],
)
def test_a_path_that_the_processor_lacks_is_refused(monkeypatch, have, words) -> None:
    monkeypatch.setattr(library, "processor_paths", lambda: have)
    with pytest.raises(ConfigurationError, match=f"cpu_kernels: avx512: this processor lacks .* {words}"):
        library.use("avx512")


def test_a_processor_without_a_path(monkeypatch) -> None:
    monkeypatch.setattr(library, "processor_paths", list)
    assert library.kernels().reason == "native kernels need Linux and a processor with AVX2"


@needs_compiler
def test_an_old_compiler_still_makes_the_next_path(monkeypatch, tmp_path) -> None:
    if len(PATHS) < 2:
        pytest.skip("this processor has one path")
    option = next(item for item in compiler.PATHS[BEST][0] if item not in compiler.PATHS[PATHS[1]][0])
    old = tmp_path / "old-cc"
    refuse = f"case \"$*\" in *{option}*) echo 'error: unrecognized' >&2; exit 1;; esac"
    old.write_text(f'#!/bin/sh\n{refuse}\nexec cc "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CC", str(old))
    assert library.kernels().path == PATHS[1] and halved() == [1, 2, 6]


def test_compilers_that_are_ended_take_their_programs_with_them(tmp_path) -> None:
    """A compiler is a driver of others, which would go on without it."""
    begun, alive = tmp_path / "begun", tmp_path / "alive"
    os.mkfifo(begun)
    os.mkfifo(alive)
    fails = ["sh", "-c", f"read word < {begun}; exit 1"]
    goes_on = ["sh", "-c", f"(echo now > {begun}; exec sleep 600) > {alive} & wait"]
    reader = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(compiler.NoLibraryError):
            compiler._run_all([fails, goes_on])
        ended, _, _ = select.select([reader], [], [], 20)
        assert ended and os.read(reader, 1) == b""  # nobody has the other end
    finally:
        os.close(reader)


@needs_compiler
def test_processes_that_start_together_compile_once(tmp_path) -> None:
    counting = tmp_path / "counting-cc"
    counting.write_text(f'#!/bin/sh\necho x >> {tmp_path}/calls\nsleep 0.2\nexec cc "$@"\n')
    counting.chmod(0o755)
    program = textwrap.dedent(f"""
        import os
        from pathlib import Path
        from erniekit.native import compiler
        os.environ.update(ERNIEKIT_CACHE={str(tmp_path / "cache")!r}, CC={str(counting)!r})
        compiler.SOURCE = Path({str(compiler.SOURCE)!r})
        assert compiler.cached_library("avx2").is_file()
    """)
    started = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [process.wait() for process in started] == [0, 0, 0]
    assert (tmp_path / "calls").read_text().count("x") == 2  # one source, and the link


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("path", compiler.PATHS)
@pytest.mark.parametrize("command", ["", "clang"])
def test_every_path_compiles_without_warnings(monkeypatch, path, command) -> None:
    """Also those that this processor cannot run, for the wheel."""
    if command and not shutil.which(command):
        pytest.skip(f"there is no {command}")
    monkeypatch.setenv("CC", command)
    monkeypatch.setattr(compiler, "SOURCE", Path(compiler.__file__).parent / "source")
    options = [*compiler.OPTIONS, *compiler.PATHS[path][0], "-Wall", "-Werror", "-fsyntax-only"]
    for source in sorted(compiler.SOURCE.glob("*.c")):
        compiler._run_all([[*compiler.find_compiler(), *options, str(source)]])
