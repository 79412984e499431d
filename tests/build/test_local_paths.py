"""Paths of this machine in place of URLs: for a run, and for `validate`, which asks no store."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.build.local_paths import staging_folder, with_local_paths
from erniekit.config import Config
from erniekit.hub.object_store import ObjectFolder, StoreError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load(verb: str = "train", **values: object) -> Config:
    words = {"model_name_or_path": "m", "train_dataset_path": "d.jsonl", "output_dir": "o", **values}
    return Config.load(None, [f"{name}={value}" for name, value in words.items()], verb=verb)


def test_a_configuration_without_urls_stays_as_it_is() -> None:
    config = load()
    assert with_local_paths(config) is config


@pytest.mark.proves("train_dataset_path", "eval_dataset_path", "media_dir", "init_from_checkpoint")
def test_what_a_run_reads_is_downloaded(store: ObjectFolder, own_cache: Path) -> None:
    for name in ("train.jsonl", "eval.jsonl", "clips/a.wav", "start/config.json", "start/model.safetensors"):
        store.write(name, name.encode())
    config = load(
        train_dataset_path=f"{store.url}/train.jsonl, here.jsonl",
        eval_dataset_path=f"{store.url}/eval.jsonl",
        do_eval=True,
        media_dir=f"{store.url}/clips",
        init_from_checkpoint=f"{store.url}/start",
    )
    local = with_local_paths(config)
    train, here = local.training.train_dataset_path
    assert Path(train).read_text() == "train.jsonl" and here == "here.jsonl"
    assert Path(local.evaluation.eval_dataset_path[0]).read_text() == "eval.jsonl"
    assert (Path(local.training.media_dir[0]) / "a.wav").is_file()
    assert (Path(local.checkpoint.init_from_checkpoint) / "model.safetensors").is_file()
    assert local.resolved() == config.resolved(), "checkpoints and the model card keep the URLs"
    assert with_local_paths(load(**{k: v for k, v in local.urls.items() if k == "media_dir"}), fetches=False)


def test_what_a_run_does_not_read_is_not_downloaded(store: ObjectFolder) -> None:
    local = with_local_paths(load(eval_dataset_path=f"{store.url}/none.jsonl", lora_path=f"{store.url}/none"))
    assert local.evaluation.eval_dataset_path == (f"{store.url}/none.jsonl",) and local.lora.lora_path == ""


@pytest.mark.proves("output_dir", "logging_dir")
def test_a_run_works_in_a_folder_of_the_cache(own_cache: Path) -> None:
    local = with_local_paths(load(output_dir="s3://bucket/runs/sft/"), fetches=False)
    assert local.output_dir == staging_folder("s3://bucket/runs/sft", own_cache)
    assert local.output_dir.name == "sft" and own_cache in local.output_dir.parents
    assert Path(local.basic.logging_dir) == local.output_dir / "logs"
    assert local.urls["logging_dir"] == "s3://bucket/runs/sft/logs"
    inside = load(output_dir="s3://bucket/runs/sft", logging_dir="s3://bucket/runs/sft/events/of/it")
    assert Path(with_local_paths(inside, fetches=False).basic.logging_dir) == local.output_dir / "events/of/it"
    other = with_local_paths(load(output_dir="s3://bucket/runs/sft", logging_dir="/logs"), fetches=False)
    assert other.basic.logging_dir == "/logs" and other.output_dir == local.output_dir


@pytest.mark.proves("resume_from_checkpoint")
def test_a_checkpoint_by_its_url(store: ObjectFolder, own_cache: Path) -> None:
    url = f"{store.url}/checkpoint-4"
    own = with_local_paths(load(output_dir=store.url, resume_from_checkpoint=url))
    assert own.checkpoint.resume_from_checkpoint == str(own.output_dir / "checkpoint-4")
    store.write("checkpoint-4/w", b"x")
    foreign = with_local_paths(load(resume_from_checkpoint=url))
    folder = Path(str(foreign.checkpoint.resume_from_checkpoint))
    assert folder.name == "checkpoint-4" and (folder / "w").is_file()


def test_validate_asks_no_store(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("erniekit.hub.fetched.open_folder", None)
    url = "memory://nowhere/x"
    config = load(
        output_dir=url, train_dataset_path=f"{url}.jsonl", init_from_checkpoint=f"{url}/c", logging_dir=f"{url}/logs"
    )
    local = with_local_paths(config, fetches=False)
    assert local.training.train_dataset_path == (f"{url}.jsonl",) and local.checkpoint.init_from_checkpoint == ""
    resumed = with_local_paths(load(resume_from_checkpoint=f"{url}/checkpoint-1", output_dir=url), fetches=False)
    assert resumed.checkpoint.resume_from_checkpoint is True


def test_data_that_is_not_there_is_an_error(store: ObjectFolder) -> None:
    with pytest.raises(StoreError, match="there is no such file or folder"):
        with_local_paths(load(train_dataset_path=f"{store.url}/none.jsonl"))
