"""Data: records of every format with places changed, tables, plain text, damaged bytes; given to `validate --data`."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from case import Case
from values import as_json, changed, damaged

TINY = Path("examples/models/tiny-ernie")  # commands run in the project's folder
RECORDS: dict[str, list[Any]] = {
    "erniekit": [
        {"src": "What is 2 + 3?", "tgt": "5"},
        {"system": "Be brief.", "src": ["Hi", "And 1 + 1?"], "tgt": ["Hello", "2"], "label": [0, 1]},
        {"src": ["2 + 2?"], "tgt": [], "response": [["4"], ["5"]], "sort": [1, 0]},
    ],
    "messages": [
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "content": "<think>x</think>Hello"}]},
        {"messages": [{"role": "user", "content": "How warm?"}, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "warmth", "arguments": {"place": "Ulm"}}}]}, {"role": "tool", "content": "21"}, {"role": "assistant", "content": "21 degrees"}], "tools": [{"type": "function", "function": {"name": "warmth", "parameters": {}}}]},
    ],
    "alpaca": [
        {"instruction": "Add.", "input": "1 and 2", "output": "3", "history": [["Hi", "Hello"]]},
        {"instruction": "2 + 2?", "chosen": "4", "rejected": "5"},
    ],
    "text": [{"text": "A text that is long enough to be trained on."}],
    "sharegpt": [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}],
    "asr": [
        {"audio_path": "1.wav", "text": "four", "language": "en", "start": 0.0, "end": 0.5, "duration": 0.5},
        {"audio_filepath": "../1.wav", "text": "four", "offset": 0, "duration": 1e9},
        {"audio": {"path": "/dev/zero", "bytes": None}, "sentence": "four"},
    ],
    "audio messages": [
        {"messages": [{"role": "user", "content": "<audio>What?"}, {"role": "assistant", "content": "four"}], "audios": ["1.wav"]},
        {"messages": [{"role": "user", "content": [{"type": "audio", "path": "1.wav"}, {"type": "text", "text": "What?"}]}, {"role": "assistant", "content": "four"}]},
        {"prompt": "<audio>What?", "chosen": "four", "rejected": "five", "audios": ["1.wav"]},
    ],
    "aligned_units": [
        {"units": [1, 2, 3, 3, 2, 1], "words": [{"word": "four", "start": 0, "end": 0.04}, {"text": "one", "start": 0.04, "end": 0.08}, {"word": "two", "start": 0.09, "end": 0.12}]},
        {"units": "1 2 3 3 2 1", "alignment": "1.TextGrid", "tier": "words", "duration": 0.12, "units_per_second": 50},
        {"units": [1, 2, 3, 3, 2, 1], "alignment": "1.ctm", "recording": "a"},
    ],
    "pairs": [{"prompt": "Hi", "completion": "Hello"}, {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}],
}  # fmt: skip
SILENCE = b"RIFF$\x10\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x40\x1f\0\0\x80\x3e\0\0\x02\0\x10\0data\0\x10\0\0" + bytes(4096)
TEXTGRID = (
    b'File type = "ooTextFile"\nObject class = "TextGrid"\n\nxmin = 0\nxmax = 0.12\ntiers? <exists>\nsize = 1\nitem []:\n'
    b'  item [1]:\n    class = "IntervalTier"\n    name = "words"\n    xmin = 0\n    xmax = 0.12\n'
    b'    intervals: size = 3\n    intervals [1]:\n      xmin = 0\n      xmax = 0.04\n      text = "four"\n'
    b'    intervals [2]:\n      xmin = 0.04\n      xmax = 0.09\n      text = "one"\n'
    b'    intervals [3]:\n      xmin = 0.09\n      xmax = 0.12\n      text = "two"\n'
)
CTM = b"a 1 0 0.04 four\na 1 0.04 0.05 one\na 1 0.09 0.03 two 0.9\n"
UNITS = b'added_tokens: ["<|continue|>", "<|correspond|>"]\nadded_token_ranges: ["<|unit{0..3}|>"]\n'
TYPES = ["", "erniekit", "alpaca", "messages", "text", "sharegpt", "asr", "packed", "aligned_units"]
SUFFIXES = [".jsonl", ".jsonl", ".jsonl", ".json", ".txt", ".csv", ".tsv", ".parquet", ".jsonl.gz", ""]


def draw(random: Random) -> Case:
    """Draw a file of some records, and the stage and format that it is read with."""
    kind = random.choice(list(RECORDS))
    records = [random.choice(RECORDS[kind]) for _ in range(random.choice([0, 1, 3, 20]))]
    records = [changed(record, random) if random.random() < 0.4 else record for record in records]
    suffix = random.choice(SUFFIXES)
    if suffix in (".csv", ".tsv"):
        mark = b"," if suffix == ".csv" else b"\t"
        rows = [
            [as_json(item).strip(b'"') for item in record.values()] for record in records if isinstance(record, dict)
        ]
        header = mark.join(str(name).encode("utf-8", "replace") for name in RECORDS[kind][0])
        content = b"\n".join([header, *(mark.join(row) for row in rows)])
    elif suffix == ".json":
        content = as_json(records)
    else:
        content = b"\n".join(map(as_json, records))
    if random.random() < 0.3:
        content = damaged(content, random)
    name = f"data{suffix}"
    values = {
        "model_name_or_path": str(TINY),
        "output_dir": "{folder}/out",
        "data_cache_dir": "{folder}/cache",
        "train_dataset_path": f"{{folder}}/{name}",
        "stage": random.choice(["SFT", "SFT", "DPO", "PT"]),
        "train_dataset_type": random.choice([kind, *TYPES]),
        "max_seq_len": random.choice([16, 128, 128]),
        "continue_training": "false",
    }
    words = [f"{name}={value}" for name, value in values.items() if value]
    files = {name: content, "run.yaml": b"seed: 1\n", "1.wav": random.choice([SILENCE, b"", damaged(SILENCE, random)])}
    if kind == "aligned_units":
        files["run.yaml"] += UNITS
        files["1.TextGrid"], files["1.ctm"] = (
            random.choice([sound, damaged(sound, random)]) for sound in (TEXTGRID, CTM)
        )
    return Case(files, [["validate", "{folder}/run.yaml", "--data", *words]])
