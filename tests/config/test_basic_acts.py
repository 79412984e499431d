"""Proofs of section 1.1: the model, the job, where results go, what is shown."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.config import Config
from erniekit.errors import UserError
from tests.config.observing import recorded, tensors
from tests.config.samples import load, problems

Train = Callable[..., Any]
MakeConfig = Callable[..., Config]


@pytest.mark.proves("stage")
def test_each_stage_reads_its_data_and_has_its_loss(train: Train, pairs: Path, tiny_base: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"The answer is {number}."}) + "\n" for number in range(40)))
    of_text = {"train_dataset_path": str(text), "train_dataset_type": "text"}
    assert "targets (34%)" in train(stage="SFT").said  # the assistant's turns
    assert "targets (100%)" in train(stage="PT", **of_text).said
    base = {"model_name_or_path": str(tiny_base), "continue_training": True}
    preferred = train(stage="DPO", train_dataset_path=str(pairs), **base)
    assert preferred.losses[0] == pytest.approx(np.log(2), rel=1e-5)  # of a model that is its own reference
    assert "train_dataset_type" in problems(stage="SFT", train_dataset_type="text")
    assert [load(stage=stage)["learning_rate"] for stage in ("PT", "SFT", "DPO")] == [3e-5, 3e-5, 1e-6]


@pytest.mark.proves("model_name_or_path")
def test_model_and_tokenizer_come_from_the_folder(train: Train, tiny_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "config.json").read_text()) | {"num_hidden_layers": 1}
    (other / "config.json").write_text(json.dumps(config))
    layers = {}
    for folder in (tiny_model, other):
        output = train(model_name_or_path=str(folder)).output
        layers[folder] = {name.split(".")[2] for name in tensors(output) if ".layers." in name}
        assert (output / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert layers == {tiny_model: {"0", "1"}, other: {"0"}}
    with pytest.raises(UserError, match="no-such-model"):
        train(model_name_or_path=str(tmp_path / "no-such-model"))


@pytest.mark.proves("output_dir")
def test_everything_is_left_in_the_output_folder(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "somewhere" / "else"
    train(output_dir=str(folder), save_strategy="steps", save_steps=4)
    names = {path.name for path in folder.iterdir()}
    expected = {"model.safetensors", "config.json", "tokenizer.json", "train_results.json", "training_config.yaml"}
    assert expected | {"loss.png", "training_log.jsonl", "manifest.json", "checkpoint-4"} <= names
    assert {path.name for path in tmp_path.iterdir()} == {"somewhere", "cache", "config.yaml"}


@pytest.mark.proves("overwrite_output_dir")
def test_overwriting_must_be_asked_for(train: Train, make_config: MakeConfig) -> None:
    from erniekit.runners.train import run_training

    train(save_strategy="steps", save_steps=2)
    with pytest.raises(UserError, match="overwrite_output_dir"):
        run_training(make_config())
    run_training(make_config(overwrite_output_dir=True))


@pytest.mark.proves("continue_training")
def test_weights_are_read_or_drawn(train: Train, tiny_model: Path, tiny_base: Path) -> None:
    still = {"model_name_or_path": str(tiny_base), "learning_rate": 0.0, "max_steps": 1}
    np.testing.assert_equal(tensors(train(**still, continue_training=True).output), tensors(tiny_base))
    drawn = train(**still, continue_training=False)
    assert "weights: random, seed 42" in drawn.said
    assert not np.array_equal(
        *(tensors(folder)["model.layers.0.mlp.up_proj.weight"] for folder in (drawn.output, tiny_base))
    )
    with pytest.raises(UserError, match="continue_training: false"):
        train(model_name_or_path=str(tiny_model), continue_training=True)  # the folder holds no weights


@pytest.mark.proves("do_train")
def test_do_train_false_only_evaluates(make_config: MakeConfig, records: Path, tiny_base: Path) -> None:
    from erniekit.cli import main

    config = make_config(
        do_train=False, do_eval=True, eval_dataset_path=str(records), eval_answers=0,
        model_name_or_path=str(tiny_base), continue_training=True,
    )  # fmt: skip
    assert main(["train", str(config.path)]) == 0
    output = Path(config.basic.output_dir)
    assert json.loads((output / "eval_results.json").read_text())["eval_loss"] > 0
    assert not (output / "model.safetensors").exists()
    assert "nothing to do" in problems(do_train=False)


@pytest.mark.proves("hidden_dropout_prob", "attention_probs_dropout_prob")
@pytest.mark.parametrize(
    ("name", "flashmask"),
    [("hidden_dropout_prob", True), ("attention_probs_dropout_prob", True), ("attention_probs_dropout_prob", False)],
)
def test_dropout_changes_training_and_no_evaluation(name: str, flashmask: bool, train: Train, records: Path) -> None:
    still = {
        "use_flash_attention": flashmask,
        "learning_rate": 0.0,
        "max_steps": 1,
        "do_eval": True,
        "eval_dataset_path": str(records),
        "eval_steps": 1,
    }
    plain, dropped, more = train(**still), train(**still, **{name: 0.3}), train(**still, **{name: 0.6})
    assert len({run.losses[0] for run in (plain, dropped, more)}) == 3
    assert dropped.log[-1]["eval_loss"] == plain.log[-1]["eval_loss"]


@pytest.mark.proves("dropout_warmup_steps")
def test_dropout_grows_to_its_probability(train: Train) -> None:
    """p x min(1, step / W): nothing is dropped in the first step, and all of p after W."""
    still = {"learning_rate": 0.0, "hidden_dropout_prob": 0.5}
    plain, immediate = train(learning_rate=0.0).losses, train(**still).losses
    growing = train(**still, dropout_warmup_steps=2).losses
    assert growing[0] == plain[0] != immediate[0]
    assert growing[1] not in (plain[1], immediate[1])
    assert growing[2:] == immediate[2:]


@pytest.mark.proves("weight_quantize_algo")
def test_weights_in_few_bits_and_products_in_fp8(train: Train, train_adapters: Train) -> None:
    plain = train_adapters()
    losses = {"none": plain.losses[0]}
    for algorithm in ("weight_only_int8", "weight_only_int4", "nf4"):
        run = train_adapters(weight_quantize_algo=algorithm)
        losses[algorithm] = run.losses[0]
        assert algorithm.removeprefix("weight_only_") in run.said
    assert len(set(losses.values())) == 4
    assert abs(losses["weight_only_int8"] - losses["none"]) < abs(losses["weight_only_int4"] - losses["none"])
    fp8 = train(weight_quantize_algo="fp8_linear", hadamard_block_size=16)
    assert fp8.losses[0] != train().losses[0] and "fp8" in fp8.said.lower()
    assert "which cannot be trained" in problems(weight_quantize_algo="nf4")


@pytest.mark.proves("num_nextn_predict_layers")
def test_prediction_layers_are_trained_and_saved_as_asked(train: Train, moe_model: Path) -> None:
    for wanted in (0, 1):
        run = train(model_name_or_path=str(moe_model), num_nextn_predict_layers=wanted)
        assert ("mtp_loss" in run.log[0]) == bool(wanted)
        assert any("mtp" in name for name in tensors(run.output)) == bool(wanted)
        assert json.loads((run.output / "config.json").read_text())["num_nextn_predict_layers"] == wanted


@pytest.mark.proves("ignore_config_keys")
def test_keys_of_the_model_that_are_not_understood_are_left_out_where_asked(
    train: Train, tiny_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "config.json").read_text()) | {"attention_tilt": 0.5}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"attention_tilt: 0\.5 is not understood"):
        train(model_name_or_path=str(other))
    run = train(model_name_or_path=str(other), ignore_config_keys="attention_tilt")
    assert run.said.count("attention_tilt: 0.5 is ignored, as ignore_config_keys asks") == 1
    assert "attention_tilt" not in json.loads((run.output / "config.json").read_text())


@pytest.mark.proves("device")
def test_the_device_is_the_one_asked_for(train: Train) -> None:
    import paddle

    train(device="cpu")
    assert paddle.get_device() == "cpu"
    with pytest.raises(UserError, match="device: gpu:99"):
        train(device="gpu:99")


@pytest.mark.proves("logging_steps", "logging_strategy")
def test_figures_are_reported_when_asked(train: Train) -> None:
    def steps(**values: Any) -> list[int]:
        return [entry["step"] for entry in train(**values).log]

    assert steps() == [1, 2, 3, 4]
    assert steps(logging_steps=3) == [3, 4]
    assert steps(logging_strategy="no") == []
    assert steps(logging_strategy="epoch", max_steps=None, num_train_epochs=2) == [8, 16]


@pytest.mark.proves("logging_dir", "report_to")
def test_event_files(train: Train, tmp_path: Path) -> None:
    logs = tmp_path / "events"
    train(report_to=["visualdl", "tensorboard"], logging_dir=str(logs))
    names = os.listdir(logs)
    assert any(name.startswith("vdlrecords") for name in names)
    assert any(name.startswith("events.out.tfevents") for name in names)
    (only,) = os.listdir(train(report_to="visualdl").output / "logs")
    assert only.startswith("vdlrecords")
    assert not (train(report_to="none").output / "logs").exists()


@pytest.mark.proves("disable_tqdm")
def test_a_terminal_shows_live_progress_unless_lines_are_asked_for(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    shown = recorded("erniekit.training.callbacks.live_progress.LiveProgress.on_step", "self", monkeypatch)
    train(disable_tqdm=True)
    assert not shown
    train(disable_tqdm=False)
    assert len(shown) == 4
