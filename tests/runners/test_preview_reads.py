"""Which data `preview` and `validate --data` read, and how much of it they count."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.config import Config
from erniekit.data.formats.problems import Effect, ProblemList, RecordProblem
from erniekit.errors import DataError
from erniekit.runners import preview


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is read from now on."""
    seen: list[str] = []

    def reading(what: str) -> Callable[..., Any]:
        dataset = SimpleNamespace(report=SimpleNamespace(sources=()), longest=SimpleNamespace(max=lambda: 9))
        return lambda *parts: seen.append(what) or dataset

    plan = SimpleNamespace(
        micro_batches=lambda step: [],
        describe=lambda steps, epochs: f"{steps} steps, {epochs} epochs",
        steps_in_epoch=lambda epoch: 5,
    )
    monkeypatch.setattr(preview, "open_tokenizer", lambda config: (None, None))
    monkeypatch.setattr(preview, "training_dataset", reading("training"))
    monkeypatch.setattr(preview, "evaluation_dataset", reading("evaluation"))
    for name in ("training_plan", "evaluation_plan"):
        monkeypatch.setattr(preview, name, lambda *parts: plan)
    for name in ("count_steps", "preflight"):
        monkeypatch.setattr(preview, name, lambda *parts: 100)
    return seen


HELD_OUT = {"do_eval": True, "eval_dataset_path": "e.jsonl"}


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({}, ["training"]),
        ({"do_eval": False, "eval_dataset_path": "e.jsonl"}, ["training"]),
        (HELD_OUT, ["training", "evaluation"]),
        (HELD_OUT | {"do_train": False}, ["evaluation"]),
    ],
    ids=str,
)
def test_what_is_read(values: dict[str, Any], kinds: list[str], make_config: Callable[..., Config], read: Any) -> None:
    preview.data_summary(make_config(**values))
    assert read == kinds


def test_the_longest_sample_is_one_of_training(make_config: Callable[..., Config], read: list[str]) -> None:
    assert preview.longest_sample(make_config()) == 9
    assert preview.longest_sample(make_config(**HELD_OUT, do_train=False)) is None


def test_the_length_of_the_run_is_told(make_config: Callable[..., Config], read: list[str]) -> None:
    for values, told in (({}, "4 steps, 1 epochs"), ({"max_steps": None, "num_train_epochs": 3}, "-1 steps, 3 epochs")):
        assert told in preview.data_summary(make_config(**values))
        assert preview.preview(make_config(**values)) == told
        assert preview.preview_data(make_config(**values))["plan"] == told


def test_the_dense_mask_is_told_with_the_length(
    make_config: Callable[..., Config], read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(preview, "dense_mask_size", lambda config, *datasets: 7)
    monkeypatch.setattr(preview, "check_dense_mask", lambda size, length: told.extend([size, length]))
    for values in ({}, {"use_flash_attention": False, "max_seq_len": 64}):
        preview.data_summary(make_config(**values))
    assert told == [7, 64]


def test_recordings_are_heard_where_a_model_listens(
    make_config: Callable[..., Config], read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    damaged = ProblemList()

    def hear(sources: Any, audio: Any, max_seq_len: int) -> Any:
        heard.append((len(sources), max_seq_len))
        return SimpleNamespace(lines=lambda: ["a.jsonl:3: silence"], damaged=damaged)

    monkeypatch.setattr(preview, "check_recordings", hear)
    assert "silence" not in preview.data_summary(make_config()) and not heard
    monkeypatch.setattr(preview, "audio_of_model", lambda config: "an encoder")
    assert preview.data_summary(make_config(eval_split=0.1, do_eval=True)).endswith("\na.jsonl:3: silence")
    assert heard == [(2, make_config().training.max_seq_len)]  # both parts of the file

    def unreadable(*parts: Any) -> Any:
        raise DataError("a.jsonl:4: no sound file")

    monkeypatch.setattr(preview, "training_dataset", unreadable)
    with pytest.raises(DataError, match=r"4: no sound file\na\.jsonl:3: silence"):
        preview.data_summary(make_config())
    damaged.add(RecordProblem("a.jsonl", 9, "b.flac", "a whole recording", "half of one", Effect.STOP))
    with pytest.raises(DataError, match=r"(?s)4: no sound file\na\.jsonl:9: b\.flac: .*\na\.jsonl:3: silence"):
        preview.data_summary(make_config())
