"""Our reader and writer against the safetensors library, and against damaged files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from erniekit.errors import ModelFileError
from erniekit.model.storage.safetensors import SafetensorsFile, write_safetensors

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.float32(3.5).reshape(()),
    "empty": np.zeros((0, 5), np.float32),
}


def write(path, tensors, **options):
    shapes = {name: values.shape for name, values in tensors.items()}
    write_safetensors(path, shapes, iter(tensors.items()), **options)
    return path


def test_the_library_reads_what_we_write(tmp_path):
    loaded = safetensors.numpy.load_file(write(tmp_path / "x.safetensors", TENSORS, metadata={"format": "pt"}))
    assert loaded.keys() == TENSORS.keys()
    for name, values in TENSORS.items():
        np.testing.assert_array_equal(loaded[name], values)


def test_we_read_what_the_library_writes(tmp_path):
    tensors = {
        **TENSORS,
        "half": np.array([1.5, -2.25], np.float16),
        "long": np.array([1, -(2**40)]),
        "double": np.array([0.1]),
        "bytes": np.array([0, 255], np.uint8),
        "flags": np.array([True, False]),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors", {"made by": "the library"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert sorted(file.names()) == sorted(tensors) and file.metadata == {"made by": "the library"}
    for name, values in tensors.items():
        assert file.shape(name) == values.shape
        read = file.read(name)
        assert read.dtype == values.dtype
        np.testing.assert_array_equal(read, values)


def test_bfloat16_is_widened_exactly(tmp_path):
    exact = np.array([1.0, -0.15625, 3.0e38, 0.0], np.float32)
    halves = (exact.view(np.uint32) >> 16).astype("<u2")
    header = json.dumps({"x": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + halves.tobytes())
    widened = SafetensorsFile(path).read("x")
    np.testing.assert_allclose(widened, exact, rtol=2**-7)
    np.testing.assert_array_equal(widened.view(np.uint32) & 0xFFFF, 0)
    np.testing.assert_array_equal(widened[[0, 1, 3]], exact[[0, 1, 3]])


def test_any_memory_layout_is_stored_in_order(tmp_path):
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    views = {"transposed": values.T, "strided": values[::2, ::-1], "big-endian": values.astype(">f4")}
    file = SafetensorsFile(write(tmp_path / "x.safetensors", views))
    for name, view in views.items():
        np.testing.assert_array_equal(file.read(name), view)


def test_equal_tensors_give_equal_files(tmp_path):
    first, second = (write(tmp_path / name, TENSORS).read_bytes() for name in ("a", "b"))
    assert first == second


def damaged(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        (2**60).to_bytes(8, "little") + b"{}",
        damaged(b"not json"),
        damaged([1]),
        damaged({"x": ENTRY}, b"1234567"),
        damaged({"x": {**ENTRY, "dtype": "F31"}}, b"12345678"),
        damaged({"x": {**ENTRY, "shape": [3]}}, b"12345678"),
        damaged({"x": {**ENTRY, "data_offsets": [-8, 0]}}, b"12345678"),
        damaged({"x": {**ENTRY, "shape": "ab"}}, b"12345678"),
        damaged({"x": {"dtype": "F32"}}, b""),
        damaged({"x": 1}, b""),
    ],
)
def test_damaged_files_are_refused_by_name(content, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        SafetensorsFile(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelFileError, match="no such file"):
        SafetensorsFile(tmp_path / "model.safetensors")
