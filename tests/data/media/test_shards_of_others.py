"""Shards of the `omnivoice` package are read, and it reads ours; recorded by tools/parity/record_code_shards.py."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from erniekit.data.media.code_shard_reader import read_shards
from erniekit.data.media.code_shards import CodedRecording, Shard, write_shard
from tests.data.media.shard_cases import CODEBOOK_SIZE, LEVELS, RECORDED, cases


def test_shards_of_omnivoice_are_read() -> None:
    found = list(read_shards(RECORDED, levels=LEVELS, codebook_size=CODEBOOK_SIZE))
    assert len(found) == len(cases())
    for item, (key, codes, record) in zip(found, cases(), strict=True):
        assert isinstance(item, CodedRecording)
        assert (item.key, item.record, item.codes.dtype) == (key, record, np.int16)
        assert np.array_equal(item.codes, codes)


def test_omnivoice_reads_what_is_written_here(tmp_path: Path) -> None:
    """The files have the bytes of which its reader gave the recorded samples, and these are the ones that we mean."""
    recorded = json.loads((RECORDED / "read.json").read_text(encoding="utf-8"))
    shard = Shard(tmp_path / "a.tar", tmp_path / "a.jsonl")
    write_shard(shard, [CodedRecording(key, codes, record) for key, codes, record in cases()], CODEBOOK_SIZE)
    assert [hashlib.sha256(path.read_bytes()).hexdigest() for path in (shard.tar, shard.records)] == recorded["sha256"]
    assert recorded["count"] == len(cases())
    for sample, (_, codes, record) in zip(recorded["samples"], cases(), strict=True):
        assert sample["label"] == record and np.array_equal(sample["audio_tokens"], codes)
