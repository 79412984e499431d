"""Keys and passwords reach neither logs nor files."""

from __future__ import annotations

import pytest

from erniekit.redaction import HIDDEN, redacted


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pa55word@host/x", f"https://{HIDDEN}@host/x"),
        ("s3://bucket/x?X-Amz-Signature=abc123&part=2", f"s3://bucket/x?X-Amz-Signature={HIDDEN}&part=2"),
        ("http://h/?write_token=abc#top", f"http://h/?write_token={HIDDEN}#top"),
        ("Authorization: Bearer abcdefghij", f"Authorization: Bearer {HIDDEN}"),
        ("hf_abcdefghijklmnopqrst", HIDDEN),
        ("user@example.org reads data/train.jsonl", "user@example.org reads data/train.jsonl"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, shown: str) -> None:
    assert redacted(text) == shown and redacted([{"x": (text,)}]) == [{"x": [shown]}]


def test_values_of_secret_variables_are_hidden_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("SOME_TOKEN", "short")
    assert redacted("the key 0123456789abcdef is short") == f"the key {HIDDEN} is short"


def test_values_of_secret_names_are_hidden_and_those_of_parameters_are_not() -> None:
    values = {"api_key": "x", "hub_token": "y", "password": "z", "token": "t"}
    assert set(redacted(values).values()) == {HIDDEN}
    parameters = {
        "unit_token": "<u{}>",
        "max_new_tokens": 5,
        "tokenizer": "x",
        "api_key": "",
        "keys": "a",
        "kept": None,
    }
    assert redacted(parameters) == parameters
