"""What a run of `erniekit train` leaves, tells and refuses; what each parameter does is proved in tests/config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.errors import ConfigurationError, UserError

Train = Callable[..., Any]


def test_a_dense_mask_counts_the_larger_batches_of_evaluation(train: Train, records: Path) -> None:
    values = {"use_flash_attention": False, "do_eval": True, "eval_dataset_path": str(records)}
    assert "dense mask of up to 0.5 MiB" in train(**values, per_device_eval_batch_size=8).said


def test_positions_that_the_model_does_not_have_are_refused(train: Train) -> None:
    with pytest.raises(ConfigurationError, match=r"max_seq_len 5,000 .* max_position_embeddings 4,096"):
        train(max_seq_len=5000)


def test_a_warm_up_longer_than_the_run_is_told_once(train: Train) -> None:
    line = "so learning_rate is never reached"
    assert train(warmup_steps=50).said.count(line) == 1
    epochs = {"max_steps": None, "num_train_epochs": 1}
    steps = train(**epochs).result.step
    assert train(**epochs, warmup_steps=steps).said.count(line) == 1
    assert line not in train(**epochs, warmup_steps=steps - 1).said
    assert line not in train(**epochs, lr_scheduler_type="constant").said


def test_pretraining_reads_plain_text(train: Train, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"The answer is {number}."}) + "\n" for number in range(40)))
    run = train(stage="PT", train_dataset_path=str(path), train_dataset_type="text")
    assert run.losses[-1] < run.losses[0]


def test_training_continues_from_the_saved_model(train: Train, tmp_path: Path) -> None:
    first = train(output_dir=str(tmp_path / "first"), save_strategy="steps", save_steps=2)
    from_model = train(model_name_or_path=str(first.output), continue_training=True)
    assert from_model.losses[0] < first.losses[0] * 0.9
    checkpoint = str(first.output / "checkpoint-4")
    from_checkpoint = train(init_from_checkpoint=checkpoint, continue_training=True)
    assert from_checkpoint.losses == from_model.losses  # the last checkpoint holds the final weights


def test_standalone_evaluation_equals_the_last_one_in_training(
    make_config: Callable[..., Any], records: Path, train: Train
) -> None:
    from erniekit.runners.evaluate import run_evaluation

    trained = train(do_eval=True, eval_dataset_path=str(records), eval_steps=4, max_evaluate_steps=-1)
    config = make_config(
        do_train=False, do_eval=True, eval_dataset_path=str(records), max_evaluate_steps=-1,
        model_name_or_path=str(trained.output), continue_training=True, output_dir=str(trained.output / "evaluated"),
    )  # fmt: skip
    result = run_evaluation(config)
    written = json.loads((trained.output / "evaluated/eval_results.json").read_text())
    assert written["eval_loss"] == pytest.approx(result.loss)
    assert result.loss == pytest.approx(trained.result.evaluation.loss, rel=1e-6)
    assert not (trained.output / "evaluated/model.safetensors").exists()


@pytest.mark.slow
def test_an_evaluation_on_its_own_reads_everything_unless_capped(
    make_config: Callable[..., Any], records: Path, logged: list[str]
) -> None:
    from erniekit.runners.evaluate import run_evaluation

    alone = {"do_train": False, "do_eval": True, "eval_dataset_path": str(records), "per_device_eval_batch_size": 1}
    whole = run_evaluation(make_config(**alone))
    assert whole.batches == whole.batches_available > 1
    assert any(f"({whole.batches} of {whole.batches} batches" in line for line in logged)
    capped = run_evaluation(make_config(**alone, max_evaluate_steps=1))
    assert (capped.batches, capped.batches_available) == (1, whole.batches)
    assert any(f"(1 of {whole.batches} batches" in line for line in logged)


def test_settings_of_generation_stay_with_the_model(train: Train, tiny_model: Path, tmp_path: Path) -> None:
    assert json.loads((train().output / "generation_config.json").read_text())["eos_token_id"] == 2
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text('{"top_p": 0.8, "eos_token_id": [2, 5]}')
    run = train(model_name_or_path=str(folder), save_strategy="steps", save_steps=4)
    for model_dir in (run.output, run.output / "checkpoint-4"):
        settings = json.loads((model_dir / "generation_config.json").read_text())
        assert settings == {"top_p": 0.8, "eos_token_id": [2, 5], "bos_token_id": 1, "pad_token_id": 0}
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"generation_config\.json: expected a JSON object"):
        train(model_name_or_path=str(folder))
