"""Preference training from a configuration to a model: references, resuming, adapters, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.cli import main
from erniekit.errors import ConfigurationError, DataError, ModelFileError
from erniekit.model.storage.safetensors import SafetensorsFile

ROOT = Path(__file__).parents[2]
Train = Callable[..., Any]


def weights(folder: Path) -> dict[str, np.ndarray]:
    (path,) = [*folder.glob("model*.safetensors"), *folder.glob("adapter_model.safetensors")]
    file = SafetensorsFile(path)
    return {name: np.array(file.read(name)) for name in file.names()}


def log(run: Any) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (run.output / "training_log.jsonl").read_text().splitlines()]
    for entry in entries:
        for name in [name for name in entry if "second" in name or name == "time"]:
            del entry[name]
    return entries


def test_a_run_shows_its_figures_and_leaves_a_model(prefer: Train, pairs: Path) -> None:
    run = prefer(do_eval=True, eval_dataset_path=str(pairs), eval_steps=3, max_evaluate_steps=-1)
    entries = log(run)
    steps = [entry for entry in entries if "loss" in entry]
    assert steps[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)  # at first the model is its reference
    names = {"preference_loss", "reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "logps_chosen",
             "logps_rejected", "kl_to_reference"}  # fmt: skip
    assert names <= steps[0].keys() and "sft_loss" not in steps[0]
    held_out = [entry for entry in entries if "eval_loss" in entry]
    assert {f"eval_{name}" for name in names} <= held_out[0].keys()
    assert held_out[-1]["eval_reward_margin"] > held_out[0]["eval_reward_margin"] > 0
    assert "eval_perplexity" not in held_out[0]
    assert (run.output / "model.safetensors").is_file()
    assert re.search(r"reference: training: \d+ pairs computed", run.said)
    assert re.search(r"reference: evaluation: \d+ pairs computed", run.said)


def test_the_reference_is_the_same_in_every_way(prefer: Train, pairs: Path) -> None:
    evaluated = {"do_eval": True, "eval_dataset_path": str(pairs), "eval_steps": 2, "max_evaluate_steps": 2}
    run = prefer(reference_model="copy", **evaluated)
    copied = log(run)
    assert "reference: a frozen copy" in run.said
    for way in ({"reference_model": "precomputed"}, {}):
        run = prefer(**way, **evaluated)
        assert "reference: training:" in run.said and "reference: evaluation:" in run.said
        for one, other in zip(log(run), copied, strict=True):
            assert one == pytest.approx(other, rel=2e-4, abs=2e-5)


def test_beside_adapters_the_reference_is_the_base(prefer: Train) -> None:
    lora = {"lora": True, "lora_rank": 4}
    aside = prefer(**lora)
    assert "reference: the same model with its adapters disabled" in aside.said
    assert (aside.output / "adapter_model.safetensors").is_file()
    measured = prefer(**lora, reference_model="precomputed")
    np.testing.assert_allclose(measured.losses, aside.losses, rtol=1e-4, atol=1e-6)
    assert aside.losses[0] == pytest.approx(np.log(2), rel=1e-5)
    assert min(abs(loss - np.log(2)) for loss in aside.losses[1:]) > 1e-4
    moved = prefer(**lora, lora_init="pissa", dora=True)  # the base's weights are moved into the adapters
    assert "the adapters that the run started from" in moved.said
    assert moved.losses[0] == pytest.approx(np.log(2), rel=1e-4)


def test_continued_adapters_are_compared_with_themselves(prefer: Train, tmp_path: Path) -> None:
    first = prefer(lora=True, lora_rank=4)
    shutil.copytree(first.output, tmp_path / "adapters")
    run = prefer(lora=True, lora_path=str(tmp_path / "adapters"))
    assert "the adapters that the run started from" in run.said
    assert run.losses[0] == pytest.approx(np.log(2), rel=1e-5)


FP8 = {"weight_quantize_algo": "fp8_linear", "hadamard_block_size": 16, "apply_online_actscale_step": 2}
RESUMED = {
    "precomputed": {},
    "copy": {"reference_model": "copy"},
    "updated copy": {"ref_model_update_steps": 2},
    "adapters": {"lora": True, "lora_rank": 4},
    "updated adapters": {"lora": True, "lora_rank": 4, "ref_model_update_steps": 2},
    "PiSSA": {"lora": True, "lora_rank": 4, "lora_init": "pissa"},
    "kto_pair": {"loss_type": "kto_pair", "hidden_dropout_prob": 0.1},
    "FP8 updated copy": {**FP8, "ref_model_update_steps": 2},
    "FP8 adapters": {**FP8, "lora": True, "lora_rank": 4},
    "nf4": {"weight_quantize_algo": "nf4", "lora": True, "lora_rank": 4},
}


@pytest.mark.parametrize("values", RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one(prefer: Train, values: dict[str, Any], tmp_path: Path) -> None:
    whole = prefer(**values, max_steps=6, lr_scheduler_type="constant")
    expected, model = whole.losses, weights(whole.output)
    prefer(**values, max_steps=3, lr_scheduler_type="constant", save_strategy="steps", save_steps=3)
    shutil.rmtree(tmp_path / "cache" / "reference", ignore_errors=True)  # a checkpoint needs no cache to go on
    rest = prefer(
        **values, max_steps=6, lr_scheduler_type="constant", save_strategy="steps", save_steps=3,
        resume_from_checkpoint=True,
    )  # fmt: skip
    assert rest.losses[-3:] == expected[-3:]
    for name, values_of in weights(rest.output).items():
        np.testing.assert_array_equal(values_of, model[name], err_msg=name)


def test_updates_of_the_reference_happen_when_due(prefer: Train) -> None:
    run = prefer(ref_model_update_steps=3, max_steps=5)
    losses = run.losses
    assert losses[0] == pytest.approx(np.log(2), rel=1e-5)
    assert losses[1] != pytest.approx(np.log(2), rel=1e-4)
    assert losses[3] == pytest.approx(np.log(2), rel=1e-5)  # after step 3 the model was its reference again


def test_another_model_can_be_the_reference(prefer: Train, tmp_path: Path) -> None:
    other = prefer(max_steps=2)
    shutil.copytree(other.output, tmp_path / "other")
    named = {"ref_model_name_or_path": str(tmp_path / "other")}
    runs = [prefer(**named), prefer(**named, reference_model="copy"), prefer(**named, lora=True, lora_rank=4)]
    np.testing.assert_allclose(runs[0].losses, runs[1].losses, rtol=1e-4, atol=1e-5)
    for run in runs:
        assert abs(run.losses[0] - np.log(2)) > 1e-3
    shutil.copytree(runs[2].output, tmp_path / "adapters")
    with pytest.raises(ModelFileError, match=r"ref_model_name_or_path: .* is a folder of adapters"):
        prefer(ref_model_name_or_path=str(tmp_path / "adapters"))
    with pytest.raises(ConfigurationError, match=r"`ref_model_name_or_path`: .*nowhere does not exist"):
        prefer(ref_model_name_or_path=str(tmp_path / "nowhere"))


PARAMETERS = {
    **{f"loss_type {name}": ({"loss_type": name}, {}) for name in
       ("hinge", "ipo", "kto_pair", "simpo", "orpo", "dpop", "sppo_hard", "nca_pair")},
    "loss_type robust": ({"loss_type": "robust", "label_smoothing": 0.1}, {"label_smoothing": 0.1}),
    "beta": ({"beta": 0.5}, {}),
    "simpo_gamma": ({"simpo_gamma": 1.0}, {"loss_type": "simpo"}),
    "offset_alpha": ({"offset_alpha": 0.5}, {}),
    "max_prompt_len": ({"max_prompt_len": 22}, {}),
    "pref_loss_ratio": ({"pref_loss_ratio": 0.5}, {}),
    "sft_loss_ratio": ({"sft_loss_ratio": 0.5}, {}),
    "label_smoothing": ({"label_smoothing": 0.1}, {}),
    "normalize_logps": ({"normalize_logps": True}, {}),
    "dpop_lambda": ({"dpop_lambda": 5.0}, {"loss_type": "dpop"}),
    "reference_free": ({"reference_free": True}, {}),
    "ref_model_update_steps": ({"ref_model_update_steps": 1}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_parameter_of_preferences_changes_the_losses(name: str, prefer: Train) -> None:
    values, base = PARAMETERS[name]
    assert prefer(**{**base, **values}).losses != prefer(**base).losses


def test_losses_without_a_reference_measure_none(prefer: Train) -> None:
    for values in ({"loss_type": "simpo"}, {"loss_type": "orpo"}, {"reference_free": True}):
        run = prefer(**values, max_steps=1)
        assert "reference:" not in run.said
        assert "kl_to_reference" not in log(run)[0]


def test_batch_shape_does_not_change_the_losses(prefer: Train) -> None:
    for values in ({}, {"loss_type": "kto_pair"}):
        rows = prefer(per_device_train_batch_size=4, gradient_accumulation_steps=1, **values).losses
        times = prefer(per_device_train_batch_size=1, gradient_accumulation_steps=4, **values).losses
        np.testing.assert_allclose(times, rows, rtol=5e-5, atol=1e-6)


def test_measured_pairs_are_used_again(prefer: Train) -> None:
    assert "pairs computed" in prefer().said
    assert "nothing to compute" in prefer().said
    assert "nothing to compute" not in prefer(num_train_epochs=1, max_steps=None).said  # those not needed before
    assert "nothing to compute" in prefer(num_train_epochs=2, max_steps=None).said
    assert "pairs computed" in prefer(max_seq_len=120).said  # other data


def test_prediction_layers_are_kept(prefer: Train, moe_model: Path) -> None:
    values = {"model_name_or_path": str(moe_model), "continue_training": False, "num_nextn_predict_layers": 1}
    before = weights(prefer(**values, max_steps=1, learning_rate=0.0).output)
    run = prefer(**values, weight_decay=0.5)
    assert "multi-token prediction layers are frozen" in run.said
    after = weights(run.output)
    predictions = [name for name in after if "mtp" in name]
    assert predictions
    for name in predictions:
        np.testing.assert_array_equal(after[name], before[name])
    assert any((after[name] != before[name]).any() for name in after if name not in predictions)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reference_model": "adapters"}, "there are no adapters to disable"),
        ({"reference_model": "copy", "lora": True}, "with adapters the frozen weights are the reference"),
        ({"reference_model": "precomputed", "ref_model_update_steps": 2}, "cannot follow"),
        ({"loss_type": "robust"}, "give their share as `label_smoothing`"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "the loss ipo has none"),
        ({"loss_type": "hinge", "offset_alpha": 1.0}, "has no offset"),
        ({"loss_type": "dop"}, "did you mean"),
        ({"pref_loss_ratio": 0.0}, "both loss weights are 0"),
    ],
)
def test_what_does_not_fit_is_refused(prefer: Train, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        prefer(**values)


def test_scores_must_be_there_for_offsets(prefer: Train, tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    path.write_text(json.dumps({"question": "q", "chosen": "a", "rejected": "b"}) + "\n")
    with pytest.raises(DataError, match=r"scores\.jsonl:1: score_chosen: expected scores"):
        prefer(train_dataset_path=str(path), train_dataset_type="alpaca", offset_alpha=1.0)


def test_the_verb_is_train_with_its_stage(
    tiny_base: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "dpo.yaml"
    config.write_text(
        f"model_name_or_path: {tiny_base}\noutput_dir: {tmp_path / 'run'}\ntrain_dataset_path: {pairs}\n"
        f"data_cache_dir: {tmp_path / 'cache'}\nmax_steps: 1\nmax_seq_len: 128\nreport_to: none\n"
    )
    assert main(["dpo", str(config)]) == 0
    assert "reward accuracy" in capsys.readouterr().out
    assert main(["dpo", str(config), "stage=SFT"]) == 2
    assert "`erniekit train`" in capsys.readouterr().err


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "orpo", "nca_pair"])
def test_one_pair_can_be_tried(
    make_config: Any, tiny_base: Path, pairs: Path, tmp_path: Path, loss: str, logged: list[str]
) -> None:
    from erniekit.runners.overfit_check import overfit_check

    config = make_config(
        stage="DPO", model_name_or_path=str(tiny_base), continue_training=True, train_dataset_path=str(pairs),
        loss_type=loss,
    )  # fmt: skip
    assert overfit_check(config), logged
    assert "pairs.jsonl:1" in "\n".join(logged)
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


def test_the_reference_of_adapters_is_the_base_in_few_bits(prefer: Train) -> None:
    """What the adapters are trained beside: the first step has no margin, from new adapters or from trained ones."""
    values = {"lora": True, "weight_quantize_algo": "nf4"}
    run = prefer(**values)
    assert run.losses[0] == pytest.approx(np.log(2), abs=1e-3)
    assert run.losses != prefer(lora=True).losses
    again = prefer(**values, lora_path=str(run.output), output_dir=str(run.output.parent / "again"), max_steps=1)
    assert again.losses[0] == pytest.approx(np.log(2), abs=1e-3)
