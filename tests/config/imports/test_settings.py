"""Nested files: every value keeps its key and its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.config.imports.settings import read_settings
from erniekit.errors import ConfigurationError


def read(folder: Path, name: str, text: str, *keys: str, overrides: tuple[str, ...] = ()) -> dict[str, object]:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return {
        f"{setting.key} {setting.location.line} {list(setting.item)}": setting.value
        for setting in read_settings(path, keys, overrides)
    }


def test_values_of_yaml_have_their_keys_and_lines(tmp_path: Path) -> None:
    text = "a: 1_000\nb:\n  c: [1, 2]\n  d: {x: 1}\nm:\n- n: 1.0e-4\n- n: 1e-4\n  e: null\n"
    assert read(tmp_path, "c.yaml", text, "b.d") == {
        "a 1 []": 1000, "b.c 3 []": [1, 2], "b.d 4 []": {"x": 1}, "m[].n 6 [0]": 1e-4, "m[].n 7 [1]": 1e-4,
        "m[].e 8 [1]": None,
    }  # fmt: skip


def test_values_of_json_have_their_keys_and_lines(tmp_path: Path) -> None:
    text = '{\n\t"rate": 1e-4, "on": true,\n\t"path": "a\\/b \\u00e4",\n\t"list": [0.0, 0.3], "none": null\n}'
    assert read(tmp_path, "c.json", text) == {
        "rate 2 []": 1e-4, "on 2 []": True, "path 3 []": "a/b ä", "list 4 []": [0.0, 0.3], "none 4 []": None,
    }  # fmt: skip


def test_words_of_the_command_line_replace_values(tmp_path: Path) -> None:
    found = read(tmp_path, "c.yaml", "a: {b: 1, c: 2}", overrides=("a.b=5", "m[].size=half"))
    assert found == {"a.c 1 []": 2, "a.b 0 []": 5, "m[].size 0 []": "half"}


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("c.yaml", "a: 1\na: 2", "c.yaml:2: `a` is written twice, first at "),
        ("c.yaml", "a: [", "c.yaml:1: is no YAML"),
        ("c.yaml", "- 1", "expected keys with values"),
        ("c.yaml", "a: !!python/name:os.system x", "c.yaml:1: cannot be read as a YAML value"),
        ("c.yaml", "a: [{b: 1}, 2]", "c.yaml:1: `a`: item 2 is no mapping"),
        ("c.json", '{"a": 1,\n"b": }', "c.json:2: is no JSON"),
        ("c.json", "[]", "expected keys with values"),
        ("c.json", '{"a": ' + "[" * 5000 + "]" * 5000 + "}", "nested too deeply"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(tmp_path: Path, name: str, text: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path, name, text)
    assert told in str(caught.value)


def test_files_that_are_not_there_or_no_text_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no\.yaml: cannot be read: No such file"):
        read_settings(tmp_path / "no.yaml", ())
    (tmp_path / "b.yaml").write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match="is not UTF-8 text"):
        read_settings(tmp_path / "b.yaml", ())
