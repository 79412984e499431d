"""Every reader, and everything a file can have wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.data.conversation import Conversation, PlainText, Turn
from erniekit.data.formats.json import BLOCK_BYTES
from erniekit.data.formats.problems import ProblemList, RecordProblem
from erniekit.data.formats.registry import KINDS, read_records
from erniekit.errors import DataError


def conversations(path, kind):
    items = list(read_records(path, kind))
    assert not [item for item in items if isinstance(item, RecordProblem)]
    return [record for _, record in items]


def problems(path, kind="erniekit"):
    return [str(item) for item in read_records(path, kind) if isinstance(item, RecordProblem)]


def user(text):
    return Turn("user", text)


def assistant(text, trained=True):
    return Turn("assistant", text, trained)


# ---- what is read


def test_erniekit_strings_and_lists(write_jsonl):
    path = write_jsonl([
        {"src": " q ", "tgt": "a\n"},
        {"system": "s", "src": ["q1", "q2"], "tgt": ["a1", "a2"], "label": [0, 1]},
        {"src": ["q"], "tgt": ["a"], "label": 1, "system": None},
    ])  # fmt: skip
    assert conversations(path, "erniekit") == [
        Conversation((user("q"), assistant("a"))),
        Conversation((user("q1"), assistant("a1", False), user("q2"), assistant("a2")), "s"),
        Conversation((user("q"), assistant("a"))),
    ]


def test_erniekit_is_system_takes_the_first_exchange_as_system_text(write_jsonl):
    records = [
        {"is_system": 1, "src": ["Be kind.", "q"], "tgt": [answer, "a"], "label": [0, 1]} for answer in ("", "ok")
    ]
    expected = Conversation((user("q"), assistant("a")), "Be kind.")
    assert conversations(write_jsonl(records), "erniekit") == [expected, expected]


def test_alpaca(write_jsonl):
    path = write_jsonl([
        {"instruction": "Translate.", "input": "eins", "output": "one"},
        {"instruction": "q2", "input": "", "output": "a2", "history": [["q1", "a1"]], "system": "s"},
        {"instruction": "q", "output": "a", "history": None},
    ])  # fmt: skip
    assert conversations(path, "alpaca") == [
        Conversation((user("Translate.\neins"), assistant("one"))),
        Conversation((user("q1"), assistant("a1"), user("q2"), assistant("a2")), "s"),
        Conversation((user("q"), assistant("a"))),
    ]


def test_messages(write_jsonl):
    def message(role, content, **more):
        return {"role": role, "content": content, **more}

    path = write_jsonl([
        {"messages": [message("system", "s"), message("user", "q"), message("assistant", "a")]},
        {"messages": [
            message("user", "q"), message("assistant", "a", weight=0),
            message("user", "q2"), message("assistant", "a2", label=1),
        ]},
    ])  # fmt: skip
    assert conversations(path, "messages") == [
        Conversation((user("q"), assistant("a")), "s"),
        Conversation((user("q"), assistant("a", False), user("q2"), assistant("a2"))),
    ]


def test_text_keeps_its_white_space(write_jsonl):
    assert conversations(write_jsonl([{"text": "  a\n"}]), "text") == [PlainText("  a\n")]


def test_text_of_upstreams_pre_training_files(write_jsonl):
    path = write_jsonl([{"tgt": ["a"]}, {"tgt": "b"}, {"tgt": ["c", "d"]}])
    assert conversations(path, "text") == [PlainText("a"), PlainText("b"), PlainText("c\nd")]


def test_line_numbers_count_blank_lines_and_a_bom_is_no_content(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \n{"text": "b"}')
    assert list(read_records(path, "text")) == [(1, PlainText("a")), (4, PlainText("b"))]


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_read_with_the_line_of_each_record(tmp_path, indent):
    texts = ["one", 'zwei ä \\" ] }', "three\nlines", "x" * (2 * BLOCK_BYTES)]
    path = tmp_path / "data.json"
    path.write_text(
        "\n" + json.dumps([{"text": text} for text in texts], indent=indent, ensure_ascii=False) + "\n", "utf-8"
    )
    items = list(read_records(path, "text"))
    assert [record.text for _, record in items] == texts
    step = 3 if indent else 0
    assert [line for line, _ in items] == [2 + (1 if indent else 0) + step * number for number in range(4)]


def test_every_split_of_an_array_into_blocks_reads_the_same(tmp_path, monkeypatch):
    path = tmp_path / "data.json"
    path.write_text('[ {"text": "ä\\u00e4"} ,\n{"text":"b"}, {"text": "c", "n": 12.5} ]', "utf-8")
    for size in (1, 2, 3, 7, 1000):
        monkeypatch.setattr("erniekit.data.formats.json.BLOCK_BYTES", size)
        assert [(line, record.text) for line, record in read_records(path, "text")] == [(1, "ää"), (2, "b"), (2, "c")]


# ---- what is refused

BAD_ERNIEKIT = {
    "src-missing": ({"tgt": "a"}, "src: expected a string or a list of strings, got nothing"),
    "src-number": ({"src": 3, "tgt": "a"}, "src: expected a string or a list of strings, got 3"),
    "src-item": ({"src": ["q", None], "tgt": ["a", "b"]}, "src[1]: expected a string, got nothing"),
    "unequal": ({"src": ["q", "r"], "tgt": ["a"]}, "tgt: expected as many items as src (2), got 1"),
    "no-turn": ({"src": [], "tgt": []}, "src: expected a string or a list of strings, got []"),
    "empty": ({"src": ["q"], "tgt": ["  "]}, "tgt[0]: expected a text, got an empty string"),
    "label-count": (
        {"src": "q", "tgt": "a", "label": [1, 0]},
        "label: expected one 0 or 1 for each tgt (1), got 2 of them",
    ),
    "label-value": ({"src": "q", "tgt": "a", "label": [2]}, "label: expected 0 or 1, got 2"),
    "all-zero": (
        {"src": "q", "tgt": "a", "label": [0]},
        "label: expected at least one assistant turn with label 1, got none: nothing would be trained",
    ),
    "system": ({"src": "q", "tgt": "a", "system": ["s"]}, "system: expected a string, got ['s']"),
    "only-system": (
        {"src": "q", "tgt": "a", "is_system": 1},
        "src: expected an exchange after the system text (is_system is 1), got only the system text",
    ),
    "surrogate": (
        {"src": "q\ud83d", "tgt": "a"},
        "src: expected Unicode text, got half of a surrogate pair at character 1",
    ),
    "list": (["q", "a"], "record: expected a JSON object, got ['q', 'a']"),
    "infinite": ({"src": "q", "tgt": "a", "label": [float("nan")]}, "label: expected 0 or 1, got nan"),
}


@pytest.mark.parametrize("record, message", BAD_ERNIEKIT.values(), ids=BAD_ERNIEKIT)
def test_malformed_erniekit_records(tmp_path, record, message):
    path = tmp_path / "data.jsonl"
    path.write_text('{"src": "q", "tgt": "a"}\n' + json.dumps(record), "utf-8")
    assert problems(path) == [f"{path}:2: {message}"]


def bad_messages(*messages):
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


BAD_OTHERS = {
    "alpaca-output": ("alpaca", {"instruction": "q"}, "output: expected a string, got nothing"),
    "alpaca-empty": (
        "alpaca",
        {"instruction": " ", "output": "a"},
        "instruction: expected a text, got an empty string",
    ),
    "alpaca-no-answer": ("alpaca", {"instruction": "q", "output": ""}, "output: expected a text, got an empty string"),
    "alpaca-history": (
        "alpaca",
        {"instruction": "q", "output": "a", "history": [["q"]]},
        "history[0]: expected a pair [question, answer], got ['q']",
    ),
    "messages-none": (
        "messages",
        {"message": []},
        "messages: expected a list of messages, got nothing, but message: did you mean it?",
    ),
    "messages-role": ("messages", bad_messages(("tool", "x")), "messages[0].role: expected system or user, got 'tool'"),
    "messages-twice": (
        "messages",
        bad_messages(("user", "q"), ("assistant", "a"), ("assistant", "a")),
        "messages[2].role: expected user, got 'assistant'",
    ),
    "messages-open": (
        "messages",
        bad_messages(("user", "q"), ("assistant", "a"), ("user", "q")),
        "messages: expected the last message to be the assistant's, got 'user'",
    ),
    "messages-only-system": (
        "messages",
        bad_messages(("system", "q")),
        "messages: expected the last message to be the assistant's, got 'system'",
    ),
    "messages-parts": (
        "messages",
        bad_messages(("user", [{"type": "text"}])),
        "messages[0].content[0].text: expected a string, got nothing",
    ),
    "messages-both": (
        "messages",
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a", "label": 1, "weight": 1},
            ]
        },
        "messages[1]: expected either label or weight, got both",
    ),
    "text": ("text", {"text": " \n"}, "text: expected a text, got an empty string"),
    "text-missing": ("text", {"Text": "a"}, "text: expected a string, got nothing, but Text: did you mean it?"),
    "text-dialogue": ("text", {"src": ["q"], "tgt": ["a"]}, "text: expected a string, got nothing"),
    "text-list": ("text", {"tgt": ["a", 1]}, "tgt: expected a string, got 1"),
    "text-no-lines": ("text", {"tgt": []}, "tgt: expected a text, got an empty string"),
}


@pytest.mark.parametrize("kind, record, message", BAD_OTHERS.values(), ids=BAD_OTHERS)
def test_malformed_records_of_the_other_formats(write_jsonl, kind, record, message):
    path = write_jsonl([record])
    assert problems(path, kind) == [f"{path}:1: {message}"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("content", [b"", b"  \n\n", b"\xef\xbb\xbf"])
def test_an_empty_file(tmp_path, kind, content):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    assert problems(path, kind) == [f"{path}: file: expected at least one record, got an empty file"]


def test_an_empty_array(tmp_path):
    path = tmp_path / "data.json"
    path.write_text("[ ]")
    assert problems(path) == [f"{path}: file: expected at least one record, got an empty array"]


def test_a_missing_file_and_a_folder(tmp_path):
    (missing,) = problems(tmp_path / "no.jsonl")
    assert missing.startswith(f"{tmp_path}/no.jsonl: file: expected a file that exists, got no such file")
    assert missing.endswith(f"Paths are relative to the current folder: {Path.cwd()}")
    got = "a folder: name the files in it, separated by commas"
    assert problems(tmp_path) == [f"{tmp_path}: file: expected a file, got {got}"]


@pytest.mark.parametrize("encoding, name", [("utf-16", "UTF-16"), ("utf-32", "UTF-32")])
def test_wide_encodings_are_named(tmp_path, encoding, name):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}', encoding)
    command = f"iconv -f {name} -t UTF-8 {path} > new-file"
    assert problems(path, "text") == [f"{path}: encoding: expected UTF-8, got {name}: convert it with `{command}`"]


def test_bytes_that_are_not_utf8_are_named_with_offset_and_line(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes('{"text": "ä"}\n'.encode() + '{"text": "müde"}\n'.encode("latin-1") + b'{"text": "c"}\n')
    items = list(read_records(path, "text"))
    assert str(items[1]) == f"{path}:2: encoding: expected UTF-8, got byte 0xfc at byte offset 26"
    assert [item[0] for item in (items[0], items[2])] == [1, 3]


def test_bytes_that_are_not_utf8_in_an_array(tmp_path, monkeypatch):
    path = tmp_path / "data.json"
    content = '[{"text": "ä"},\n{"text": "ö"},\n '.encode() + '{"text": "müde"}]'.encode("latin-1")
    path.write_bytes(content)
    for size in (1, 5, 1000):
        monkeypatch.setattr("erniekit.data.formats.json.BLOCK_BYTES", size)
        expected = f"{path}:3: encoding: expected UTF-8, got byte 0xfc at byte offset {content.index(0xFC)}"
        assert problems(path, "text")[-1] == expected


def test_truncated_json(write_jsonl, tmp_path):
    path = write_jsonl(['{"text": "a"}', '{"text": "b'])
    (problem,) = problems(path, "text")
    assert problem.startswith(f"{path}:2: JSON: expected one complete JSON value")
    assert problem.endswith("got a record that breaks off (truncated?)")
    array = tmp_path / "data.json"
    array.write_text('[{"text": "a"},\n{"text": "b"')
    assert problems(array, "text")[0].startswith(f"{array}:2: JSON:")
    array.write_text('[{"text": "a"},\n{"text": "b"}')
    expected = "JSON: expected ',' or ']' after a record of the array, got the end of the file (truncated?)"
    assert problems(array, "text") == [f"{array}:2: {expected}"]


@pytest.mark.parametrize("text", ['{"text" "a"}', "{'text': 'a'}", "text: a", '{"text": "a"} {"text": "b"}'])
def test_broken_json_names_the_column_and_the_rest_is_still_read(write_jsonl, text):
    path = write_jsonl([text, '{"text": "b"}', {"text": 1}])
    first, second = problems(path, "text")
    assert first.startswith(f"{path}:1: JSON: expected one complete JSON value (")
    assert "column" in first
    assert second == f"{path}:3: text: expected a string, got 1"


def test_broken_records_of_an_array(tmp_path):
    path = tmp_path / "data.json"
    path.write_text('[{"text": "a"},\n\n{"text": 1},\n{"text" "c"}]')
    first, second = problems(path, "text")
    assert first == f"{path}:3: text: expected a string, got 1"
    assert second.startswith(f"{path}:4: JSON:")
    path.write_text('[{"text": "a"}]\nmore')
    assert problems(path, "text") == [f"{path}:2: JSON: expected nothing after the array, got 'm'"]


REPEATED = "expected one field of this name in an object, got several"


@pytest.mark.parametrize("form", ["{}\n{}\n{}\n", "[{},\n{},\n{}]"], ids=["lines", "array"])
def test_a_duplicate_field_is_a_problem_and_the_rest_is_read(tmp_path, form, monkeypatch):
    path = tmp_path / "data.jsonl"
    path.write_text(
        form.format('{"text": "a", "text": "b"}', '{"text": "c", "n": [{"x y": 1, "x y": 1}]}', '{"text": "d"}')
    )
    for size in (3, 1000):
        monkeypatch.setattr("erniekit.data.formats.json.BLOCK_BYTES", size)
        first, second, third = read_records(path, "text")
        assert [str(first), str(second)] == [f"{path}:1: text: {REPEATED}", f"{path}:2: 'x y': {REPEATED}"]
        assert third == (3, PlainText("d"))


def test_one_name_in_several_objects_is_no_repetition(write_jsonl):
    path = write_jsonl([{"text": "a", "more": {"text": 1, "again": [{"text": 2}, {"text": 3}]}}])
    assert conversations(path, "text") == [PlainText("a")]


RECORD = {"text": "a", "more": [1, {"b": "c"}]}
OVER_LINES = {
    "indented": json.dumps(RECORD, indent=2),
    "indented-several": "\n".join(json.dumps(RECORD, indent=2) for _ in range(3)),
    "wrapped": '{"data": [\n' + ",\n".join([json.dumps(RECORD)] * 3) + "\n]}",
    "wrapped-large": '{"data": [\n' + ",\n".join([json.dumps({"text": "ä" * 1000})] * 2000) + "\n]}",
    "breaks-off": '{"text": "a",\n "more": [1,\n',
    "broken-later": '{\n  "text": "a",\n  "more": 1,\n}',
}


@pytest.mark.parametrize("text", OVER_LINES.values(), ids=OVER_LINES)
@pytest.mark.parametrize("before", ["", "\ufeff", "\n\n"], ids=["at-once", "byte-order-mark", "blank-lines"])
def test_an_object_over_several_lines_is_one_problem(tmp_path, text, before):
    path = tmp_path / "data.json"
    path.write_text(before + text, "utf-8")
    expected = "JSON: expected one object a line, or one array of objects, got one object over several lines"
    assert problems(path, "text") == [f"{path}:{1 + before.count(chr(10))}: {expected}"]


@pytest.mark.parametrize("broken", ['{"text": "a', '{"text": "a",', '{"text": ["a"', '{"text": "a"', '{"text" "a"}'])
def test_a_truncated_first_line_is_reported_and_spoils_no_other(write_jsonl, broken):
    path = write_jsonl([broken, '{"text": "b"}'])
    first, second = read_records(path, "text")
    assert str(first).startswith(f"{path}:1: JSON: expected one complete JSON value")
    assert second == (2, PlainText("b"))


@pytest.mark.parametrize(
    "value, got", [("[" * 200_000, "brackets nested too deeply"), ("9" * 5000, "an integer of thousands of digits")]
)
def test_values_that_python_cannot_hold_are_problems_not_crashes(write_jsonl, value, got):
    text = f'{{"text": {value}}}'
    lines = write_jsonl([text, '{"text": "b"}'])
    assert problems(lines, "text") == [f"{lines}:1: JSON: expected a record, got {got}"]
    array = write_jsonl([f"[{text}]"], "data.json")
    assert problems(array, "text") == [f"{array}:1: JSON: expected a record, got {got}"]


def test_a_line_of_10_mb_is_read(write_jsonl):
    long = "word " * 2_000_000
    (_, record), (line, _) = read_records(write_jsonl([{"text": long}, {"text": "b"}]), "text")
    assert record.text == long
    assert line == 2


# ---- how problems are told


def test_the_first_20_problems_are_shown_and_all_are_counted():
    found = ProblemList()
    for line in range(1, 31):
        found.add(RecordProblem("a.jsonl", line, "tgt", "a string", "3"))
    found.add(RecordProblem("b.jsonl", 7, "tgt", "a string", "3"))
    with pytest.raises(DataError) as caught:
        found.raise_if_any()
    lines = str(caught.value).splitlines()
    assert lines[0] == "a.jsonl:1: tgt: expected a string, got 3"
    assert lines[19] == "a.jsonl:20: tgt: expected a string, got 3"
    assert lines[20] == "... and 11 more"
    advice = "Fix or remove these records, or leave them out with on_bad_record: skip."
    assert lines[21] == f"31 problems (a.jsonl: 30, b.jsonl: 1). {advice}"


def test_no_problem_raises_nothing():
    ProblemList().raise_if_any()
