"""Whatever is written, a configuration either loads and round-trips, or is refused as the user's error."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from erniekit.config import Config
from erniekit.config.parameter import Parameter
from erniekit.config.registry import ALIASES, PARAMETERS
from erniekit.errors import ConfigurationError
from tests.config.samples import SMALLEST

NAMES = sorted({*PARAMETERS, *ALIASES})
quick = settings(max_examples=60, deadline=None, derandomize=True)

texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=20)
plain_values = (
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.sampled_from(["2 ** 70", "1e-5", "no", "[1"])
)
any_values = plain_values | st.lists(plain_values, max_size=4) | st.dictionaries(texts, plain_values, max_size=2)


def _valid(parameter: Parameter) -> st.SearchStrategy[Any]:
    """Values that the declaration allows."""
    if parameter.choices:
        words = st.sampled_from(parameter.choices)
        return st.lists(words, unique=True, max_size=3) if parameter.kind.is_list else words
    if isinstance(parameter.default, bool):
        return st.booleans()
    if isinstance(parameter.default, int):
        return st.integers(int(parameter.minimum or 0), int(min(parameter.maximum or 10**6, 10**6)))
    if isinstance(parameter.default, float):
        low = parameter.minimum if parameter.minimum is not None else parameter.above
        high = parameter.maximum if parameter.maximum is not None else parameter.below
        return st.floats(
            low if low is not None else -1e3,
            high if high is not None else 1e3,
            exclude_min=parameter.above is not None,
            exclude_max=parameter.below is not None,
            allow_subnormal=False,
        )
    return st.just(parameter.example)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(PARAMETERS)), unique=True, max_size=12))
    return SMALLEST | {name: draw(_valid(PARAMETERS[name])) for name in names}


def _load_text(name: str, text: str | bytes, overrides: list[str] | None = None) -> Config | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", errors="replace"))
        try:
            return Config.load(file, overrides or [])
        except ConfigurationError as error:
            assert str(error).strip()
            return None


@pytest.mark.slow
@quick
@given(configurations())
def test_resolved_configuration_loads_as_itself(values: dict[str, Any]) -> None:
    try:
        config = Config.from_mapping(values)
    except ConfigurationError:
        assume(False)
        raise
    resolved = config.resolved()
    for name, text in (("a.yaml", yaml.safe_dump(resolved, allow_unicode=True)), ("a.json", json.dumps(resolved))):
        again = _load_text(name, text)
        assert again is not None
        assert again.resolved() == resolved
    for name, value in values.items():
        read = PARAMETERS[name].read(value)
        kept = config[name] == (tuple(read) if isinstance(read, list) else read)
        assert kept or any(line.startswith(f"changed {name} ") for line in config.messages)


@quick
@given(st.dictionaries(st.sampled_from(NAMES) | texts, any_values, max_size=8))
def test_any_values_are_loaded_or_refused(values: dict[str, Any]) -> None:
    try:
        Config.from_mapping(SMALLEST | values)
    except ConfigurationError as error:
        assert str(error).strip()


@quick
@given(st.dictionaries(st.sampled_from(NAMES) | texts, any_values, max_size=6))
def test_any_yaml_mapping_is_loaded_or_refused(values: dict[str, Any]) -> None:
    _load_text("a.yaml", yaml.safe_dump(values, allow_unicode=True))
    _load_text("a.json", json.dumps(values))


@quick
@given(st.text(max_size=60) | st.binary(max_size=60))
@example("a: !!timestamp x")
@example("a: !!bool maybe\nb: !!binary '??'\n")
@example("? [a]\n: b")
@example("a: &x [*x]")
@example('{"a": 1e999, "seed": -0}')
def test_any_file_content_is_loaded_or_refused(content: str | bytes) -> None:
    _load_text("a.yaml", content)
    _load_text("a.json", content)


@pytest.mark.slow
@quick
@given(
    st.lists(st.builds("{}={}".format, st.sampled_from(NAMES), st.text(max_size=12)) | st.text(max_size=12), max_size=5)
)
def test_any_override_is_loaded_or_refused(words: list[str]) -> None:
    _load_text("a.json", json.dumps(SMALLEST), words)
