"""No dead parameters: each one changes what a run does or leaves, is refused, or is reported as having no effect.

`CHANGES_LOSSES`, `KEEPS_LOSSES` and `SEEN_ELSEWHERE` name every parameter that `erniekit train` honours today; the last
test fails when a parameter is declared and none of them covers it.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import pkgutil
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.errors import ConfigurationError, UserError
from erniekit.parameters.declaration import GPU_ONLY
from erniekit.parameters.schema import PARAMETERS
from erniekit.runners import checks

Train = Callable[..., Any]

IN_FP8 = {"weight_quantize_algo": "fp8_linear", "hadamard_block_size": 16}

# parameter -> (values of a run, values of the run it must differ from)
CHANGES_LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "seed": ({"seed": 7}, {}),
    "learning_rate": ({"learning_rate": 1e-3}, {}),
    "warmup_steps": ({"warmup_steps": 3}, {}),
    "lr_scheduler_type": ({"lr_scheduler_type": "cosine"}, {}),
    "min_lr": ({"min_lr": 9e-3}, {"lr_scheduler_type": "cosine"}),
    "num_cycles": ({"num_cycles": 2.0}, {"lr_scheduler_type": "cosine"}),
    "lr_end": ({"lr_end": 9e-3}, {"lr_scheduler_type": "polynomial"}),
    "power": ({"power": 3.0}, {"lr_scheduler_type": "polynomial"}),
    "decay_steps": ({"decay_steps": 3}, {"lr_scheduler_type": "wsd", "decay_steps": 1}),
    "wsd_decay_type": ({"wsd_decay_type": "1-sqrt"}, {"lr_scheduler_type": "wsd", "decay_steps": 3}),
    "layerwise_lr_decay_bound": ({"layerwise_lr_decay_bound": 0.1}, {}),
    "weight_decay": ({"weight_decay": 5.0}, {}),
    "adam_beta1": ({"adam_beta1": 0.1}, {}),
    "adam_beta2": ({"adam_beta2": 0.1}, {}),
    "adam_epsilon": ({"adam_epsilon": 0.1}, {}),
    "max_grad_norm": ({"max_grad_norm": 1e-3, "adam_epsilon": 1e-3}, {"adam_epsilon": 1e-3}),
    "hidden_dropout_prob": ({"hidden_dropout_prob": 0.5}, {}),
    "attention_probs_dropout_prob": ({"attention_probs_dropout_prob": 0.5}, {}),
    "dropout_warmup_steps": ({"dropout_warmup_steps": 100}, {"hidden_dropout_prob": 0.5}),
    "max_seq_len": ({"max_seq_len": 100}, {}),
    "per_device_train_batch_size": ({"per_device_train_batch_size": 1}, {}),
    "gradient_accumulation_steps": ({"gradient_accumulation_steps": 2}, {}),
    "random_shuffle": ({"random_shuffle": False}, {}),
    "packing": ({"packing": False}, {}),
    "greedy_intokens": ({"greedy_intokens": False}, {}),
    "buffer_size": ({"buffer_size": 8}, {}),
    "curriculum": ({"curriculum": "length"}, {}),
    "batch_tokens": ({"batch_tokens": 256}, {"packing": False}),
    "max_batch_samples": ({"max_batch_samples": 2}, {"batch_tokens": 256}),
    "min_sample_len": ({"min_sample_len": 30}, {"batch_tokens": 256}),
    "max_sample_len": ({"max_sample_len": 30}, {"batch_tokens": 256}),
    "use_lowprecision_moment": ({"use_lowprecision_moment": True}, {}),
    "num_samples_each_epoch": ({"mix_strategy": "random", "num_samples_each_epoch": 20}, {"mix_strategy": "random"}),
    "weight_quantize_algo": (IN_FP8, {}),
    "apply_hadamard": ({"apply_hadamard": False}, IN_FP8),
    "hadamard_block_size": ({"hadamard_block_size": 8}, IN_FP8),
    "apply_online_actscale_step": ({"apply_online_actscale_step": 2}, IN_FP8),
    "actscale_moving_rate": ({"actscale_moving_rate": 1.0}, {**IN_FP8, "apply_online_actscale_step": 0}),
    "quant_input_grad": ({"quant_input_grad": True}, IN_FP8),
    "quant_weight_grad": ({"quant_weight_grad": True}, IN_FP8),
    "fp8_format_type": ({"fp8_format_type": "e4m3"}, {**IN_FP8, "quant_input_grad": True}),
}

# parameter -> a value that must give the losses of the plain run; and, so that a switch nobody reads does not pass, the
# call in which the value arrives: function, its argument, and what the argument then is
KEEPS_LOSSES: dict[str, tuple[Any, str, str, Any]] = {
    "use_fused_head_and_loss_fn": (True, "erniekit.training.objectives.token_loss", "fused", True),
    "use_sparse_head_and_loss_fn": (True, "erniekit.training.objectives.token_loss", "sparse", True),
    "use_flash_attention": (False, "erniekit.model.attention.AttentionPlan.build", "dense", True),
    "use_sparse_flash_attn": (False, "erniekit.model.attention.AttentionPlan.build", "dense", True),
    "use_attn_mask_startend_row_indices": (False, "erniekit.model.attention.AttentionPlan.build", "dense", True),
    "dataloader_num_workers": (0, "erniekit.runners.train.prefetch", "workers", 0),
    "release_grads": (True, "paddle.optimizer.AdamW.clear_grad", "set_to_zero", False),
}

# parameters whose effect other tests show: a function of this module, or FILE::FUNCTION below tests/
SEEN_ELSEWHERE: dict[str, str] = {
    "stage": "test_pretraining_reads_plain_text",
    "model_name_or_path": "test_errors_name_what_is_missing",
    "continue_training": "test_training_continues_from_the_saved_model",
    "output_dir": "test_the_output_folder_holds_what_a_user_expects",
    "overwrite_output_dir": "test_overwriting_must_be_asked_for",
    "do_train": "test_do_train_false_only_evaluates",
    "do_eval": "test_evaluation_happens_when_asked",
    "device": "test_a_missing_gpu_is_an_error",
    "logging_steps": "test_logging",
    "logging_strategy": "test_logging",
    "logging_dir": "test_event_files",
    "report_to": "test_event_files",
    "disable_tqdm": "training/test_callbacks.py::test_lines_are_plain_where_there_is_no_terminal",
    "eval_dataset_path": "test_evaluation_happens_when_asked",
    "eval_dataset_type": "test_other_formats_are_read",
    "eval_dataset_prob": "test_zero_probability_leaves_a_source_out",
    "evaluation_strategy": "test_evaluation_happens_when_asked",
    "eval_steps": "test_evaluation_happens_when_asked",
    "max_evaluate_steps": "test_evaluation_happens_when_asked",
    "per_device_eval_batch_size": "test_evaluation_happens_when_asked",
    "train_dataset_path": "test_errors_name_what_is_missing",
    "train_dataset_type": "test_other_formats_are_read",
    "train_dataset_prob": "test_zero_probability_leaves_a_source_out",
    "data_cache_dir": "test_the_cache_is_used_again",
    "max_steps": "test_max_steps_comes_before_epochs",
    "num_train_epochs": "test_max_steps_comes_before_epochs",
    "save_strategy": "test_checkpoints",
    "save_steps": "test_checkpoints",
    "save_total_limit": "test_checkpoints",
    "unified_checkpoint": "runners/test_rank_files.py::test_one_process_goes_on_from_its_part_which_is_no_model",
    "unified_checkpoint_config": "runners/test_rank_files.py::test_optimizer_states_may_stay_with_their_ranks",
    "optim_shard_num": "runners/test_rank_files.py::test_optimizer_states_may_stay_with_their_ranks",
    "ignore_save_lr_and_optim": "test_optimizer_state_can_be_left_out",
    "ignore_load_lr_and_optim": "test_optimizer_state_can_be_left_out",
    "ckpt_quant_stage": "test_moments_can_be_compressed",
    "disable_ckpt_quant": "test_moments_can_be_compressed",
    "max_shard_size": "test_weights_are_sharded",
    "resume_from_checkpoint": "training/test_kill.py::test_twenty_kills_and_the_same_model_in_the_end",
    "init_from_checkpoint": "test_training_continues_from_the_saved_model",
    **dict.fromkeys(
        ("optim", "offload_optim", "tensorwise_offload_optimizer"),
        "test_where_moments_are_kept_is_told_and_changes_no_loss",
    ),
    **dict.fromkeys(
        (
            "bf16",
            "fp16",
            "fp16_opt_level",
            "scale_loss",
            "amp_custom_white_list",
            "amp_custom_black_list",
            "amp_master_grad",
            "fuse_rope",
            "fuse_linear",
            "fuse_rms_norm",
            "fuse_swiglu",
        ),
        "runners/test_precision.py::test_every_parameter_arrives_on_a_gpu",
    ),
    "mix_strategy": "test_mix_strategies_decide_the_epoch",
    "over_length_policy": "test_over_length_policy",
    **dict.fromkeys(
        ("recompute", "recompute_use_reentrant", "no_recompute_layers", "recompute_granularity"),
        "test_recomputation_keeps_the_losses_to_the_bit",
    ),
    **dict.fromkeys(
        (
            "moe_aux_loss_lambda",
            "moe_z_loss_lambda",
            "moe_orthogonal_loss_lambda",
            "moe_router_bias_update_rate",
            "num_nextn_predict_layers",
            "multi_token_pred_lambda",
        ),
        "runners/test_experts.py::test_each_parameter_of_experts_and_predictions_changes_the_losses",
    ),
    **dict.fromkeys(
        ("moe_group", "moe_multimodal_dispatch_use_allgather"),
        "runners/test_experts_on_ranks.py::test_every_way_of_dispatch_gives_the_losses_of_one_process",
    ),
    "distributed_dataloader": "runners/test_data_ranks.py::test_one_rank_of_a_tensor_group_reads_the_data",
    "max_restarts": "runners/test_launching.py::test_a_failed_job_is_started_again_as_often_as_asked",
    "distributed_timeout": "runners/test_ranks_that_train.py::test_a_rank_that_hangs_past_the_timeout_ends_the_job",
    "pipeline_parallel_degree": (
        "runners/test_pipelines.py::test_two_stages_train_as_one_process_and_go_on_from_their_checkpoint"
    ),
    "pipeline_parallel_config": "runners/test_pipelines.py::test_words_of_the_pipeline_reach_it_and_change_no_loss",
    **dict.fromkeys(
        ("pp_seg_method", "virtual_pp_degree", "add_tail_layers"),
        "runners/test_pipelines.py::test_the_stack_is_cut_where_it_is_asked_to_be",
    ),
    **dict.fromkeys(
        ("sharding", "sharding_parallel_degree"),
        "runners/test_sharding.py::test_ranks_train_as_one_process_and_go_on_from_their_checkpoint",
    ),
    "sharding_parallel_config": "parameters/test_sharding_words.py::test_a_word_acts_or_is_told",
    **dict.fromkeys(
        ("tensor_parallel_degree", "use_sp_callback"),
        "runners/test_tensor_slices.py::test_two_slices_train_as_one_process_and_go_on_from_their_checkpoint",
    ),
    "tensor_parallel_output": "runners/test_tensor_slices.py::test_the_loss_reads_slices_or_whole_logits_as_asked",
    "tensor_parallel_config": "parameters/test_tensor_words.py::test_a_word_acts_or_is_told",
    "sequence_parallel": "parallel/test_tensor.py::test_what_ranks_divide_is_dropped_independently",
    **dict.fromkeys(
        ("from_hf_hub", "from_aistudio", "from_modelscope"),
        "runners/test_hubs.py::test_each_parameter_makes_preview_and_train_use_its_hub",
    ),
    **dict.fromkeys(
        (
            "lora_rank",
            "lora_alpha",
            "rslora",
            "rslora_plus",
            "lora_plus_scale",
            "lora_target_modules",
            "lora_dropout",
            "dora",
            "lora_init",
        ),
        "runners/test_lora.py::test_each_parameter_of_lora_changes_the_losses",
    ),
    **dict.fromkeys(
        (
            "loss_type",
            "beta",
            "simpo_gamma",
            "offset_alpha",
            "max_prompt_len",
            "pref_loss_ratio",
            "sft_loss_ratio",
            "label_smoothing",
            "normalize_logps",
            "dpop_lambda",
            "reference_free",
            "ref_model_update_steps",
            "ref_model_name_or_path",
        ),
        "runners/test_dpo.py::test_each_parameter_of_preferences_changes_the_losses",
    ),
    "reference_model": "runners/test_dpo.py::test_the_reference_is_the_same_in_every_way",
    "eval_answers": "runners/test_evaluate.py::test_answers_are_scored_and_kept",
    **dict.fromkeys(
        (
            "metric_for_best_model",
            "greater_is_better",
            "early_stopping_patience",
            "early_stopping_threshold",
            "load_best_model_at_end",
        ),
        "test_the_best_evaluation_decides",
    ),
    "lora": "runners/test_lora.py::test_the_output_folder_holds_the_adapters_alone",
    "lora_path": "runners/test_lora.py::test_training_goes_on_from_adapters",
    **dict.fromkeys(
        ("max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "max_model_len"),
        "runners/test_generate.py::test_each_parameter_of_generation_changes_the_answer",
    ),
}


@pytest.mark.parametrize("name", CHANGES_LOSSES)
def test_changes_the_losses(name: str, train: Train) -> None:
    values, base = CHANGES_LOSSES[name]
    assert train(**{**base, **values}).losses != train(**base).losses


@pytest.mark.parametrize("name", KEEPS_LOSSES)
def test_keeps_the_losses_and_arrives(name: str, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    value, function, argument, expected = KEEPS_LOSSES[name]
    seen = _record_argument(function, argument, monkeypatch)
    plain = train().losses
    assert seen and expected not in seen
    seen.clear()
    np.testing.assert_allclose(train(**{name: value}).losses, plain, rtol=1e-5)
    assert set(seen) == {expected}


def _record_argument(function: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The values of one argument in every call of a function from now on."""
    original = pkgutil.resolve_name(function)
    signature, seen = inspect.signature(original), []

    def recording(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        seen.append(bound.arguments[argument])
        return original(*arguments, **named)

    monkeypatch.setattr(function, recording)
    return seen


def test_batch_shape_does_not_change_the_losses(train: Train) -> None:
    """(batch 4, accumulation 1) = (1, 4): the loss is divided once by the target tokens of the step."""
    four_rows = train(per_device_train_batch_size=4)
    four_times = train(per_device_train_batch_size=1, gradient_accumulation_steps=4)
    np.testing.assert_allclose(four_times.losses, four_rows.losses, rtol=2e-5)


def test_recomputation_keeps_the_losses_to_the_bit(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    plain = train(**values).losses
    seen = _record_argument("erniekit.model.recompute.recompute", "kwargs", monkeypatch)
    for reentrant in (False, True):
        run = train(**values, recompute=True, recompute_use_reentrant=reentrant, no_recompute_layers=1)
        assert run.losses == plain
        assert "recompute: 1 of 2 layers" in run.said
        assert len(seen) == len(plain)  # one layer of the two, one micro-batch a step
        assert {call["use_reentrant"] for call in seen} == {reentrant}
        seen.clear()
    calls = _record_argument("erniekit.model.recompute.recompute", "arguments", monkeypatch)  # of what records above
    for granularity, part in (("full", "layer"), ("full_attn", "_attention"), ("core_attn", "core")):
        run = train(**values, recompute=True, recompute_granularity=granularity)
        assert run.losses == plain
        assert {getattr(function, "__name__", "layer") for function, *_ in calls} == {part}
        calls.clear()


def test_where_moments_are_kept_is_told_and_changes_no_loss(train: Train) -> None:
    plain = train()
    weights = (plain.output / "model.safetensors").read_bytes()
    assert "AdamW: moments" not in plain.said
    told = {
        "optim": ("adamw_custom", "AdamW: moments in float32\n"),
        "offload_optim": (True, f"AdamW: moments in float32, in a mapped file in {plain.output}\n"),
        "tensorwise_offload_optimizer": (True, ", each page of it in memory only while it is used\n"),
    }
    for name, (value, line) in told.items():
        run = train(**{name: value})
        assert run.losses == plain.losses and line in run.said
        assert (run.output / "model.safetensors").read_bytes() == weights


def test_a_dense_mask_is_announced_with_its_size_and_must_fit(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "dense mask of up to 0.1 MiB" in train(use_sparse_flash_attn=False).said  # 2 rows x 128 x 128 float32
    assert "dense mask" not in train().said
    monkeypatch.setattr(checks, "available_memory", lambda: 2 * 128 * 128 * 4)
    train(use_sparse_flash_attn=False)
    monkeypatch.setattr(checks, "available_memory", lambda: 2 * 128 * 128 * 4 - 1)
    with pytest.raises(ConfigurationError, match=r"max_seq_len 128 takes 0\.00 GiB"):
        train(use_sparse_flash_attn=False)
    train()


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


def test_other_formats_are_read(train: Train, tmp_path: Path) -> None:
    path = tmp_path / "alpaca.jsonl"
    record = {"instruction": "Add.", "input": "1 + 1", "output": "2"}
    path.write_text("".join(json.dumps(record) + "\n" for _ in range(10)))
    values = {"train_dataset_path": str(path), "train_dataset_type": "alpaca", "do_eval": True, "eval_steps": 1}
    run = train(**values, eval_dataset_path=str(path), eval_dataset_type="alpaca")
    assert "(alpaca): 10 records, 10 kept" in run.said
    with pytest.raises(UserError, match=r"alpaca\.jsonl:1"):
        train(**{**values, "train_dataset_type": "messages"}, eval_dataset_path=str(path), eval_dataset_type="alpaca")


def test_errors_name_what_is_missing(train: Train, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no-such-model"):
        train(model_name_or_path=str(tmp_path / "no-such-model"))
    with pytest.raises(UserError, match=r"no-such-data\.jsonl"):
        train(train_dataset_path=str(tmp_path / "no-such-data.jsonl"))
    with pytest.raises(UserError, match="continue_training: false"):
        train(continue_training=True)  # the folder holds no weights


def test_training_continues_from_the_saved_model(train: Train, tmp_path: Path) -> None:
    first = train(output_dir=str(tmp_path / "first"), save_strategy="steps", save_steps=2)
    from_model = train(model_name_or_path=str(first.output), continue_training=True)
    assert from_model.losses[0] < first.losses[0] * 0.9
    checkpoint = str(first.output / "checkpoint-4")
    from_checkpoint = train(init_from_checkpoint=checkpoint, continue_training=True)
    assert from_checkpoint.losses == from_model.losses  # the last checkpoint holds the final weights


def test_the_output_folder_holds_what_a_user_expects(train: Train) -> None:
    names = {path.name for path in train().output.iterdir()}
    expected = {"model.safetensors", "config.json", "tokenizer.json", "train_results.json", "training_config.yaml"}
    assert expected | {"loss.png", "training_log.jsonl", "manifest.json"} <= names


def test_overwriting_must_be_asked_for(train: Train, make_config: Callable[..., Any]) -> None:
    from erniekit.runners.train import run_training

    train(save_strategy="steps", save_steps=2)
    with pytest.raises(UserError, match="overwrite_output_dir"):
        run_training(make_config(), say=lambda line: None)
    run_training(make_config(overwrite_output_dir=True), say=lambda line: None)


def test_do_train_false_only_evaluates(make_config: Callable[..., Any], records: Path, train: Train) -> None:
    from erniekit.runners.evaluate import run_evaluation

    trained = train(do_eval=True, eval_dataset_path=str(records), eval_steps=4, max_evaluate_steps=-1)
    config = make_config(
        do_train=False, do_eval=True, eval_dataset_path=str(records), max_evaluate_steps=-1,
        model_name_or_path=str(trained.output), continue_training=True, output_dir=str(trained.output / "evaluated"),
    )  # fmt: skip
    result = run_evaluation(config, say=lambda line: None)
    written = json.loads((trained.output / "evaluated/eval_results.json").read_text())
    assert written["eval_loss"] == pytest.approx(result.loss)
    assert result.loss == pytest.approx(trained.result.evaluation.loss, rel=1e-6)
    assert not (trained.output / "evaluated/model.safetensors").exists()


def test_an_evaluation_on_its_own_reads_everything_unless_capped(
    make_config: Callable[..., Any], records: Path
) -> None:
    from erniekit.runners.evaluate import run_evaluation

    alone = {"do_train": False, "do_eval": True, "eval_dataset_path": str(records), "per_device_eval_batch_size": 1}
    lines: list[str] = []
    whole = run_evaluation(make_config(**alone), say=lines.append)
    assert whole.batches == whole.batches_available > 1
    assert any(f"({whole.batches} of {whole.batches} batches" in line for line in lines)
    capped = run_evaluation(make_config(**alone, max_evaluate_steps=1), say=lines.append)
    assert (capped.batches, capped.batches_available) == (1, whole.batches)
    assert any(f"(1 of {whole.batches} batches" in line for line in lines)


def test_evaluation_happens_when_asked(train: Train, records: Path) -> None:
    def evaluations(**values: Any) -> list[dict[str, Any]]:
        run = train(**values)
        lines = [json.loads(line) for line in (run.output / "training_log.jsonl").read_text().splitlines()]
        return [line for line in lines if "eval_loss" in line]

    asked = {"do_eval": True, "eval_dataset_path": str(records), "eval_steps": 2, "max_evaluate_steps": -1}
    every_two = evaluations(**asked)
    assert [line["step"] for line in every_two] == [2, 4]
    assert evaluations(**{**asked, "do_eval": False}) == []
    assert evaluations(**asked, evaluation_strategy="no") == []
    epochs = {"evaluation_strategy": "epoch", "max_steps": None, "num_train_epochs": 1}
    assert len(evaluations(**asked, **epochs)) == 1
    capped = evaluations(**{**asked, "max_evaluate_steps": 1}, per_device_eval_batch_size=1)
    assert {line["eval_batches"] for line in capped} == {1}
    assert capped[0]["eval_batches_available"] > 1
    one_by_one = evaluations(**asked, per_device_eval_batch_size=1)
    assert one_by_one[-1]["eval_batches"] > every_two[-1]["eval_batches"]
    assert one_by_one[-1]["eval_loss"] == pytest.approx(every_two[-1]["eval_loss"], rel=1e-5)


def test_a_missing_gpu_is_an_error(train: Train) -> None:
    import paddle

    if paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match="device: gpu"):
        train(device="gpu")


def test_logging(train: Train) -> None:
    assert len(train().losses) == 4
    assert len(train(logging_steps=2).losses) == 2
    assert len(train(logging_strategy="no").losses) == 0
    assert len(train(logging_strategy="epoch", max_steps=None, num_train_epochs=2).losses) == 2


def test_event_files(train: Train, tmp_path: Path) -> None:
    logs = tmp_path / "events"
    train(report_to=["visualdl", "tensorboard"], logging_dir=str(logs))
    names = os.listdir(logs)
    assert any(name.startswith("vdlrecords") for name in names)
    assert any(name.startswith("events.out.tfevents") for name in names)
    inside = train(report_to="visualdl").output / "logs"
    assert any(name.startswith("vdlrecords") for name in os.listdir(inside))


def test_zero_probability_leaves_a_source_out(train: Train, records: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(records.read_text())
    paths = {"train_dataset_path": f"{records},{other}", "eval_dataset_path": f"{records},{other}"}
    run = train(**paths, train_dataset_prob="1.0,0.0", eval_dataset_prob="0.0,1.0", do_eval=True, eval_steps=4)
    assert "60 samples" in run.said and "120 samples" not in run.said
    both = train(**paths, mix_strategy="concat", do_eval=True, eval_steps=4)
    assert "120 samples" in both.said


def test_the_cache_is_used_again(train: Train, tmp_path: Path) -> None:
    train(data_cache_dir=str(tmp_path / "elsewhere"))
    entries = {path: path.stat().st_mtime_ns for path in (tmp_path / "elsewhere").rglob("*") if path.is_file()}
    assert entries
    train(data_cache_dir=str(tmp_path / "elsewhere"))
    assert {path: path.stat().st_mtime_ns for path in entries} == entries


def test_max_steps_comes_before_epochs(train: Train) -> None:
    whole_epoch = train(max_steps=None, num_train_epochs=1)
    assert train(max_steps=None, num_train_epochs=2).result.step == 2 * whole_epoch.result.step
    assert train(max_steps=3, num_train_epochs=2).result.step == 3


def test_checkpoints(train: Train) -> None:
    def saved(**values: Any) -> list[str]:
        return sorted(path.name for path in train(**values).output.glob("checkpoint-*"))

    assert saved() == []
    assert saved(save_strategy="steps", save_steps=1, max_steps=3) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert saved(save_strategy="steps", save_steps=1, save_total_limit=2) == ["checkpoint-3", "checkpoint-4"]
    assert len(saved(save_strategy="epoch", max_steps=None, num_train_epochs=2)) == 2


def test_optimizer_state_can_be_left_out(train: Train) -> None:
    run = train(save_strategy="steps", save_steps=2, ignore_save_lr_and_optim=True)
    assert not list(run.output.glob("checkpoint-*/optimizer*"))
    checkpoint = str(run.output / "checkpoint-2")
    with pytest.raises(UserError, match="ignore_load_lr_and_optim"):
        train(resume_from_checkpoint=checkpoint, overwrite_output_dir=True)
    resumed = train(resume_from_checkpoint=checkpoint, overwrite_output_dir=True, ignore_load_lr_and_optim=True)
    assert resumed.result.step == 4


def test_moments_can_be_compressed(train: Train) -> None:
    sizes, losses = {}, {}
    for stage in ("O0", "O1", "O2"):
        run = train(save_strategy="steps", save_steps=2, ckpt_quant_stage=stage)
        sizes[stage] = (run.output / "checkpoint-2/optimizer.safetensors").stat().st_size
        assert ("resuming from them is not bit-exact" in run.said) == (stage != "O0")
        resumed = train(  # needs no parameter, and goes on with another stage
            resume_from_checkpoint=str(run.output / "checkpoint-2"),
            overwrite_output_dir=True,
            save_strategy="steps",
            ckpt_quant_stage="O2",
            disable_ckpt_quant=True,
        )
        said = f"holds AdamW's moments in {8 if stage == 'O1' else 4} bits (ckpt_quant_stage {stage})"
        assert (said in resumed.said) == (stage != "O0")
        assert (resumed.output / "checkpoint-4/optimizer.safetensors").stat().st_size == sizes["O0"]
        losses[stage] = resumed.result.loss
    assert sizes["O2"] < sizes["O1"] < 0.4 * sizes["O0"]
    assert losses["O1"] != losses["O0"] and losses["O2"] != losses["O0"]
    assert abs(losses["O1"] - losses["O0"]) < abs(losses["O2"] - losses["O0"]) < 0.1 * losses["O0"]


def test_weights_are_sharded(train: Train) -> None:
    shards = sorted(path.name for path in train(max_shard_size=5e-5).output.glob("model-*.safetensors"))
    assert len(shards) > 1


def test_a_gigabyte_has_ten_to_the_ninth_bytes(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = _record_argument("erniekit.runners.train.save_model_folder", "max_shard_bytes", monkeypatch)
    train(max_shard_size=2.5)
    assert set(limits) == {2_500_000_000}


def test_settings_of_generation_stay_with_the_model(train: Train, tiny_model: Path, tmp_path: Path) -> None:
    assert json.loads((train().output / "generation_config.json").read_text())["eos_token_id"] == 2
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text('{"top_p": 0.8, "eos_token_id": [2, 5]}')
    run = train(model_name_or_path=str(folder), save_strategy="steps", save_steps=4)
    for place in (run.output, run.output / "checkpoint-4"):
        settings = json.loads((place / "generation_config.json").read_text())
        assert settings == {"top_p": 0.8, "eos_token_id": [2, 5], "bos_token_id": 1, "pad_token_id": 0}
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"generation_config\.json: expected a JSON object"):
        train(model_name_or_path=str(folder))


def test_mix_strategies_decide_the_epoch(train: Train, records: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text("".join(records.read_text().splitlines(keepends=True)[:10]))
    values = {"train_dataset_path": f"{records},{short}", "train_dataset_prob": "0.5,0.5"}

    def samples(strategy: str) -> int:
        said = train(**values, mix_strategy=strategy).said
        line = next(line for line in said.splitlines() if line.startswith("epoch 0:"))
        return int(line.split()[2].replace(",", ""))

    assert samples("concat") == 70
    assert samples("interleave_under") < samples("concat") < samples("interleave_over")


def test_over_length_policy(train: Train, records: Path, tmp_path: Path) -> None:
    turns = 12
    record = {"src": ["What is 1 + 1?"] * turns, "tgt": ["2"] * turns}
    path = tmp_path / "long.jsonl"
    path.write_text(records.read_text() + json.dumps(record) + "\n")
    values = {"train_dataset_path": str(path)}
    assert "1 shortened" in train(**values, over_length_policy="truncate_turns").said
    assert "1 dropped" in train(**values, over_length_policy="drop").said
    with pytest.raises(UserError, match=r"long\.jsonl:61"):
        train(**values, over_length_policy="error")


def test_the_best_evaluation_decides(train: Train, records: Path) -> None:
    """At this learning rate the loss falls first and rises later; accuracy has its own best step."""
    values = {
        "do_eval": True, "eval_dataset_path": str(records), "eval_steps": 1, "max_evaluate_steps": -1, "max_steps": 6,
        "save_strategy": "steps", "save_steps": 100, "lr_scheduler_type": "constant",
    }  # fmt: skip

    def steps(**changes: Any) -> tuple[int, int, str]:
        run = train(**values, **changes)
        kept = [int(path.name.split("-")[1]) for path in run.output.glob("checkpoint-*")]
        return run.result.step, max(kept), run.said

    assert steps()[0] == 6
    lost, _, said = steps(early_stopping_patience=1, early_stopping_threshold=100.0)
    assert lost == 2 and "stopping early: eval_loss" in said
    # where a greater loss is taken for a better one, nothing improves while the model learns
    assert steps(early_stopping_patience=2, greater_is_better=True)[0] == 3
    first = train(**values, load_best=True, metric_for_best_model="loss", greater_is_better=True)
    assert "saved the model of step 1, where eval_loss was best" in first.said
    weights = (first.output / "model.safetensors").read_bytes()
    assert weights == (first.output / "checkpoint-1" / "model.safetensors").read_bytes()
    accuracy = train(**values, load_best=True, metric_for_best_model="token_accuracy", early_stopping_patience=50)
    assert "is read as eval_token_accuracy" in accuracy.said
    state = json.loads((accuracy.output / "checkpoint-6" / "trainer_state.json").read_text())
    assert 0 < state["best"]["value"] < 1


def test_every_parameter_is_covered() -> None:
    covered = {*CHANGES_LOSSES, *KEEPS_LOSSES, *SEEN_ELSEWHERE}
    assert covered <= PARAMETERS.keys()
    missing = []
    for name, declared in PARAMETERS.items():
        refused_beyond_neutral = declared.available is not None  # tests/parameters: refused with a reason
        runs_today = {"train", "chat", "generate"}.intersection(declared.verbs)
        reported = declared.devices == GPU_ONLY or not runs_today
        inactive = any(_never_holds(need) for need in declared.needs)  # reported: what it needs is refused
        if name not in covered and not (refused_beyond_neutral or reported or inactive):
            missing.append(name)
    assert missing == []


@pytest.mark.parametrize("place", sorted(set(SEEN_ELSEWHERE.values())))
def test_the_tests_named_here_exist(place: str) -> None:
    file, _, name = place.rpartition("::")
    path = Path(__file__).parents[1] / file if file else Path(__file__)
    functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert name.startswith("test_") and name in functions


def _never_holds(need: Any) -> bool:
    target = PARAMETERS[need.name]
    return (
        target.available is not None
        or target.devices == GPU_ONLY
        or any(_never_holds(deeper) for deeper in target.needs)
    )
