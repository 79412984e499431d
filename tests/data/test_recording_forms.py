"""The same recordings and texts, written as different trainers write them: the same samples, and the same sound."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from erniekit.data.conversation import Source
from erniekit.data.media.recording import read_clip
from erniekit.data.open_dataset import open_dataset
from tests.data.recordings import ListeningTemplate, audio_inputs, write_recording

SECONDS = (0.3, 0.5)
QUESTION, ANSWERS = "What is said?", ("four seven", "nine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forms")
    for number, seconds in enumerate(SECONDS):
        write_recording(folder / "clips" / f"{number}.flac", seconds, pitch=300 + 100 * number)
    return folder


@pytest.fixture
def samples(folder, tokenizer):
    """Return (ids, labels, sound) of each sample of a file."""

    def read(path: Path, kind: str) -> list[tuple[list[int], list[int], np.ndarray]]:
        dataset = open_dataset(
            [Source(path, kind, media_dir=(str(folder),))], tokenizer, ListeningTemplate(tokenizer), max_seq_len=128,
            cache_dir=folder / "cache", audio=audio_inputs(tokenizer),
        )  # fmt: skip
        found = [dataset.sample(index) for index in range(len(dataset))]
        return [(each.input_ids.tolist(), each.labels.tolist(), read_clip(each.clips[0].clip)) for each in found]

    return read


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_parquet(path: Path, folder: Path, records: list[dict[str, Any]], *, embedded: bool) -> Path:
    names = [f"clips/{number}.flac" for number in range(len(records))]
    sounds = [{"bytes": (folder / name).read_bytes() if embedded else None, "path": name} for name in names]
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    columns = {name: [record[name] for record in records] for name in records[0]}
    parquet.write_table(pyarrow.table({"audio": pyarrow.array(sounds, kind), **columns}), path)
    return path


def assert_same(found: list, expected: list) -> None:
    assert len(found) == len(expected) == len(SECONDS)
    for (ids, labels, sound), (other_ids, other_labels, other_sound) in zip(found, expected, strict=True):
        assert ids == other_ids and labels == other_labels
        np.testing.assert_array_equal(sound, other_sound)


def test_transcripts(samples, folder, tmp_path):
    names = [f"clips/{number}.flac" for number in range(len(SECONDS))]
    pairs = list(zip(names, ANSWERS, strict=True))
    ours = samples(write(tmp_path / "a.jsonl", [{"audio_path": name, "text": text} for name, text in pairs]), "asr")
    assert [len(sound) for _, _, sound in ours] == [4800, 8000]
    nemo = [
        {"audio_filepath": str(folder / name), "text": text, "duration": seconds, "offset": 0}
        for (name, text), seconds in zip(pairs, SECONDS, strict=True)
    ]
    assert_same(samples(write(tmp_path / "nemo.jsonl", nemo), "asr"), ours)
    with open(tmp_path / "metadata.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("file_name", "transcription"), *pairs])
    assert_same(samples(tmp_path / "metadata.csv", "asr"), ours)
    texts = [{"sentence": text} for text in ANSWERS]
    for embedded in (True, False):
        path = write_parquet(tmp_path / f"{embedded}.parquet", folder, texts, embedded=embedded)
        assert_same(samples(path, "asr"), ours)


def test_dialogues(samples, folder, tmp_path):
    def talk(content: Any, answer: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]

    def asked(**part: Any) -> list[dict[str, Any]]:
        return [{"type": "audio", **part}, {"type": "text", "text": QUESTION}]

    names = [f"clips/{number}.flac" for number in range(len(SECONDS))]
    rows = list(zip(names, ANSWERS, strict=True))
    marked = f"<audio>{QUESTION}"
    forms: dict[str, list[dict[str, Any]]] = {
        "messages": [{"messages": talk(marked, text), "audios": [name]} for name, text in rows],
        "sharegpt": [
            {
                "conversations": [{"from": "human", "value": marked}, {"from": "gpt", "value": text}],
                "audios": [name],
            }
            for name, text in rows
        ],
        "alpaca": [{"instruction": marked, "output": text, "audios": name} for name, text in rows],
        "prompt_completion": [{"prompt": marked, "completion": text, "audios": [name]} for name, text in rows],
    }
    ours = samples(write(tmp_path / "messages.jsonl", forms["messages"]), "messages")
    for kind, records in forms.items():
        assert_same(samples(write(tmp_path / f"{kind}.jsonl", records), kind), ours)
    parts = [{"messages": talk(asked(path=name), text)} for name, text in rows]
    assert_same(samples(write(tmp_path / "parts.jsonl", parts), "messages"), ours)
    in_table = [{"messages": talk(marked, text)} for text in ANSWERS]
    assert_same(samples(write_parquet(tmp_path / "a.parquet", folder, in_table, embedded=True), "messages"), ours)
