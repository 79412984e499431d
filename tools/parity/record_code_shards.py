#!/usr/bin/env python3
"""Record shards of codes as the `omnivoice` package writes them, and what it reads of ours.

    .venv-transformers5/bin/python tools/parity/record_code_shards.py

Needs omnivoice 0.2.1 (and so transformers 5, torch and webdataset), and neither Paddle nor soundfile: what it imports
to read sound is replaced by empty modules. Writes tests/data/media/recorded_shards/: a folder of its shards, and
read.json with the hash of the tar file that we write of the same recordings, and what its reader gives of it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from erniekit.data.media.code_shards import CodedRecording, Shard, write_index, write_shard  # noqa: E402
from tests.data.media.shard_cases import CODEBOOK_SIZE, RECORDED, cases  # noqa: E402
from tools.parity.empty_modules import CUT_SILENCE, READ_SOUND, replace_modules  # noqa: E402

replace_modules(*READ_SOUND, *CUT_SILENCE)

import webdataset  # noqa: E402
from omnivoice.data.dataset import WebDatasetReader, webdataset_manifest_reader  # noqa: E402
from omnivoice.scripts.extract_audio_tokens import _encode_metadata, serialise_numpy  # noqa: E402


def write_theirs(folder: Path) -> None:
    """Write shards with the package's own functions, as its script does."""
    shutil.rmtree(folder, ignore_errors=True)
    tar, records = folder / "audios/shard-000000.tar", folder / "txts/shard-000000.jsonl"
    for path in (tar, records):
        path.parent.mkdir(parents=True)
    with webdataset.TarWriter(str(tar), mtime=0) as writer, open(records, "w", encoding="utf-8") as file:
        for key, codes, record in cases():
            writer.write(serialise_numpy(key, codes.astype(np.int16)))
            file.write(_encode_metadata(record).decode("utf-8") + "\n")
    seconds = sum(record["audio_duration"] for _, _, record in cases())
    names = [f"/data/shards/{path.relative_to(folder)}" for path in (tar, records)]  # it writes absolute paths
    (folder / "data.lst").write_text(f"{names[0]} {names[1]} {len(cases())} {seconds:.3f}\n", encoding="utf-8")


def read_ours() -> dict[str, object]:
    """Return what the package reads of a shard that we write."""
    with tempfile.TemporaryDirectory() as place:
        shard = Shard(Path(place) / "a.tar", Path(place) / "a.jsonl")
        samples = [CodedRecording(key, codes, record) for key, codes, record in cases()]
        write_index(Path(place) / "data.lst", [write_shard(shard, samples, CODEBOOK_SIZE)])
        manifest = webdataset_manifest_reader(str(Path(place) / "data.lst"))
        reader = WebDatasetReader(manifest, evaluation=True)
        found = [{"label": item["label"], "audio_tokens": item["audio_tokens"].tolist()} for item in reader]
        digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (shard.tar, shard.records)]
        return {"sha256": digests, "count": len(reader), "samples": found}


if __name__ == "__main__":
    write_theirs(RECORDED)
    text = json.dumps(read_ours(), ensure_ascii=False)
    (RECORDED / "read.json").write_text(text + "\n", encoding="utf-8")
    print(f"wrote {RECORDED}")
