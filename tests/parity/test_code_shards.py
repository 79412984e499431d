"""The `webdataset` package reads the shards of codes that are written here, and its own are read."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import webdataset

from erniekit.data.media.code_shard_reader import read_shard
from erniekit.data.media.code_shards import CodedRecording, Shard, json_line, write_shard
from tests.data.media.shard_cases import CODEBOOK_SIZE, cases

pytestmark = pytest.mark.parity


def test_webdataset_reads_our_shards(tmp_path: Path) -> None:
    shard = Shard(tmp_path / "a.tar", tmp_path / "a.jsonl")
    write_shard(shard, [CodedRecording(key, codes, record) for key, codes, record in cases()], CODEBOOK_SIZE)
    found = list(webdataset.WebDataset(str(shard.tar), shardshuffle=False).decode())
    assert [sample["__key__"] for sample in found] == [key for key, _, _ in cases()]
    for sample, (_, codes, _) in zip(found, cases(), strict=True):
        assert sample["npy"].dtype == np.int16 and np.array_equal(sample["npy"], codes)


def test_shards_of_webdataset_are_read(tmp_path: Path) -> None:
    shard = Shard(tmp_path / "a.tar", tmp_path / "a.jsonl")
    with webdataset.TarWriter(str(shard.tar)) as writer:
        for key, codes, _ in cases():
            content = io.BytesIO()
            np.save(content, codes)
            writer.write({"__key__": key, "npy": content.getvalue()})
    shard.records.write_bytes(b"".join(json_line(record) for _, _, record in cases()))
    found = list(read_shard(shard, codebook_size=CODEBOOK_SIZE))
    assert [(item.key, item.codes.tolist()) for item in found if isinstance(item, CodedRecording)] == [
        (key, codes.tolist()) for key, codes, _ in cases()
    ]
    assert len(found) == len(cases())
