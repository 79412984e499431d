"""`moe_group` and `moe_multimodal_dispatch_use_allgather`: what they divide and move, and that no loss changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.model.storage.safetensors import SafetensorsFile
from tests.distributed.cases import expert_runs
from tests.distributed.ranks import RanksFailedError, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WAYS = {
    "v2-alltoall-unpad": "all-to-all dispatch",
    "v2-alltoall": "all-to-all dispatch, padded",
    "v2-allgather-unpad": "all-gather dispatch",
    "v2-allgather": "all-gather dispatch, padded",
}
SEQUENCE = {"tensor_parallel_degree": 2, "sequence_parallel": True}


@pytest.fixture
def run_values(moe_model: Path, records: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The values of a run of two steps with everything of routers switched on, evaluated in the end."""

    def make(name: str, **values: Any) -> dict[str, Any]:
        return {
            "model_name_or_path": str(moe_model),
            "continue_training": False,
            "output_dir": str(tmp_path / name),
            "train_dataset_path": str(records),
            "data_cache_dir": str(tmp_path / "cache"),
            "do_eval": True,
            "eval_dataset_path": str(records),
            "eval_steps": 3,
            "max_evaluate_steps": 3,
            "max_seq_len": 128,
            "max_steps": 3,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "report_to": "none",
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "num_nextn_predict_layers": 1,
            "moe_aux_loss_lambda": 0.1,
            "moe_z_loss_lambda": 0.1,
            "moe_orthogonal_loss_lambda": 0.1,
            "moe_router_bias_update_rate": 0.05,
            **values,
        }

    return make


@pytest.mark.proves("moe_group", "moe_multimodal_dispatch_use_allgather")
@pytest.mark.parametrize(
    ("layout", "accumulation"),
    [({"moe_group": "data"}, 1), ({"moe_group": "mp", **SEQUENCE}, 2)],
    ids=["data", "mp with sequence_parallel"],
)
def test_every_way_of_dispatch_gives_the_losses_of_one_process(
    run_values: Callable[..., dict[str, Any]], layout: dict[str, Any], accumulation: int
) -> None:
    (alone,) = run_ranks(expert_runs.train, 1, parameters=[run_values("alone")])[0]
    assert len(alone["losses"]) == 4 and "expert parallel" not in alone["said"]
    runs = [
        run_values(
            way,
            **layout,
            gradient_accumulation_steps=accumulation,
            moe_multimodal_dispatch_use_allgather=way,
        )
        for way in WAYS
    ]
    results = run_ranks(expert_runs.train, 2, parameters=runs)
    sent = {
        way: sum(run["sent"] for run in of_ranks)
        for way, of_ranks in zip(WAYS, zip(*results, strict=True), strict=True)
    }
    assert sent["v2-alltoall"] > sent["v2-alltoall-unpad"]  # all transfers are as long as the longest
    if "tensor_parallel_degree" not in layout:  # otherwise every rank has as many tokens as the others
        assert sent["v2-allgather"] != sent["v2-allgather-unpad"]
    for rank_results in results:
        for how, run in zip(WAYS.values(), rank_results, strict=True):
            assert f"expert parallel: degree 2, {how}" in run["said"].splitlines()
            assert "has no effect" not in run["said"]
            np.testing.assert_allclose(run["losses"], alone["losses"], atol=1e-5, rtol=0)


def test_experts_over_tensor_ranks_that_have_all_tokens(run_values: Callable[..., dict[str, Any]]) -> None:
    layout = {"tensor_parallel_degree": 2, "sequence_parallel": False, "moe_group": "mp"}
    way = {"moe_multimodal_dispatch_use_allgather": "v2-allgather"}
    (alone,) = run_ranks(expert_runs.train, 1, parameters=[run_values("alone")])[0]
    for (run,) in run_ranks(expert_runs.train, 2, parameters=[run_values("mp", **layout, **way)]):
        assert "expert parallel: degree 2, all-reduce over the same tokens" in run["said"]
        assert "`moe_multimodal_dispatch_use_allgather: v2-allgather` has no effect: without" in run["said"]
        np.testing.assert_allclose(run["losses"], alone["losses"], atol=1e-5, rtol=0)


def test_the_saved_model_holds_all_experts_and_the_biases_of_all_tokens(
    run_values: Callable[..., dict[str, Any]],
) -> None:
    alone, data = run_values("alone"), run_values("data", moe_group="data", gradient_accumulation_steps=1)
    run_ranks(expert_runs.train, 1, parameters=[alone])
    run_ranks(expert_runs.train, 2, parameters=[data])
    own, expected = (SafetensorsFile(Path(run["output_dir"]) / "model.safetensors") for run in (data, alone))
    assert own.names() == expected.names()
    biases = [name for name in own.names() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 1
    for name in biases:
        values = expected.read(name)
        assert np.abs(values).max() > 0
        np.testing.assert_allclose(own.read(name), values, atol=1e-7)


@pytest.mark.parametrize("layout", [{"moe_group": "data"}, {"moe_group": "mp", **SEQUENCE}], ids=["data", "mp"])
def test_a_run_goes_on_where_it_was_on_the_same_ranks_and_on_one(
    run_values: Callable[..., dict[str, Any]], layout: dict[str, Any]
) -> None:
    accumulation = 1 if layout["moe_group"] == "data" else 2
    divided = {**layout, "gradient_accumulation_steps": accumulation}
    whole = run_values("whole", **divided, save_strategy="steps", save_steps=2)
    resume = {"resume_from_checkpoint": f"{whole['output_dir']}/checkpoint-2"}
    again = run_values("again", **divided, **resume)
    for first, second in run_ranks(expert_runs.train, 2, parameters=[whole, again]):
        assert second["losses"] == first["losses"][2:]
    files = [Path(run["output_dir"]) / "model.safetensors" for run in (whole, again)]
    assert files[0].read_bytes() == files[1].read_bytes()
    (alone,) = run_ranks(expert_runs.train, 1, parameters=[run_values("alone", **resume)])[0]
    np.testing.assert_allclose(alone["losses"], first["losses"][2:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", [{"moe_group": "data"}, {"moe_group": "mp", **SEQUENCE}], ids=["data", "mp"])
def test_answers_in_training_are_those_of_one_process(
    run_values: Callable[..., dict[str, Any]], layout: dict[str, Any]
) -> None:
    """Three of them, so that with the sequence divided no two ranks could share the newest tokens."""
    asked = {"eval_answers": 3, "max_new_tokens": 4}
    accumulation = 1 if layout["moe_group"] == "data" else 2
    alone, divided = run_values("alone", **asked), run_values("divided", **asked, **layout)
    divided["gradient_accumulation_steps"] = accumulation
    run_ranks(expert_runs.train, 1, parameters=[alone])
    run_ranks(expert_runs.train, 2, parameters=[divided])
    own, expected = ((Path(run["output_dir"]) / "eval_samples.jsonl").read_bytes() for run in (divided, alone))
    assert own == expected and own.count(b"\n") == 3


def test_adapters_on_experts_of_one_rank_are_trained_saved_and_resumed(
    run_values: Callable[..., dict[str, Any]],
) -> None:
    """The rank that writes holds none of them."""
    base = run_values("base", max_steps=1)
    run_ranks(expert_runs.train, 1, parameters=[base])
    lora = {
        "model_name_or_path": base["output_dir"],
        "continue_training": True,
        "lora": True,
        "lora_rank": 2,
        "lora_target_modules": ["*.experts.3.*"],
        "moe_orthogonal_loss_lambda": 0.0,
        "moe_router_bias_update_rate": 0.0,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    (alone,) = run_ranks(expert_runs.train, 1, parameters=[run_values("alone", **lora)])[0]
    data = run_values("data", moe_group="data", **{**lora, "gradient_accumulation_steps": 1})
    checkpoint = f"{data['output_dir']}/checkpoint-2"
    resumed = {**data, "output_dir": data["output_dir"] + "-resumed", "resume_from_checkpoint": checkpoint}
    for whole, rest in run_ranks(expert_runs.train, 2, parameters=[data, resumed]):
        np.testing.assert_allclose(whole["losses"], alone["losses"], atol=1e-5, rtol=0)
        assert rest["losses"] == whole["losses"][2:]
    files = [Path(folder) / "adapter_model.safetensors" for folder in (data["output_dir"], resumed["output_dir"])]
    assert files[0].read_bytes() == files[1].read_bytes()
    names = SafetensorsFile(files[0]).names()
    assert len(names) == 6 and all(".mlp.experts.3." in name for name in names)


def test_experts_that_cannot_be_divided_are_refused(run_values: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(RanksFailedError, match="moe_num_experts 4 cannot be sharded over 3 ranks"):
        run_ranks(expert_runs.train, 3, parameters=[run_values("three", moe_group="data")])
