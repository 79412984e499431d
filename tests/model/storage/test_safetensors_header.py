"""Headers are refused where the format's own library refuses them, and never with a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import example, given, settings
from hypothesis import strategies as st

from erniekit.errors import ModelFileError
from erniekit.model.storage.safetensors_header import parse_header

PATH = Path("model.safetensors")
TENSORS: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "empty": {"dtype": "F32", "shape": [0, 5], "data_offsets": [24, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "codes": {"dtype": "I32", "shape": [], "data_offsets": [32, 36]},
}
SIZE = 36


def with_entry(name: str, **changes: Any) -> dict[str, Any]:
    return {**TENSORS, name: {**TENSORS[name], **changes}}


def encoded(header: Any) -> bytes:
    return header if isinstance(header, bytes) else json.dumps(header).encode()


REFUSED = {
    "overlap": (with_entry("b", data_offsets=[16, 24]), "overlaps a"),
    "the same range": (with_entry("b", dtype="F32", shape=[6], data_offsets=[0, 24]), "overlaps a"),
    "gap": ({name: TENSORS[name] for name in ("a", "codes")}, "leaves 8 bytes unused before it"),
    "rest": ({name: TENSORS[name] for name in ("a", "b")}, "4 bytes follow the last tensor"),
    "truncated": (with_entry("codes", shape=[2], data_offsets=[32, 40]), "truncated"),
    "size": (with_entry("a", shape=[2, 2]), "does not fill the bytes 0 to 24"),
    "float size": (with_entry("a", shape=[2, 3.0]), "expected a list of sizes"),
    "true as size": (with_entry("codes", shape=[True]), "expected a list of sizes"),
    "negative size": (with_entry("a", shape=[-2, -3]), "expected a list of sizes"),
    "overflow": (with_entry("empty", shape=[2**40, 2**40, 0]), "expected a list of sizes"),
    "float offset": (with_entry("a", data_offsets=[0.0, 24]), "expected the first byte"),
    "three offsets": (with_entry("a", data_offsets=[0, 24, 24]), "expected the first byte"),
    "backwards": (with_entry("empty", data_offsets=[24, 0]), "does not fill"),
    "dtype": (with_entry("a", dtype="F31"), "dtype 'F31' is not one"),
    "dtype as list": (with_entry("a", dtype=["F32"]), "is not one of the format's"),
    "metadata list": ({**TENSORS, "__metadata__": ["format", "pt"]}, "__metadata__"),
    "metadata text": ({**TENSORS, "__metadata__": "pt"}, "__metadata__"),
    "metadata number": ({**TENSORS, "__metadata__": {"format": 1}}, "__metadata__"),
    "NaN": (encoded(with_entry("a", shape=[float("nan")])), "NaN is not a number"),
    "entry": ({**TENSORS, "a": None}, "cannot be read"),
    "half a pair": (encoded({**TENSORS, "a\ud800": TENSORS["a"]}), "surrogates not allowed"),
    "twice": (encoded(TENSORS).replace(b'"b"', b'"a"'), "'a' is there twice"),
    "not UTF-8": (encoded(TENSORS).replace(b'"a"', b'"\xff"'), "not a safetensors file"),
    "deep": (b"[" * 100_000, "nested too deeply"),
}


def library_reads(text: bytes, size: int) -> bool:
    try:
        safetensors.deserialize(len(text).to_bytes(8, "little") + text + bytes(size))
    except safetensors.SafetensorError:
        return False
    return True


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_library_refuses_is_refused_with_a_reason(case: str) -> None:
    header, reason = REFUSED[case]
    assert case == "twice" or not library_reads(encoded(header), SIZE)
    with pytest.raises(ModelFileError, match=reason):
        parse_header(PATH, encoded(header), SIZE)


def test_what_the_library_reads_is_read() -> None:
    for header in (TENSORS, {**TENSORS, "__metadata__": None}, {"__metadata__": {"format": "pt"}, **TENSORS}):
        assert library_reads(encoded(header), SIZE)
        entries, metadata = parse_header(PATH, encoded(header) + b"   ", SIZE)
        assert list(entries) == list(TENSORS) and metadata == (header.get("__metadata__") or {})
        assert entries["b"] == (("BF16", (4,)), 24, 32)


ODD: Any = st.one_of(
    st.integers(-2, 40), st.sampled_from([2**31, 2**63, 2**64, 10**30, 1.0, 0.5, True, None, "", "F32", "I8", "F4"]),
    st.lists(st.integers(-1, 40), max_size=3), st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=2),
)  # fmt: skip
PLACES = st.sampled_from([(name, key) for name in TENSORS for key in ("dtype", "shape", "data_offsets")])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.tuples(PLACES, ODD), max_size=2), st.lists(st.tuples(st.text(max_size=3), ODD), max_size=1))
def test_changed_values_are_judged_as_the_library_judges_them(changes: list[Any], more: list[Any]) -> None:
    header = {name: dict(entry) for name, entry in TENSORS.items()} | dict(more)
    for (name, key), value in changes:
        if isinstance(header.get(name), dict):
            header[name][key] = value
    agrees(encoded(header))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, len(encoded(TENSORS)) - 1), st.integers(0, 255)), min_size=1, max_size=2))
@example([(11, 92), (12, 117)])
def test_changed_bytes_are_judged_as_the_library_judges_them(changes: list[tuple[int, int]]) -> None:
    text = bytearray(encoded(TENSORS))
    for place, byte in changes:
        text[place] = byte
    agrees(bytes(text))


def agrees(text: bytes) -> None:
    """What the library refuses is refused here; what it reads is read, unless a name is there twice."""
    try:
        entries = parse_header(PATH, text, SIZE).entries
    except ModelFileError as error:
        assert not library_reads(text, SIZE) or "is there twice" in str(error), error
    else:
        assert library_reads(text, SIZE), entries
