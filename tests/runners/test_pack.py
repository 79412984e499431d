"""`erniekit pack` and runs that replay what it wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.build.data import training_dataset, training_plan
from erniekit.build.model import open_tokenizer
from erniekit.cli import main
from erniekit.config import Config
from erniekit.errors import ConfigurationError, UserError
from erniekit.runners.pack import pack_data
from erniekit.runners.preview import preview

Make = Callable[..., Config]
ROOT = Path(__file__).parents[2]
WAYS: dict[str, dict[str, Any]] = {
    "packs": {},
    "in order": {"greedy_intokens": False, "curriculum": "length"},
    "one sample a row": {"packing": False},
    "similar lengths": {"batch_tokens": 256, "max_batch_samples": 4},
}


def replayed(folder: Path) -> dict[str, str]:
    return {"train_dataset_path": str(folder), "train_dataset_type": "packed"}


def steps(config: Config) -> list[Any]:
    dataset = training_dataset(config, *open_tokenizer(config))
    plan = training_plan(config, dataset)
    assert plan.epoch_of(plan.steps_in_epoch(0)) == 1
    return [
        (batch, [dataset.location(index) for row in batch.samples for index in row])
        for step in range(plan.steps_in_epoch(0))
        for batch in plan.micro_batches(step)
    ]


def assert_equal_batches(first: list[Any], second: list[Any]) -> None:
    assert len(first) == len(second) > 1
    for (one, places), (other, other_places) in zip(first, second, strict=True):
        assert places == other_places
        for name in ("input_ids", "labels", "position_ids", "startend_row_indices"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert (one.pairs is None) == (other.pairs is None)
        if one.pairs is not None:
            np.testing.assert_array_equal(one.pairs.answers, other.pairs.answers)
            np.testing.assert_array_equal(one.pairs.score_differences, other.pairs.score_differences)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_replayed_epoch_has_the_batches_of_the_one_it_was_made_from(
    make_config: Make, tmp_path: Path, way: dict[str, Any]
) -> None:
    original = make_config(**way)
    pack_data(original, tmp_path / "packed")
    expected = steps(original)
    assert_equal_batches(steps(make_config(**replayed(tmp_path / "packed"))), expected)


@pytest.mark.slow
def test_pairs_are_replayed_too(make_config: Make, tmp_path: Path) -> None:
    pairs = {
        "stage": "DPO", "train_dataset_path": str(ROOT / "examples/data/preference-train.jsonl"), "max_seq_len": 512
    }  # fmt: skip
    original = make_config(**pairs)
    pack_data(original, tmp_path / "packed")
    assert_equal_batches(steps(make_config(**{**pairs, **replayed(tmp_path / "packed")})), steps(original))
    with pytest.raises(UserError, match="contains pairs, which only stage DPO reads"):
        steps(make_config(**replayed(tmp_path / "packed"), max_seq_len=512))


def test_pairs_without_scores_are_refused_where_scores_are_needed(make_config: Make, tmp_path: Path) -> None:
    records = tmp_path / "pairs.jsonl"
    pair = {"prompt": "What is 2 + 3?", "chosen": "5", "rejected": "6"}
    scored = {**pair, "score_chosen": 3, "score_rejected": 1}
    records.write_text("".join(json.dumps(record) + "\n" for record in (scored, pair, scored)))
    config = {
        "stage": "DPO", "train_dataset_path": str(records), "train_dataset_type": "messages", "random_shuffle": False
    }  # fmt: skip
    pack_data(make_config(**config), tmp_path / "packed")
    replay = {"stage": "DPO", **replayed(tmp_path / "packed")}
    steps(make_config(**replay))
    with pytest.raises(UserError, match=r"1 of its 3 pairs.*offset_alpha.*pairs\.jsonl:2"):
        steps(make_config(**replay, offset_alpha=1))


def test_pairs_are_packed_for_the_window_of_the_model(make_config: Make, windowed_model: Path, tmp_path: Path) -> None:
    """Those that share a prompt where the model cannot see all of it are refused; the others serve every model."""
    records = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": "Count." + " Count." * n, "chosen": "1 2 3 4", "rejected": "3"} for n in (1, 12) * 6]
    records.write_text("".join(json.dumps(record) + "\n" for record in pairs))
    config = {"stage": "DPO", "train_dataset_path": str(records), "train_dataset_type": "messages"}
    windowed = {"model_name_or_path": str(windowed_model)}
    original = make_config(**config, **windowed)
    pack_data(original, tmp_path / "packed")
    replay = {"stage": "DPO", **replayed(tmp_path / "packed")}
    assert_equal_batches(steps(make_config(**replay, **windowed)), steps(original))
    steps(make_config(**replay))
    pack_data(make_config(**config), tmp_path / "shared")
    replay = {"stage": "DPO", **replayed(tmp_path / "shared")}
    with pytest.raises(UserError, match=r"shared: holds pairs of more than 40 tokens .*\n  Pack the data again"):
        steps(make_config(**replay, **windowed))


def test_what_packing_has_decided_is_told_to_have_no_effect(make_config: Make) -> None:
    decided = {"packing": False, "over_length_policy": "error", "max_prompt_len": 5}
    replay = {"stage": "DPO", "train_dataset_path": "packed", "train_dataset_type": "packed", **decided}
    messages = "\n".join(make_config(**replay).messages)
    assert all(f"`{name}` (" in messages and "`erniekit pack` has already applied it" in messages for name in decided)
    held_out = {"do_eval": True, "eval_dataset_path": "e.jsonl"}  # which is packed and cut by the run itself
    assert not any("has already applied it" in line for line in make_config(**replay, **held_out).messages)


def test_a_run_on_packed_data_has_the_losses_of_the_plain_run(
    train: Callable[..., Any], make_config: Make, tmp_path: Path, logged: list[str]
) -> None:
    pack_data(make_config(), tmp_path / "packed")
    assert any("train_dataset_type: packed" in line for line in logged)
    plain = train(max_steps=None, num_train_epochs=1)
    run = train(**replayed(tmp_path / "packed"), max_steps=None, num_train_epochs=1)
    assert run.losses == plain.losses
    assert "as they were packed" in run.said
    twice = train(**replayed(tmp_path / "packed"), max_steps=None, num_train_epochs=2)
    assert len(twice.losses) == 2 * len(plain.losses)


def test_the_verb_and_the_preview(make_config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_config().path
    assert main(["pack", str(path), "--output", str(tmp_path / "packed")]) == 0
    assert "rows to" in capsys.readouterr().out
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".packed")]
    assert main(["pack", str(path), "--output", str(tmp_path / "packed")]) == 2
    assert "already exists" in capsys.readouterr().err
    shown = preview(make_config(**replayed(tmp_path / "packed")))
    assert "train.jsonl:" in shown and "[[" in shown
    with pytest.raises(ConfigurationError, match="packed already"):
        pack_data(make_config(**replayed(tmp_path / "packed")), tmp_path / "again")


def test_recordings_as_codes_are_not_packed(
    make_config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_config(stage="TTS", train_dataset_type="codes").path
    assert main(["pack", str(path), "--output", str(tmp_path / "packed")]) == 2
    assert "stage TTS: its samples differ from epoch to epoch" in capsys.readouterr().err
    assert not (tmp_path / "packed").exists()


def test_what_does_not_fit_the_folder_is_refused(make_config: Make, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    pack_data(make_config(), folder)
    with pytest.raises(UserError, match=r"rows of \d+ tokens, more than max_seq_len 64"):
        steps(make_config(**replayed(folder), max_seq_len=64))
    with pytest.raises(ConfigurationError, match="random_shuffle"):
        make_config(**replayed(folder), random_shuffle=True)
    assert make_config(**replayed(folder)).training.random_shuffle is False
    with pytest.raises(ConfigurationError, match="that folder alone"):
        make_config(train_dataset_path=[str(folder), str(folder)], train_dataset_type="packed")
    assert "has no effect" in make_config(**replayed(folder), curriculum="length").messages[-1]
    with pytest.raises(UserError, match="not a folder that `erniekit pack` wrote"):
        steps(make_config(**replayed(tmp_path)))

    other = tmp_path / "model"
    shutil.copytree(tiny_model, other)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    (other / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match="another chat template"):
        steps(make_config(**replayed(folder), model_name_or_path=str(other)))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="another tokenizer"):
        steps(make_config(**replayed(folder), model_name_or_path=str(other)))


@pytest.mark.parametrize("name", ["input_ids.bin", "labels.bin", "rows.bin", "files.bin", "offsets.bin"])
@pytest.mark.parametrize("harm", ["flipped", "shorter", "gone"])
def test_damaged_files_are_refused(make_config: Make, tmp_path: Path, name: str, harm: str) -> None:
    folder = tmp_path / "packed"
    pack_data(make_config(), folder)
    data = bytearray((folder / name).read_bytes())
    data[0] ^= 1
    if harm == "gone":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(data if harm == "flipped" else data[:-4])
    with pytest.raises(UserError, match=r"damaged|cannot be read"):
        steps(make_config(**replayed(folder)))


@pytest.mark.parametrize(("stage", "data"), [("KTO", "verdict-train"), ("RM", "preference-train")])
def test_answers_with_verdicts_and_answers_to_be_scored_are_replayed_by_their_stage_alone(
    make_config: Make, tmp_path: Path, stage: str, data: str
) -> None:
    records = tmp_path / "records.jsonl"
    lines = (ROOT / f"examples/data/{data}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    records.write_text("".join(lines[:40]), encoding="utf-8")
    values = {"stage": stage, "train_dataset_path": str(records)}
    original = make_config(**values)
    pack_data(original, tmp_path / "packed")
    assert_equal_batches(steps(make_config(**{**values, **replayed(tmp_path / "packed")})), steps(original))
    with pytest.raises(UserError, match=f"which only stage {stage} reads"):
        steps(make_config(**replayed(tmp_path / "packed"), stage="DPO"))
