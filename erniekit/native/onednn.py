"""Products in bfloat16 through oneDNN, the library that Paddle's wheel brings along, called by ctypes.

Operands are bfloat16, sums and outputs float32. Every size is a runtime dimension, so the eight primitives (operands
as they are or transposed, the output set or added to) serve all shapes; oneDNN is as fast with them as with fixed
shapes. oneDNN uses the threads of Paddle's OpenMP runtime, like `library.py`. Matrices are row major, and pointers are
ints, as of `Tensor.data_ptr()`; ctypes releases Python's lock while oneDNN computes.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from ctypes import POINTER, byref, c_char, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import lru_cache
from itertools import product as combinations
from pathlib import Path
from typing import Any
from weakref import finalize

from erniekit.native.openmp import paddle_libraries, runtime, threads

# Constants of dnnl_types.h, version 3.
VERSION = 3
CPU, IN_ORDER, SUCCESS, OUT_OF_MEMORY = 1, 1, 0, 1
BF16, F32 = 2, 3  # dnnl_data_type_t
RUNTIME = -(2**63)  # DNNL_RUNTIME_DIM_VAL
SOURCE, WEIGHTS, TARGET = 1, 33, 17  # DNNL_ARG_SRC (also _FROM), _WEIGHTS, _DST (also _TO)
AVX512_BF16, AMX_BF16 = 0xE7, 0xFEF  # dnnl_cpu_isa_t: sets of bits

PAYS_FROM = 1.3  # times the rate of float32; below, rounding the operands costs more than the products gain


class _Version(ctypes.Structure):
    _fields_ = [("major", c_int), ("minor", c_int), ("patch", c_int)]  # the fields after these are not read


class _Argument(ctypes.Structure):
    _fields_ = [("place", c_int), ("memory", c_void_p)]


# Arguments of the functions called; all return a status but the first two.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "dnnl_version": (),
    "dnnl_get_effective_cpu_isa": (),
    "dnnl_engine_create": (c_void_p, c_int, c_size_t),
    "dnnl_stream_create": (c_void_p, c_void_p, c_int),
    "dnnl_memory_desc_create_with_strides": (c_void_p, c_int, c_void_p, c_int, c_void_p),
    "dnnl_memory_desc_destroy": (c_void_p,),
    "dnnl_memory_create": (c_void_p, c_void_p, c_void_p, c_void_p),
    "dnnl_memory_destroy": (c_void_p,),
    "dnnl_post_ops_create": (c_void_p,),
    "dnnl_post_ops_append_sum": (c_void_p, c_float, ctypes.c_int32, c_int),
    "dnnl_primitive_attr_create": (c_void_p,),
    "dnnl_primitive_attr_set_post_ops": (c_void_p, c_void_p),
    "dnnl_matmul_primitive_desc_create": (c_void_p,) * 7,
    "dnnl_reorder_primitive_desc_create": (c_void_p,) * 6,
    "dnnl_primitive_create": (c_void_p, c_void_p),
    "dnnl_primitive_execute": (c_void_p, c_void_p, c_int, c_void_p),
    "dnnl_sgemm": (
        c_char, c_char, c_int64, c_int64, c_int64, c_float, c_void_p, c_int64, c_void_p, c_int64, c_float, c_void_p,
        c_int64,
    ),
}  # fmt: skip


def multiply(
    m: int,
    n: int,
    k: int,
    a: int,
    b: int,
    c: int,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    add: bool = False,
) -> None:
    """Compute C = A B, or C += A B, for bfloat16 A [m, k] and B [k, n] and float32 C [m, n]; no size may be 0.

    The same operands give the same bits, for the same number of threads.

    Args:
        a, b, c: pointers. With `transpose_a` the memory holds A^T [k, m], with `transpose_b` B^T [n, k].

    Raises:
        MemoryError: oneDNN has no memory for its buffers.
    """
    operands = (
        (SOURCE, _matrix(m, k, BF16, transpose_a), a),
        (WEIGHTS, _matrix(k, n, BF16, transpose_b), b),
        (TARGET, _matrix(m, n, F32, False), c),
    )
    _execute(_product(transpose_a, transpose_b, add), operands)


def round_to_bfloat16(count: int, source: int, target: int) -> None:
    """Round `count` float32 numbers to the nearest bfloat16, ties to even."""
    # In pieces of powers of two, so that there are few primitives whatever the counts are.
    while count > 0:
        piece = 1 << (count.bit_length() - 1)
        operands = ((SOURCE, _matrix(1, piece, F32, False), source), (TARGET, _matrix(1, piece, BF16, False), target))
        _execute(_rounding(piece), operands)
        count, source, target = count - piece, source + 4 * piece, target + 2 * piece


@lru_cache(maxsize=1)
def problem() -> str | None:
    """Return why bfloat16 cannot be multiplied here, as a sentence without a full stop; None: it can."""
    if _library_file() is None:
        return "this build of Paddle has no oneDNN library"
    try:
        library = _library()
    except (OSError, AttributeError) as error:
        return f"the oneDNN library of this build of Paddle cannot be used: {error}"
    if library.dnnl_version().contents.major != VERSION:
        return f"this build of Paddle has oneDNN {version()}, not {VERSION}.x"
    if not _has(AVX512_BF16):
        return "this processor multiplies no bfloat16 (it has neither AVX512-BF16 nor AMX)"
    try:
        correct = _test()
    except RuntimeError as error:
        return f"oneDNN {version()} cannot multiply bfloat16 here: {error}"
    return None if correct else f"oneDNN {version()} multiplies bfloat16 wrongly here"


def version() -> str:
    """Return the version of the library, as in 3.6.2."""
    found = _library().dnnl_version().contents
    return f"{found.major}.{found.minor}.{found.patch}"


def instructions() -> str:
    """Return the name of the instructions that multiply bfloat16 on this processor."""
    return "AMX" if _has(AMX_BF16) else "AVX512-BF16"


@lru_cache(maxsize=1)
def speedup() -> float:
    """Measure how much faster one thread multiplies bfloat16 than float32; 0.5, 2 and 8 are usual.

    It takes 30 ms. Time of the thread is counted, so other processes hardly change the answer.
    """
    size = 512
    a, b, c = ((c_float * size**2)() for _ in range(3))
    left, right, out = (ctypes.addressof(matrix) for matrix in (a, b, c))
    library = _library()

    def in_float32() -> None:
        library.dnnl_sgemm(b"N", b"N", size, size, size, 1.0, left, size, right, size, 0.0, out, size)

    def in_bfloat16() -> None:
        multiply(size, size, size, left, right, out)

    with threads(1):
        times = [(_seconds(in_float32), _seconds(in_bfloat16)) for _ in range(5)]
    return min(slow for slow, _ in times) / min(fast for _, fast in times)


def _seconds(function: Any) -> float:
    start = time.thread_time()
    function()
    return time.thread_time() - start


# The library and what is made once.


@lru_cache(maxsize=1)
def _library_file() -> Path | None:
    folder = paddle_libraries()
    return None if folder is None or runtime() is None else next(iter(sorted(folder.glob("libdnnl.so*"))), None)


@lru_cache(maxsize=1)
def _library() -> Any:
    file = _library_file()
    assert file is not None  # `problem` has asked
    library = ctypes.CDLL(str(file))
    for name, arguments in _FUNCTIONS.items():
        getattr(library, name).argtypes = arguments
    library.dnnl_version.restype = POINTER(_Version)
    return library


def _has(isa: int) -> bool:
    return (_library().dnnl_get_effective_cpu_isa() & isa) == isa


def _check(status: int) -> None:
    if status == OUT_OF_MEMORY:
        raise MemoryError("oneDNN has no memory for a product")
    if status != SUCCESS:
        raise RuntimeError(f"oneDNN answers with status {status}")


def _create(function: str, *arguments: Any) -> c_void_p:
    handle = c_void_p()
    _check(getattr(_library(), function)(byref(handle), *arguments))
    return handle


@lru_cache(maxsize=1)
def _engine() -> c_void_p:
    return _create("dnnl_engine_create", CPU, 0)


@lru_cache(maxsize=1)
def _stream() -> c_void_p:
    return _create("dnnl_stream_create", _engine(), IN_ORDER)


class _Descriptor:
    """Describes a matrix in memory; freed with its last use."""

    def __init__(self, rows: int, columns: int, dtype: int, transposed: bool) -> None:
        sizes = (c_int64 * 2)(rows, columns)
        strides = (c_int64 * 2)(1, rows) if transposed else (c_int64 * 2)(columns, 1)
        self.handle = _create("dnnl_memory_desc_create_with_strides", 2, sizes, dtype, strides)
        finalize(self, _library().dnnl_memory_desc_destroy, self.handle).atexit = False


_matrix = lru_cache(maxsize=256)(_Descriptor)


@lru_cache(maxsize=8)
def _product(transpose_a: bool, transpose_b: bool, add: bool) -> c_void_p:
    """Return the primitive of C = A B, or C += A B, for matrices of any size."""
    a = _Descriptor(RUNTIME, RUNTIME, BF16, transpose_a)
    b = _Descriptor(RUNTIME, RUNTIME, BF16, transpose_b)
    c = _Descriptor(RUNTIME, RUNTIME, F32, False)
    attributes = None
    if add:
        sums = _create("dnnl_post_ops_create")
        _check(_library().dnnl_post_ops_append_sum(sums, 1.0, 0, 0))
        attributes = _create("dnnl_primitive_attr_create")
        _check(_library().dnnl_primitive_attr_set_post_ops(attributes, sums))
    description = _create(
        "dnnl_matmul_primitive_desc_create", _engine(), a.handle, b.handle, None, c.handle, attributes
    )
    return _create("dnnl_primitive_create", description)


@lru_cache(maxsize=64)
def _rounding(count: int) -> c_void_p:
    source, target = _matrix(1, count, F32, False), _matrix(1, count, BF16, False)
    description = _create(
        "dnnl_reorder_primitive_desc_create", source.handle, _engine(), target.handle, _engine(), None
    )
    return _create("dnnl_primitive_create", description)


def _execute(primitive: c_void_p, operands: tuple[tuple[int, _Descriptor, int], ...]) -> None:
    """Run a primitive on operands: place, descriptor, pointer. Nothing is shared between threads."""
    library, engine = _library(), _engine()
    memories: list[c_void_p] = []
    try:
        for _, descriptor, pointer in operands:
            memories.append(_create("dnnl_memory_create", descriptor.handle, engine, pointer))
        places = (place for place, _, _ in operands)
        arguments = (_Argument * len(operands))(*map(_Argument, places, memories))
        _check(library.dnnl_primitive_execute(primitive, _stream(), len(operands), arguments))
    finally:
        for memory in memories:
            library.dnnl_memory_destroy(memory)


def _test() -> bool:
    """Return whether rounding and all products of small whole numbers, which have no error, come out right."""
    # Two ties, to even in both directions; a little more than a tie; an odd count.
    wanted = array("H", [0x3F80, 0x3F82, 0x3F81])
    values = array("f", [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-12])
    if _rounded(values) != wanted:
        return False
    m, n, k = 5, 7, 33
    a = [[(3 * i + 5 * j) % 17 - 8 for j in range(k)] for i in range(m)]
    b = [[(7 * i + 2 * j) % 13 - 6 for j in range(n)] for i in range(k)]
    a_transposed, b_transposed = (list(zip(*matrix, strict=True)) for matrix in (a, b))
    expected = [sum(x * y for x, y in zip(row, column, strict=True)) for row in a for column in b_transposed]
    for transpose_a, transpose_b, add in combinations((False, True), repeat=3):
        left = _rounded(array("f", [x for row in (a_transposed if transpose_a else a) for x in row]))
        right = _rounded(array("f", [x for row in (b_transposed if transpose_b else b) for x in row]))
        out = array("f", [1.0]) * (m * n)
        pointers = (matrix.buffer_info()[0] for matrix in (left, right, out))
        multiply(m, n, k, *pointers, transpose_a=transpose_a, transpose_b=transpose_b, add=add)
        if list(out) != [value + add for value in expected]:
            return False
    return True


def _rounded(values: array[float]) -> array[int]:
    out = array("H", bytes(2 * len(values)))
    round_to_bfloat16(len(values), values.buffer_info()[0], out.buffer_info()[0])
    return out
