"""Shards of codes: what is written, what is read, and everything that can be wrong with the files of others."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from erniekit.data.media.code_shard_reader import ShardProblem, read_shard, read_shards
from erniekit.data.media.code_shards import CodedRecording, Shard, shard_key, write_index, write_shard
from erniekit.errors import DataError

CODES = {"one": np.arange(12).reshape(3, 4), "två 2": np.full((3, 2), 255)}


def recording(key: str, codes: np.ndarray, **fields: object) -> CodedRecording:
    record = {"id": key, "text": f"say {key}", "num_tokens": codes.shape[1], "audio_duration": codes.shape[1] / 25}
    return CodedRecording(key, codes, record | fields)


def written(folder: Path, codes: dict[str, np.ndarray] = CODES, codebook_size: int = 256) -> Shard:
    shard = Shard(folder / "a.tar", folder / "a.jsonl")
    return write_shard(shard, [recording(key, array) for key, array in codes.items()], codebook_size)


def npy(array: np.ndarray, *, pickled: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=pickled)
    return file.getvalue()


def of_others(folder: Path, members: list[tuple[str, bytes]], records: list[object]) -> Shard:
    """A shard that another program wrote."""
    with tarfile.open(folder / "o.tar", "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "o.jsonl").write_text(text, encoding="utf-8")
    return Shard(folder / "o.tar", folder / "o.jsonl")


def problems(shard: Shard, codebook_size: int | None = 256) -> list[str]:
    found = read_shard(shard, codebook_size=codebook_size)
    return [str(item) for item in found if isinstance(item, ShardProblem)]


def test_shards_hold_arrays_and_records(tmp_path: Path) -> None:
    shard = written(tmp_path)
    assert (shard.count, shard.seconds) == (2, 0.24)
    with tarfile.open(shard.tar) as tar:
        assert tar.getnames() == ["one.npy", "två 2.npy"]
        arrays = [np.load(io.BytesIO(tar.extractfile(name).read())) for name in tar.getnames()]  # type: ignore[union-attr]
    assert [array.dtype.str for array in arrays] == ["<i2", "<i2"]
    assert all(np.array_equal(array, codes) for array, codes in zip(arrays, CODES.values(), strict=True))
    lines = [json.loads(line) for line in shard.records.read_text(encoding="utf-8").splitlines()]
    assert lines[0] == {"id": "one", "text": "say one", "num_tokens": 4, "audio_duration": 0.16}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.tar"]


def test_what_is_written_is_read_and_equal_samples_give_equal_bytes(tmp_path: Path) -> None:
    shard = written(tmp_path)
    before = shard.tar.read_bytes()
    write_index(tmp_path / "data.lst", [shard])
    found = list(read_shards(tmp_path, codebook_size=256))
    assert [(item.key, item.codes.tolist()) for item in found if isinstance(item, CodedRecording)] == [
        (key, codes.tolist()) for key, codes in CODES.items()
    ]
    assert len(found) == 2
    assert written(tmp_path).tar.read_bytes() == before


@pytest.mark.parametrize(("codebook_size", "kind"), [(1 << 15, np.int16), ((1 << 15) + 1, np.int32)])
def test_the_codebook_decides_the_type_of_codes(tmp_path: Path, codebook_size: int, kind: type) -> None:
    highest = np.array([[0, codebook_size - 1]])
    shard = written(tmp_path, {"a": highest}, codebook_size)
    (item,) = read_shard(shard, codebook_size=codebook_size)
    assert isinstance(item, CodedRecording) and item.codes.dtype == kind and np.array_equal(item.codes, highest)


def test_keys_fit_tar_files_and_file_systems() -> None:
    assert [shard_key(name) for name in ("a-b_ü 1", "a.b", "../x", "a%2Eb", "a\nb")] == [
        "a-b_ü 1", "a%2Eb", "%2E%2E%2Fx", "a%252Eb", "a%0Ab",
    ]  # fmt: skip


def test_a_moved_folder_is_read_and_an_index_names_no_path_with_a_space(tmp_path: Path) -> None:
    (tmp_path / "old" / "audios").mkdir(parents=True)
    (tmp_path / "old" / "txts").mkdir()
    old = tmp_path / "old"
    shard = write_shard(Shard(old / "audios/s.tar", old / "txts/s.jsonl"), [recording("a", CODES["one"])], 256)
    write_index(old / "data.lst", [shard])
    old.rename(tmp_path / "new")
    (item,) = read_shards(tmp_path / "new")
    assert isinstance(item, CodedRecording)
    with pytest.raises(DataError, match="spaces between its columns"):
        write_index(tmp_path / "data.lst", [Shard(tmp_path / "a b.tar", tmp_path / "a.jsonl", 1, 1.0)])


ARRAY = npy(np.arange(6, dtype=np.int16).reshape(2, 3))
RECORD = {"id": "a"}


@pytest.mark.parametrize(
    ("members", "records", "said"),
    [
        ([("a.npy", npy(np.array([[{}]], object), pickled=True))], [RECORD], ["a.npy: expected integers, got Python"]),
        ([("a.npy", npy(np.ones((2, 3), np.float32)))], [RECORD], ["a.npy: expected integers, got float32"]),
        ([("a.npy", npy(np.arange(6)))], [RECORD], ["expected an array [levels, frames], got one of shape [6]"]),
        ([("a.npy", npy(np.zeros((2, 0), np.int16)))], [RECORD], ["got one of shape [2, 0]"]),
        ([("a.npy", npy(np.array([[0, 256]])))], [RECORD], ["from 0 and below 256, got 256 (level 0, frame 1)"]),
        ([("a.npy", npy(np.array([[3], [-1]])))], [RECORD], ["below 256, got -1 (level 1, frame 0)"]),
        ([("a.npy", ARRAY.replace(b"(2, 3), }  ", b"(-2, -3), }"))], [RECORD], ["got one of shape [-2, -3]"]),
        ([("a.npy", ARRAY[:-2])], [RECORD], ["expected 12 bytes of [2, 3] codes, got 10"]),
        ([("a.npy", b"\x93NUMPY")], [RECORD], ["a.npy: expected an array in NumPy's format"]),
        ([("a.npy", ARRAY.replace(b"(2, 3)", b"(9**9"))], [RECORD], ["expected an array in NumPy's format"]),
        ([("a.npy", ARRAY), ("a.npy", ARRAY)], [RECORD], ["a.npy: expected each key once"]),
        ([("a.npy", ARRAY)], [RECORD, RECORD], ["o.jsonl: line 2: expected each id once, got 'a', as line 1"]),
        ([("a.npy", ARRAY)], [{"id": "b"}], ["a record with this id", "line 1: expected b.npy in"]),
        ([("a.npy", ARRAY)], [{"id": 7}], ["line 1: id: expected a text, got 7", "a record with this id"]),
        ([("a.npy", ARRAY)], [{"id": "a", "num_tokens": 4}], ["expected the frames of the codes, got 4, and 3 frames"]),
        ([("a.npy", ARRAY)], [RECORD, ["x"]], ["line 2: expected a JSON object, got list"]),
        ([("../a.npy", ARRAY)], [], ["../a.npy: expected a name inside the shard"]),
        ([("/etc/a.npy", ARRAY)], [], ["expected a name inside the shard"]),
        ([("a.wav", ARRAY), ("b.c.npy", ARRAY)], [], ["a.wav: expected KEY.npy", "b.c.npy: expected KEY.npy"]),
        (
            [("a.npy", ARRAY), ("b.npy", npy(np.zeros((1, 3), np.int16)))],
            [RECORD, {"id": "b"}],
            ["b.npy: expected codes of 2 levels, got 1"],
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_file_and_member(
    tmp_path: Path, members: list[tuple[str, bytes]], records: list[object], said: list[str]
) -> None:
    found = problems(of_others(tmp_path, members, records))
    assert len(found) == len(said)
    assert all(part in line for part, line in zip(said, found, strict=True)), found


def test_a_link_in_a_shard_is_told(tmp_path: Path) -> None:
    shard = of_others(tmp_path, [("a.npy", ARRAY)], [RECORD])
    with tarfile.open(shard.tar, "a") as tar:
        link = tarfile.TarInfo("b.npy")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert problems(shard) == [f"{shard.tar}: b.npy: expected a file, got a link, device or pipe"]


def cut(content: bytes) -> bytes:
    return content[:1600]  # within the second member


def cut_between_members(content: bytes) -> bytes:
    return content[:1024]


def without_its_end(content: bytes) -> bytes:
    return content[:2048]


def with_a_negative_size(content: bytes) -> bytes:
    header = bytearray(content[1024:1536])
    header[124:136] = (-512).to_bytes(12, "big", signed=True)  # which leads back to the header itself
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return content[:1024] + header + content[1536:]


def with_a_damaged_header(content: bytes) -> bytes:
    return content[:1024] + b"x" * 512 + content[1536:]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, ["b.npy: expected 140 bytes, got 64: the file is cut short", "line 2: expected b.npy in"]),
        (cut_between_members, ["nothing: the file is cut short at byte 1,024", "line 2: expected b.npy in"]),
        (without_its_end, ["nothing: the file is cut short at byte 2,048"]),
        (with_a_damaged_header, ["a damaged header at byte 1,024", "line 2: expected b.npy in"]),
        (with_a_negative_size, ["b.npy: expected a size from 0, got -512: a damaged", "line 2: expected b.npy in"]),
        (lambda content: b"", ["expected a whole tar file", "line 1: ", "line 2: "]),
        (lambda content: b"x" * 2048, ["expected a whole tar file", "line 1: ", "line 2: "]),
    ],
    ids=["cut", "cut between members", "without its end", "damaged header", "negative size", "empty", "no tar"],
)
def test_damaged_tar_files_are_told_and_what_is_whole_is_read(
    tmp_path: Path, damage: Callable[[bytes], bytes], said: list[str]
) -> None:
    shard = of_others(tmp_path, [("a.npy", ARRAY), ("b.npy", ARRAY)], [RECORD, {"id": "b"}])
    shard.tar.write_bytes(damage(shard.tar.read_bytes()))
    items = list(read_shard(shard))
    found = sorted((str(item) for item in items if isinstance(item, ShardProblem)), key=lambda line: "line" in line)
    assert len(found) == len(said) and all(part in line for part, line in zip(said, found, strict=True)), found
    lost = sum("line" in line for line in found)
    assert sum(isinstance(item, CodedRecording) for item in items) == 2 - lost


def test_lines_cut_short_are_told(tmp_path: Path) -> None:
    shard = written(tmp_path)
    shard.records.write_bytes(shard.records.read_bytes()[:-20])
    found = problems(shard)
    assert found[0].startswith(f"{shard.records}: line 2: expected a JSON object") and "cut short" in found[0]
    assert "två 2.npy: expected a record with this id" in found[1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{tar} {records} 3 0.240", "expected 3 recordings, as the index says, got 2"),
        ("{tar} {records} 2 9.240", "expected 9.240 seconds of sound, as the index says, got 0.240"),
        ("{tar} {records} 2", "line 1: expected TAR JSONL COUNT SECONDS, got 3 columns"),
        ("{tar} {records} two 1", "line 1: expected a count and seconds from 0, got two 1"),
        ("{tar} {records} -1 nan", "line 1: expected a count and seconds from 0, got -1 nan"),
        ("{tar} /nowhere/b.jsonl 2 0.240", "line 1: expected files that exist, got no /nowhere/b.jsonl"),
        ("{tar} {records} 2 0.240\n{tar} {records} 2 0.240", "line 2: expected each shard once"),
        ("\n", "expected at least one shard, got an empty file"),
    ],
)
def test_an_index_that_does_not_fit_is_told(tmp_path: Path, line: str, said: str) -> None:
    shard = written(tmp_path)
    index = tmp_path / "data.lst"
    index.write_text(line.format(tar=shard.tar, records=shard.records) + "\n", encoding="utf-8")
    (found,) = (str(item) for item in read_shards(index) if isinstance(item, ShardProblem))
    assert said in found


@pytest.mark.parametrize("duration", [10**400, -1, "1", None])
def test_a_duration_that_is_none_counts_as_unknown(tmp_path: Path, duration: object) -> None:
    shard = of_others(tmp_path, [("a.npy", ARRAY)], [{"id": "a", "audio_duration": duration}])
    (tmp_path / "data.lst").write_text(f"{shard.tar} {shard.records} 1 9.240\n", encoding="utf-8")
    (item,) = read_shards(tmp_path)
    assert isinstance(item, CodedRecording)


def test_a_key_of_two_shards_is_told(tmp_path: Path) -> None:
    first = written(tmp_path)
    second = Shard(tmp_path / "b.tar", tmp_path / "b.jsonl")
    write_index(tmp_path / "data.lst", [first, write_shard(second, [recording("one", CODES["one"])], 256)])
    (found,) = (item for item in read_shards(tmp_path) if isinstance(item, ShardProblem))
    assert str(found) == f"{second.tar}: one.npy: expected a key that no other shard has, got that of {first.tar}"


def test_a_size_that_a_header_claims_is_compared_before_memory_is_taken(tmp_path: Path) -> None:
    claimed = ARRAY.replace(b"(2, 3), }" + b" " * 16, b"(2, 3" + b"0" * 16 + b"), }")
    assert len(claimed) == len(ARRAY)
    (found,) = problems(of_others(tmp_path, [("a.npy", claimed)], [RECORD]))
    assert "a.npy: expected 120,000,000,000,000,000 bytes of [2, 30000000000000000] codes, got 12" in found
