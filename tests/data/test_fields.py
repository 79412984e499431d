from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

import pytest

from erniekit.data.formats.registry import FORMATS, KINDS, read_records
from erniekit.data.formats.unused_fields import (
    BOOKKEEPING_FIELDS,
    MAX_NAME_LENGTH,
    MAX_NAMES,
    UnusedField,
    UnusedFields,
    describe_unused,
)
from erniekit.data.formats.verdicts import VERDICTS, verdict_kind


@pytest.fixture
def unused_of(write_jsonl):
    def read(records, kind="erniekit"):
        unused = UnusedFields(FORMATS[kind])
        for _ in read_records(write_jsonl(records), kind, unused, media_dir=[str(Path(__file__).parent)]):
            pass
        return unused.found()

    return read


def exchange(**more):
    return {"src": "q", "tgt": "a", **more}


def lines(fields, kind="erniekit"):
    return describe_unused(FORMATS[kind], tuple(fields))


DIALOGUES = ("erniekit", "alpaca", "messages", "sharegpt", "prompt_completion")
RECORDS = {
    "erniekit": {"src": ["s", "q"], "tgt": ["", "a"], "label": [0, 1], "system": "", "is_system": 1},
    "alpaca": {"instruction": "q", "input": "i", "output": "a", "history": [], "system": "s"},
    "messages": {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 1}]},
    "asr": {"audio_path": str(Path(__file__)), "text": "a", "language": "en", "start": 0.5, "end": 1, "duration": 0.5},
    "text": {"tgt": "a"},
    "aligned_units": {
        "units": [1, 1, 2], "words": [{"word": "a", "start": 0, "end": 0.06}], "duration": 0.06, "units_per_second": 50,
    },
    "token_ids": {"input_ids": [1, 5, 6], "labels": [-100, 5, 6]},
    "codes": {
        "codes": [[1, 2, 3]], "text": "a", "text_pinyin": "b", "audio_duration": 0.06, "num_tokens": 3, "speaker": "s",
        "language_id": "en", "instruct": "low", "similar": ["x"], "clean_start_token_idx": 1, "audio_path": "a.wav",
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s", "tools": "[]",
    },
    "prompt_completion": {"prompt": "q", "completion": "a", "system": "s", "tools": []},
    "sharegpt preferences": {
        "conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"}, "system": "s", "score_chosen": 2, "score_rejected": 1,
    },
    "erniekit preferences": {
        "src": ["s", "q"], "tgt": [""], "response": ["a", "b"], "sort": [1, 0], "system": "", "is_system": 1,
    },
    "alpaca preferences": {
        "instruction": "q", "input": "i", "chosen": "a", "rejected": "b", "system": "s", "score_chosen": 2,
        "score_rejected": 1,
    },
    "messages preferences": {
        "prompt": [{"role": "user", "content": "q"}], "chosen": "a",
        "rejected": [{"role": "assistant", "content": "b", "weight": 1}], "score_chosen": 2, "score_rejected": 1,
    },
}  # fmt: skip
for name, verdict in zip(DIALOGUES, cycle(VERDICTS), strict=False):
    used = {key: value for key, value in RECORDS[name].items() if key not in ("label", "tools")}
    RECORDS[verdict_kind(name)] = {**used, verdict: True}


@pytest.mark.parametrize("kind", KINDS)
def test_the_fields_of_a_format_are_used(unused_of, kind):
    assert unused_of([RECORDS[kind], RECORDS[kind]], kind) == []


@pytest.mark.parametrize("kind", KINDS)
def test_other_fields_are_counted_with_their_first_line(unused_of, kind):
    record = RECORDS[kind]
    records = [record, {**record, "difficulty": 1, "author": None}, "", {**record, "difficulty": 2}]
    assert unused_of(records, kind) == [UnusedField("author", 1, 2), UnusedField("difficulty", 2, 2)]


def test_fields_that_say_where_a_record_comes_from_are_not_reported(unused_of):
    assert unused_of([exchange(**dict.fromkeys(BOOKKEEPING_FIELDS, "x"))]) == []


def test_of_several_names_for_the_same_the_first_counts(unused_of):
    file = str(Path(__file__))
    record = {"audio_path": file, "path": "x.wav", "text": "a", "sentence": "b", "transcript": None}
    assert unused_of([record, record], "asr") == [UnusedField("path", 2, 1), UnusedField("sentence", 2, 1)]
    talk = [{"role": "user", "content": "<audio>"}, {"role": "assistant", "content": "a"}]
    both = {"messages": talk, "audio": file, "audios": [file]}
    assert unused_of([both], "messages") == [UnusedField("audio", 1, 1)]


def test_fields_of_messages_count_once_a_record(unused_of):
    turns = [
        {"role": "user", "content": "q", "name": "x"},
        {"role": "assistant", "content": "a", "lable": 0, "name": "y"},
    ]
    found = unused_of([{"messages": turns}], "messages")
    assert found == [UnusedField("messages[].lable", 1, 1), UnusedField("messages[].name", 1, 1)]
    assert lines(found, "messages") == [
        "field not used: messages[].lable (1 record, first at line 1): did you mean messages[].label?",
        "field not used: messages[].name (1 record)",
    ]


def test_fields_of_sharegpts_messages_are_counted(unused_of):
    talk = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weihgt": 1, "markdown": None}]
    found = unused_of([{"conversations": talk}], "sharegpt")
    assert lines(found, "sharegpt") == [
        "field not used: conversations[].weihgt (1 record, first at line 1): did you mean conversations[].weight?",
        "field not used: conversations[].markdown (1 record)",
    ]


def test_fields_of_the_parts_of_a_content_are_counted(unused_of):
    parts = [{"text": "a", "trian": False}, {"type": "text", "text": "b", "id": 7}, {"units": [1], "train": True}]
    clip = {"type": "audio", "path": str(Path(__file__)), "sampling": 16_000}  # its own fields are many
    talk = [{"role": "user", "content": [clip]}, {"role": "assistant", "content": parts}]
    found = unused_of([{"messages": talk}], "messages")
    assert lines(found, "messages") == [
        "field not used: messages[].content[].trian (1 record, first at line 1): "
        "did you mean messages[].content[].train?",
        "field not used: messages[].content[].id (1 record)",
    ]


def test_malformed_records_are_not_counted(unused_of):
    assert unused_of([{"src": "q", "difficulty": 1}, exchange()]) == []


@pytest.mark.parametrize(
    "kind, name, meant",
    [
        ("erniekit", "sytem", "system"), ("erniekit", "lable", "label"), ("erniekit", "System", "system"),
        ("erniekit", "labels", "label"), ("alpaca", "inputs", "input"), ("alpaca", "histroy", "history"),
        ("messages", "messages[].weigth", "messages[].weight"),
    ],
)  # fmt: skip
def test_misspelt_fields_are_told_with_what_was_meant(kind, name, meant):
    expected = f"field not used: {name} (1,200 records, first at line 3): did you mean {meant}?"
    assert lines([UnusedField(name, 1200, 3)], kind) == [expected]


@pytest.mark.parametrize("name", ["src_lang", "title", "response", "sort", "score"])
def test_other_names_are_not_taken_for_misspelt(name):
    assert lines([UnusedField(name, 10_900, 1)]) == [f"field not used: {name} (10,900 records)"]


def test_a_field_beside_another_of_the_same_meaning_is_no_misspelling():
    assert describe_unused(FORMATS["asr"], (UnusedField("audio", 1, 1),)) == ["field not used: audio (1 record)"]


def test_names_that_are_data_do_not_fill_memory_or_report(unused_of):
    found = unused_of([exchange(**{f"key {number}": 1}) for number in range(150)])
    assert len(found) == MAX_NAMES
    (line,) = lines(found)
    assert line.startswith("fields not used: 'key 0' (1 record), 'key 1' (1 record), ")
    assert line.endswith("'key 9' (1 record), and 90 others or more")
    assert [len(field.name) for field in unused_of([exchange(**{"x" * 10_000: 1})])] == [MAX_NAME_LENGTH]


def test_a_name_that_no_encoding_holds_is_shown_escaped(unused_of):
    found = unused_of([json.dumps(exchange(**{"a\ud83d": 1}))])
    assert lines(found) == ["field not used: 'a\\ud83d' (1 record)"]


def test_fields_of_a_pair_are_told_with_the_list_they_stand_in(unused_of):
    kind = "messages preferences"
    record = {
        "prompt": [{"role": "user", "content": "q", "name": "n"}],
        "chosen": [{"role": "assistant", "content": "a", "wieght": 1}],
        "rejected": "b",
        "score_choosen": 1,
    }
    assert lines(unused_of([record], kind), kind) == [
        "field not used: chosen[].wieght (1 record, first at line 1): did you mean chosen[].weight?",
        "field not used: score_choosen (1 record, first at line 1): did you mean score_chosen?",
        "field not used: prompt[].name (1 record)",
    ]
