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
        ("s3://me:p@ss@b/x, ssh://git@h/x", f"s3://{HIDDEN}@b/x, ssh://git@h/x"),
        ("abfss://container@account/x", "abfss://container@account/x"),
        (
            "https://b/x?a=1&AWSAccessKeyId=AK&sig=b%2Fr: 403",
            f"https://b/x?a=1&AWSAccessKeyId={HIDDEN}&sig={HIDDEN} 403",
        ),
        ("https://t0ken@host/x", f"https://{HIDDEN}@host/x"),
        ("Authorization: Bearer abcdefghij", f"Authorization: Bearer {HIDDEN}"),
        ("hf_abcdefghijklmnopqrst", HIDDEN),
        ("user@example.org reads data/train.jsonl", "user@example.org reads data/train.jsonl"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, shown: str) -> None:
    assert redacted(text) == shown and redacted([{"x": (text,)}]) == [{"x": [shown]}]


def test_values_of_secret_variables_are_hidden_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountKey=abc")
    monkeypatch.setenv("SOME_TOKEN", "short")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "somehow or other")
    assert redacted("the key 0123456789abcdef is short") == f"the key {HIDDEN} is short"
    assert redacted("AccountKey=abc somehow or other") == f"{HIDDEN} somehow or other"


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
