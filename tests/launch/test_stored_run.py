"""A command whose configuration names URLs: which process uploads, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.config import Config
from erniekit.errors import CheckpointError, TrainingError
from erniekit.hub.fetched import FETCHED
from erniekit.hub.object_store import ObjectFolder, StoreError
from erniekit.launch.stored_run import stored_run
from erniekit.training.checkpoint.manifest import atomic_write_text
from erniekit.training.checkpoint.resume import CONFIG_FILE
from erniekit.training.checkpoint.stored_start import open_stored_run
from erniekit.training.checkpoint.uploads import Uploads
from tests.object_stores import sealed

MakeConfig = Callable[..., Config]


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_LOCAL_SIZE", FETCHED):
        monkeypatch.delenv(name, raising=False)


def save(config: Config, step: int) -> None:
    config.output_dir.mkdir(parents=True, exist_ok=True)
    atomic_write_text(config.output_dir / CONFIG_FILE, "stage: SFT")
    sealed(config.output_dir / f"checkpoint-{step}", {"w": str(step)})


def test_a_run_without_urls_is_left_alone(make_config: MakeConfig) -> None:
    config = make_config()
    with stored_run(config) as local:
        assert local is config


def test_what_a_run_leaves_is_there_at_its_end(store: ObjectFolder, make_config: MakeConfig, logged: list[str]) -> None:
    with stored_run(make_config(output_dir=store.url)) as local:
        save(local, 2)
    assert "checkpoint-2/manifest.json" in store.list() and CONFIG_FILE in store.list()
    assert logged[0] == f"output: {store.url}; this run works in {local.output_dir}, and uploads from there"
    assert logged[-1] == f"everything is in {store.url}"


def test_another_run_is_kept_unless_it_may_be_overwritten(store: ObjectFolder, make_config: MakeConfig) -> None:
    with stored_run(make_config(output_dir=store.url)) as local:
        save(local, 2)
    with pytest.raises(CheckpointError, match="overwrite_output_dir"), stored_run(make_config(output_dir=store.url)):
        pass
    with stored_run(make_config(output_dir=store.url, overwrite_output_dir=True)) as local:
        save(local, 3)
    assert "checkpoint-3/manifest.json" in store.list()


def test_what_is_complete_is_uploaded_after_an_error_too(store: ObjectFolder, make_config: MakeConfig) -> None:
    with pytest.raises(TrainingError, match="loss"), stored_run(make_config(output_dir=store.url)) as local:
        save(local, 2)
        raise TrainingError("the loss is not finite")
    assert "checkpoint-2/manifest.json" in store.list()


def test_a_process_that_is_ended_does_not_wait(
    store: ObjectFolder, make_config: MakeConfig, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Uploads, "begin", lambda self: None)
    with pytest.raises(KeyboardInterrupt), stored_run(make_config(output_dir=store.url)) as local:
        save(local, 2)
        raise KeyboardInterrupt
    assert any("not uploaded: checkpoint-2" in line for line in logged)
    assert not any(name.startswith("checkpoint") for name in store.list())


def test_an_upload_that_fails_fails_the_command(
    store: ObjectFolder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Uploads, *, last: bool = False) -> None:
        raise StoreError("could not upload: no route")

    monkeypatch.setattr(Uploads, "upload", fail)
    message = r"no route\n.*not uploaded: checkpoint-2"
    with pytest.raises(StoreError, match=message), stored_run(make_config(output_dir=store.url)) as local:
        save(local, 2)


@pytest.mark.parametrize(
    ("variables", "uploads"),
    [
        ({}, True),
        ({"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "2", "PADDLE_LOCAL_SIZE": "2", FETCHED: "1"}, False),
        ({"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "2", "PADDLE_LOCAL_SIZE": "2"}, True),
        ({"PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2", "PADDLE_LOCAL_SIZE": "2"}, False),
    ],
    ids=["a process", "a rank of our launcher", "the first rank of another", "the second one"],
)
def test_one_process_uploads(
    store: ObjectFolder,
    make_config: MakeConfig,
    variables: dict[str, str],
    uploads: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("erniekit.launch.stored_run.adopt_rank", lambda environ, gpu: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with stored_run(make_config(output_dir=store.url)) as local:
        save(local, 2)
    assert ("checkpoint-2/manifest.json" in store.list()) == uploads
    assert local.output_dir.parent.parent.name == "runs"


def test_two_runs_of_a_machine_do_not_write_to_one_place(store: ObjectFolder, make_config: MakeConfig) -> None:
    config = make_config(output_dir=store.url)
    message = "another run of this machine is writing to memory://"
    with stored_run(config), pytest.raises(CheckpointError, match=message), stored_run(config):
        pass


def test_a_cache_that_cannot_be_written(store: ObjectFolder, make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = make_config(output_dir=store.url, data_cache_dir=str(tmp_path / "file"))
    with (
        pytest.raises(CheckpointError, match=r"where a run works for memory://.*cannot be written"),
        stored_run(config),
    ):
        pass


def test_an_evaluation_replaces_no_run(store: ObjectFolder, make_config: MakeConfig, records: Path) -> None:
    with stored_run(make_config(output_dir=store.url)) as local:
        save(local, 2)
    held_out = {"do_train": False, "do_eval": True, "eval_dataset_path": str(records)}
    with stored_run(make_config(output_dir=store.url, **held_out)):
        pass
    assert "checkpoint-2/manifest.json" in store.list()


@pytest.mark.parametrize("best", [False, True])
def test_the_best_checkpoint_is_fetched_where_the_end_needs_it(
    best: bool, store: ObjectFolder, make_config: MakeConfig, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    opened = open_stored_run

    def open_and_tell(*parts: Any, with_best: bool, **named: Any) -> Any:
        told.append(with_best)
        return opened(*parts, with_best=with_best, **named)

    monkeypatch.setattr("erniekit.launch.stored_run.open_stored_run", open_and_tell)
    evaluated = {"do_eval": True, "eval_dataset_path": str(records), "evaluation_strategy": "steps", "eval_steps": 2}
    saved = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": best}
    with stored_run(make_config(output_dir=store.url, **evaluated, **saved)):
        pass
    assert told == [best]


@pytest.mark.parametrize(("values", "gpu"), [({"device": "cpu"}, False), ({}, True)], ids=str)
def test_ranks_of_another_launcher_take_a_gpu_unless_they_compute_on_a_cpu(
    values: dict[str, str], gpu: bool, store: ObjectFolder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    monkeypatch.setattr("erniekit.launch.stored_run.adopt_rank", lambda environ, gpu: told.append(gpu))
    with stored_run(make_config(output_dir=store.url, **values)):
        pass
    assert told == [gpu]
