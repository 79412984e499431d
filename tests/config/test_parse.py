"""Reading files and command lines: places, and what is wrong with their form."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.config import Config
from erniekit.config.parse import read_file, read_overrides
from erniekit.errors import ConfigurationError

COMPLETE = "model_name_or_path: m\noutput_dir: o\ntrain_dataset_path: t.jsonl\n"


def _refused(path: Path, content: str | bytes, overrides: tuple[str, ...] = ()) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigurationError) as caught:
        Config.load(path, overrides)
    return str(caught.value)


def test_entries_keep_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(
        "# comment\n\nmax_steps: 3\namp_custom_white_list:\n  - matmul\n  - relu\nseed: 1\n", encoding="utf-8"
    )
    entries, problems = read_file(file)
    assert [(entry.name, entry.location.line) for entry in entries] == [
        ("max_steps", 3),
        ("amp_custom_white_list", 4),
        ("seed", 7),
    ]
    assert problems == []
    assert entries[0].location.origin == "sft.yaml:3"
    assert str(entries[0].location) == f"{file}:3"


def test_json_entries_keep_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "sft.json"
    file.write_text('{\n  "max_steps": 3,\n\n  "output_dir": "\\ud83d\\ude00"}\n', encoding="utf-8")
    entries, problems = read_file(file)
    assert [(entry.name, entry.value, entry.location.line) for entry in entries] == [
        ("max_steps", 3, 2),
        ("output_dir", "😀", 4),
    ]
    assert problems == []


def test_a_name_written_twice_names_both_lines(tmp_path: Path) -> None:
    text = _refused(tmp_path / "a.yaml", COMPLETE + "seed: 1\nmax_steps: 2\nseed: 1\n")
    assert text == f"{tmp_path}/a.yaml:6: `seed` is written twice, first at line 4; remove one"
    text = _refused(tmp_path / "a.json", '{"seed": 1,\n "seed": 1}')
    assert "a.json:2: `seed` is written twice, first at line 1" in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a: [1,\nb: 2\n", "a.yaml:3: not valid YAML: expected ',' or ']'"),
        ("\tseed: 1\n", "a.yaml:1: not valid YAML: "),
        ("seed: 1\n- 2\n", "a.yaml:2: not valid YAML: "),
        ("a: &x 1\nb: *y\n", "a.yaml:2: not valid YAML: found undefined alias"),
        ("- seed\n", "a.yaml:1: expected lines of the form `name: value`"),
        ("just a text", "expected lines of the form `name: value`"),
        ("seed: 1\n---\nseed: 2\n", "not valid YAML"),
        (b"seed: \xff\xfe\n", "is not UTF-8 text (byte 6)"),
        (b"seed: \x00\n", "not valid YAML"),
        ("x" * 1_000_001, "is larger than 1 MB"),
        ("training:\n  seed: 1\n", "a.yaml:1: `training`: is a nested structure"),
        ("seed: [[[[[1]]]]]\n", "a.yaml:1: `seed`: is a nested structure"),
        ("<<: {seed: 1}\n", "`<<`: is a nested structure"),
        ("seed: !!python/object/apply:os.system [ls]\n", "a.yaml:1: `seed`: "),
        ("seed: !!int one\n", "YAML tags such as int"),
        ("seed: !!float 1\n", "YAML tags such as float"),
        (f"seed: {'9' * 5000}\n", "`seed`: cannot be read as a YAML value"),
        ("[1]: 2\n", "`?`: unknown parameter"),
        ("a: " + "[" * 3000, "nested too deeply"),
    ],
)
def test_malformed_yaml_is_one_clear_error(tmp_path: Path, content: str | bytes, expected: str) -> None:
    assert expected in _refused(tmp_path / "a.yaml", content)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[1]", "a.json:1: not a JSON object of parameters: expected '{'"),
        ('{"seed": 1,}', "not a JSON object of parameters"),
        ('{"seed": 1}\n x', "a.json:2: not a JSON object of parameters: text after the end"),
        ('{"seed"\n 1}', "a.json:2: not a JSON object of parameters: expected ':'"),
        ('{"seed": {"a": 1}}', "`seed`: is a nested structure"),
        ('{"seed": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"seed": ' + "[" * 100_000, "nested too deeply"),
        ('{"seed": NaN, "learning_rate": NaN}', "`learning_rate`: expected a finite number, got nan"),
    ],
)
def test_malformed_json_is_one_clear_error(tmp_path: Path, content: str, expected: str) -> None:
    assert expected in _refused(tmp_path / "a.json", content)


def test_empty_json_object_and_empty_yaml_hold_no_entries(tmp_path: Path) -> None:
    for name, content in (("a.json", " {} \n"), ("a.yaml", ""), ("b.yaml", "# nothing\n")):
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert read_file(tmp_path / name) == ([], [])


def test_a_folder_called_like_a_date_and_a_byte_order_mark_are_no_problem(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + COMPLETE.replace("o\n", "2025-01-31\n", 1).encode())
    assert Config.load(file).basic.output_dir == "2025-01-31"


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.yaml: no such file"):
        Config.load(tmp_path / "absent.yaml")
    with pytest.raises(ConfigurationError, match="is a folder; name a YAML or JSON file"):
        Config.load(tmp_path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Config.load("a\0b")


def test_overrides_are_read_as_yaml() -> None:
    entries, problems = read_overrides(
        ["seed=7", "learning_rate=1e-4", "do_eval=True", "pp_seg_method=[0, 3]", "a=b=c"]
    )
    assert [entry.value for entry in entries] == [7, "1e-4", True, [0, 3], "b=c"]
    assert problems == []
    assert entries[0].location.origin == str(entries[0].location) == "command line"


def test_malformed_overrides_are_reported(tmp_path: Path) -> None:
    text = _refused(tmp_path / "a.yaml", COMPLETE, ("max_steps", "=3", "seed=1", "seed=2", "lerning_rate=1"))
    assert "command line: `max_steps` is not of the form name=value" in text
    assert "command line: `=3` is not of the form name=value" in text
    assert "command line: `seed` is given twice; remove one" in text
    assert "command line: `lerning_rate`: unknown parameter; did you mean `learning_rate`?" in text
    assert text.startswith("4 problems")


@pytest.mark.parametrize("written", ["1:30", "010", "-017", "1:30.5", "[1, 010]"])
def test_numbers_that_yaml_reads_in_base_8_or_60_are_refused(tmp_path: Path, written: str) -> None:
    text = _refused(tmp_path / "a.yaml", f"{COMPLETE}max_steps: {written}\n")
    number = written.strip("[]").split(", ")[-1]
    assert f"a.yaml:4: `max_steps`: YAML 1.1 does not read {number} as a decimal number" in text


@pytest.mark.parametrize(("written", "value"), [("0", 0), ("10", 10), ("1_000", 1000), ("0x1F", 31), ("'010'", "010")])
def test_other_numbers_are_read(tmp_path: Path, written: str, value: int | str) -> None:
    (tmp_path / "a.yaml").write_text(f"seed: {written}\n", encoding="utf-8")
    entries, problems = read_file(tmp_path / "a.yaml")
    assert ([entry.value for entry in entries], problems) == ([value], [])
