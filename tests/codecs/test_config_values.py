"""Values of a codec's configuration: defaults, types, and what is refused."""

from __future__ import annotations

import pytest

from erniekit.codecs.config_values import config_reader
from erniekit.errors import ModelFileError


def test_values_of_a_configuration(tmp_path):
    values = {"a": 3, "b": None, "c": [1, 2], "d": True, "e": 2, "f": 0}
    odd = {"large": 10**400, "nan": float("nan"), "long": [2] * 33, "list": [10**400]}
    read = config_reader(tmp_path / "config.json", values | odd)
    assert (read("a", 1), read("b", 7), read("c", (9,)), read("absent", "x")) == (3, 7, (1, 2), "x")
    assert read("e", 1.5) == 2.0 and isinstance(read("e", 1.5), float) and read("f", 0) == 0
    for key, default, message in [
        ("d", 1, "d: expected a value such as 1, got True"),
        ("a", "x", "a: expected a value such as 'x', got 3"),
        ("f", 1, "f: expected a number above 0, got 0"),
        ("a", (1,), "a: expected a list of numbers above 0, got 3"),
        ("large", 1, "large: expected a number such as 1, got 1000"),
        ("large", 1.5, r"large: expected a number such as 1\.5, got 1000"),
        ("nan", 1.5, "nan: expected a number such as 1.5, got nan"),
        ("long", (1,), "long: expected a list of numbers above 0, got \\[2, 2"),
        ("list", (1.5,), "list: expected a list of numbers above 0, got \\[1000"),
    ]:
        with pytest.raises(ModelFileError, match=message):
            read(key, default)
