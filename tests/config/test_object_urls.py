"""URLs of object stores in configurations: what is one, what is refused, and that no secret is shown."""

from __future__ import annotations

import pytest

from erniekit.config import Config
from erniekit.config.object_urls import STORES, is_url, joined, store_of, url_problem
from erniekit.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/run", True),
        ("GS://bucket", True),
        ("file:///mnt/run", True),
        ("https://example.com/a.jsonl", True),
        ("output/run", False),
        ("/data/s3://odd", False),
        ("org/name:split", False),
        (True, False),
        (None, False),
    ],
)
def test_what_is_a_url(text: object, expected: bool) -> None:
    assert is_url(text) is expected


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/run",
        "gs://b",
        "abfs://container@account.dfs.core.windows.net/run",
        "file:///mnt/a b/run",
        "oss://b/r/",
    ],
)
def test_urls_that_can_be_used(url: str) -> None:
    assert url_problem(url) == ""
    assert store_of(url) in STORES.values()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https://example.com/a.jsonl", "a scheme that is not read here; known are s3://"),
        ("s3://key:secret@bucket/run", "contains a password"),
        ("s3://bucket/a?X-Amz-Signature=abc", "contains ? or #"),
        ("s3://bucket/a::b", "contains ::"),
        ("s3://bucket/../other", "names no object"),
        ("s3://bucket//run", "names no object"),
        ("s3://", "names no object"),
        ("file://host/run", "names a host"),
        ("s3://bucket/\nrun", "cannot be printed"),
    ],
)
def test_urls_that_cannot_be_used(url: str, problem: str) -> None:
    assert problem in url_problem(url)


def test_joined() -> None:
    assert joined("s3://b/run/", "x") == "s3://b/run/x" and joined("s3://b/run/", "") == "s3://b/run"


def load(**values: object) -> Config:
    words = {"model_name_or_path": "m", "train_dataset_path": "d.jsonl", "output_dir": "o", **values}
    return Config.load(None, [f"{name}={value}" for name, value in words.items()])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"output_dir": "ftp://b/run"}, "`output_dir`: ftp://b/run is a URL of a scheme that is not read here"),
        ({"output_dir": "s3://me:pw@b/run"}, r"`output_dir`: s3://\*\*\*@b/run contains a password"),
        ({"data_cache_dir": "s3://b/cache"}, "`data_cache_dir`: s3://b/cache is a URL, and this has to be a path"),
        ({"output_dir": "s3://b/run", "logging_dir": "s3://b/l"}, "`logging_dir`: s3://b/l is not inside output_dir"),
        ({"train_dataset_path": "a.jsonl, gs://b//c"}, "`train_dataset_path`: gs://b//c names no object"),
    ],
)
def test_configurations_that_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        load(**values)
    assert "pw@" not in str(refused.value)


def test_codes_go_to_a_folder_of_this_machine() -> None:
    words = ["train_dataset_path=d.jsonl", "output_dir=s3://b/codes"]
    with pytest.raises(ConfigurationError, match="`erniekit codes` writes into a folder of this machine"):
        Config.load(None, words, verb="codes")


def test_a_configuration_keeps_its_urls_beside_paths() -> None:
    config = load(output_dir="s3://b/run", train_dataset_path="s3://b/a.jsonl, c.jsonl")
    assert config.basic.logging_dir == "s3://b/run/logs"
    local = config.with_paths({"output_dir": "/cache/run", "train_dataset_path": ("/cache/a.jsonl", "c.jsonl")})
    assert str(local.output_dir) == "/cache/run" and local.training.train_dataset_path == ("/cache/a.jsonl", "c.jsonl")
    assert local.urls == {"output_dir": "s3://b/run", "train_dataset_path": ("s3://b/a.jsonl", "c.jsonl")}
    assert local.resolved() == config.resolved()
    again = local.with_paths({"output_dir": "/elsewhere"})
    assert again.urls["output_dir"] == "s3://b/run"
    assert Config.from_mapping(local.resolved()).resolved() == config.resolved()
