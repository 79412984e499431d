"""Runs that add tokens: what is trained and saved, resuming to the bit, exporting, answering, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.config import Config
from erniekit.errors import UserError
from tools.parity.layout_run import tensors

Train = Callable[..., Any]
TOKENS = {"added_token_ranges": ["{10..99}"], "max_steps": 4, "save_strategy": "steps", "save_steps": 2}  # 471 to 560
EMBEDDING, ROWS = (
    "model.embed_tokens.weight",
    "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
)


@pytest.fixture(params=[True, False], ids=["adapters", "all weights"])
def trained(request: pytest.FixtureRequest, train: Train, tiny_base: Path) -> Callable[..., Any]:
    def run(**parameters: Any) -> Any:
        base = {"model_name_or_path": str(tiny_base), "continue_training": True, "lora": request.param}
        return train(**{**base, **TOKENS, **parameters})

    return run


def weights(folder: Path) -> dict[str, np.ndarray]:
    return tensors(folder, "adapter_model*.safetensors") or tensors(folder, "model*.safetensors")


def test_a_resumed_run_ends_in_the_same_bits(trained: Callable[..., Any]) -> None:
    whole = trained()
    expected, losses = weights(whole.output), whole.losses
    shutil.rmtree(whole.output / "checkpoint-4")
    again = trained(resume_from_checkpoint=True)
    assert again.losses == losses[-len(again.losses) :]
    found = weights(again.output)
    assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)


def test_what_a_run_leaves_answers_and_is_exported(
    trained: Callable[..., Any], tiny_base: Path, tmp_path: Path
) -> None:
    """The rows of new tokens move, all others of a frozen base do not; the export has them all."""
    from erniekit.export.export import export_model
    from erniekit.inference.engine import ChatModel

    run = trained()
    assert "vocabulary: 90 new tokens, ids 471 to 560, 512 rows -> 576, new rows normal" in run.said
    model = ChatModel.load(run.output)
    assert model.tokenizer.vocab_size == 561 and model.tokenizer.encode("57") == [471 + 47]
    assert model.decoder.config.vocab_size == 576
    export_model(run.output, tmp_path / "export", Config.from_mapping({}, verb="export"))
    exported, base = tensors(tmp_path / "export", "*.safetensors"), tensors(tiny_base, "*.safetensors")
    assert json.loads((tmp_path / "export/config.json").read_text())["vocab_size"] == 576
    assert exported[EMBEDDING].shape == (576, 32)
    own = weights(run.output)
    if ROWS in own:
        np.testing.assert_array_equal(exported[EMBEDDING][471:561], own[ROWS])
        np.testing.assert_array_equal(exported[EMBEDDING][:471], base[EMBEDDING][:471])
        assert np.abs(own[ROWS] - weights(run.output / "checkpoint-2")[ROWS]).max() > 1e-4
    else:
        assert all(np.array_equal(exported[name], own[name]) for name in own)


def test_other_tokens_are_refused(trained: Callable[..., Any]) -> None:
    run = trained()
    shutil.rmtree(run.output / "checkpoint-4")
    with pytest.raises(UserError, match="grew"):
        trained(resume_from_checkpoint=True, added_token_ranges=["{10..98}"])


def test_weights_with_rows_of_the_tokens_are_read_as_they_are(
    trained: Callable[..., Any], train: Train, tmp_path: Path
) -> None:
    """`init_from_checkpoint` beside the same tokens: nothing is drawn anew."""
    run = trained()
    start = tmp_path / "start"
    shutil.copytree(run.output, start)
    again = trained(init_from_checkpoint=str(start), learning_rate=1e-12, weight_decay=0.0)
    own, begun = weights(again.output), weights(start)
    assert own.keys() == begun.keys()
    for name in own:
        np.testing.assert_allclose(own[name], begun[name], atol=1e-9, err_msg=name)


@pytest.mark.proves("train_added_tokens")
def test_rows_that_are_not_trained_stay_as_they_began(train_adapters: Train) -> None:
    run = train_adapters(**TOKENS, train_added_tokens=False)
    assert "rows of 90 new tokens, 2,880 parameters, frozen (train_added_tokens: false)" in run.said
    ends, early = (weights(folder)[ROWS] for folder in (run.output, run.output / "checkpoint-2"))
    np.testing.assert_array_equal(ends, early)
    assert not any("new_rows" in name for name in tensors(run.output / "checkpoint-4", "optimizer*.safetensors"))


@pytest.mark.parametrize("kind", ["adapters", "copy", "the base by name"])
def test_a_reference_has_the_rows_that_new_tokens_begin_with(
    prefer: Train, kind: str, tiny_base: Path, pairs: Path
) -> None:
    """So the first rewards of a preference run are 0 with new tokens, too, and `eval` measures what the run did."""
    from erniekit.cli.eval import evaluation_config
    from erniekit.runners.evaluate import run_evaluation

    how = {"adapters": {"lora": True}, "copy": {"reference_model": "copy"}}
    run = prefer(
        **{**TOKENS, "max_steps": 2}, **how.get(kind, {"ref_model_name_or_path": str(tiny_base)}), do_eval=True,
        eval_dataset_path=str(pairs), eval_steps=2, max_evaluate_steps=3,
    )  # fmt: skip
    assert run.losses[0] == pytest.approx(np.log(2), abs=1e-6)
    expected = next(entry["eval_loss"] for entry in run.log if "eval_loss" in entry)
    assert run_evaluation(evaluation_config(run.output, [])).loss == pytest.approx(expected, rel=1e-5)


def test_eval_measures_what_the_run_measured(trained: Callable[..., Any], records: Path) -> None:
    """By the folder that it has left, and by the checkpoint before."""
    from erniekit.cli.eval import evaluation_config
    from erniekit.runners.evaluate import run_evaluation

    run = trained(do_eval=True, eval_dataset_path=str(records), eval_steps=2, max_evaluate_steps=2)
    expected = [entry["eval_loss"] for entry in run.log if "eval_loss" in entry]
    for folder, loss in ((run.output / "checkpoint-2", expected[0]), (run.output, expected[-1])):
        assert run_evaluation(evaluation_config(folder, ["eval_answers=0"])).loss == pytest.approx(loss, rel=1e-6)
