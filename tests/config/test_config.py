"""From a file to a configuration: precedence, aliases, derived defaults, rules, messages."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from erniekit.config import Config
from erniekit.config.parameter import when
from erniekit.config.registry import PARAMETERS, unmet_needs
from erniekit.config.sections.dpo import DpoParameters, reference_mode
from erniekit.errors import ConfigurationError
from tests.config.samples import SMALLEST, load, problems


def _write(path: Path, text: str) -> Path:
    path.write_text("model_name_or_path: m\noutput_dir: o\ntrain_dataset_path: t.jsonl\n" + text, encoding="utf-8")
    return path


def test_command_line_beats_file_beats_default(tmp_path: Path) -> None:
    file = _write(tmp_path / "sft.yaml", "max_steps: 5\nseed: 1\n")
    config = Config.load(file, ["seed=2"])
    assert (config.training.max_steps, config.training.seed, config.training.warmup_steps) == (5, 2, 0)
    assert config.origin("max_steps") == "sft.yaml:4"
    assert config.origin("seed") == "command line"
    assert config.origin("warmup_steps") == "default"
    assert config.path == file
    assert config.is_set("seed") and not config.is_set("warmup_steps")


def test_override_mends_a_wrong_value_of_the_file(tmp_path: Path) -> None:
    assert Config.load(_write(tmp_path / "a.yaml", "max_steps: many\n"), ["max_steps=3"]).training.max_steps == 3


def test_override_of_a_text_is_taken_literally(tmp_path: Path) -> None:
    config = Config.load(_write(tmp_path / "a.yaml", ""), ["output_dir=2024", "logging_strategy=no"])
    assert config.basic.output_dir == "2024"
    assert config.basic.logging_strategy == "no"


def test_configuration_is_frozen() -> None:
    config = load()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.training.max_steps = 3  # type: ignore[misc]


def test_all_problems_are_reported_at_once_in_order(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(
        "learing_rate: 1.0e-5\nmax_steps: many\nckpt_quant_stage: O9\nbf16: true\nfp16: true\noutput_dir: o\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigurationError) as caught:
        Config.load(file, ["beta=-1"])
    assert str(caught.value).splitlines() == [
        "7 problems in the configuration",
        f"  {file}:1: `learing_rate`: unknown parameter; did you mean `learning_rate`?",
        f"  {file}:2: `max_steps`: expected an integer, got many",
        f"  {file}:3: `ckpt_quant_stage`: expected O0, O1 or O2, got O9",
        f"  {file}:4: `bf16`: `bf16` (sft.yaml:4) and `fp16` (sft.yaml:5) exclude each other; keep one of them",
        "  command line: `beta`: must be at least 0.0, got -1.0",
        f"  {file}: `model_name_or_path`: is required and not set; write `model_name_or_path: models/ERNIE-4.5-0.3B`, "
        "with your own value",
        f"  {file}: `train_dataset_path`: is required and not set; write `train_dataset_path: data/sft-train.jsonl`, "
        "with your own value",
    ]


# Aliases


def test_alias_expands_visibly(tmp_path: Path) -> None:
    config = Config.load(_write(tmp_path / "sft.yaml", "batch_size: 4\ncompute_type: BF16\nfine_tuning: full\n"))
    assert config.training.per_device_train_batch_size == 4
    assert config.evaluation.per_device_eval_batch_size == 4
    assert (config.precision.bf16, config.precision.fp16, config.lora.lora) == (True, False, False)
    assert config.origin("bf16") == "compute_type (sft.yaml:5)"
    assert "`batch_size: 4` (sft.yaml:4) expands to per_device_train_batch_size: 4" in config.messages
    assert "`compute_type: BF16` (sft.yaml:5) expands to bf16: true, fp16: false" in config.messages


def test_alias_and_equal_value_agree() -> None:
    assert load(batch_size=4, per_device_train_batch_size="4").training.per_device_train_batch_size == 4


def test_alias_and_another_value_conflict(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Config.load(_write(tmp_path / "sft.yaml", "compute_type: bf16\nbf16: false\n"))
    assert str(caught.value).endswith(
        "sft.yaml:4: `compute_type` expands to bf16: true, but `bf16` is false (sft.yaml:5); remove one of the two"
    )
    assert "`batch_size` expands to" in problems(batch_size=4, per_device_train_batch_size=2)


def test_override_by_alias_beats_the_file_without_conflict(tmp_path: Path) -> None:
    file = _write(tmp_path / "sft.yaml", "per_device_train_batch_size: 4\nbatch_size: 4\n")
    config = Config.load(file, ["batch_size=2"])
    assert config.training.per_device_train_batch_size == 2
    assert config.origin("per_device_train_batch_size") == "batch_size (command line)"
    assert not any("sft.yaml" in line for line in config.messages)


@pytest.mark.parametrize(
    ("alias", "value", "expected"),
    [
        ("compute_type", "bf61", "expected fp32, bf16, fp16, fp8, wint8, wint4/8, got bf61; did you mean `bf16`?"),
        ("compute_type", 8, "got 8"),
        ("fine_tuning", "Lor", "expected LoRA, Full, got Lor; did you mean `LoRA`?"),
        (
            "compute_type",
            "wint8",
            "`weight_quantize_algo` (from `compute_type`): weight_only_int8 stores",
        ),
        ("compute_type", "wint4/8", "weight_only_mix stores quantized weights, which cannot be trained"),
        ("batch_size", 0, "`per_device_train_batch_size` (from `batch_size`): must be at least 1 (packs), got 0"),
        ("use_attn_mask_start_row_indices", 2, "expected true or false, got 2"),
    ],
)
def test_wrong_value_of_an_alias_names_it(alias: str, value: Any, expected: str) -> None:
    assert expected in problems(**{alias: value})


# Defaults that follow from other parameters


@pytest.mark.parametrize(
    ("stage", "kind", "rate", "origin"),
    [("SFT", "erniekit", 3e-5, "default for SFT"), ("PT", "text", 3e-5, "default for PT")],
)
def test_learning_rate_depends_on_the_stage(stage: str, kind: str, rate: float, origin: str) -> None:
    config = load(stage=stage, train_dataset_type=kind)
    assert config.training.learning_rate == rate
    assert config.origin("learning_rate") == origin


@pytest.mark.parametrize(
    ("stage", "lora", "rate"), [("SFT", False, 3e-5), ("SFT", True, 3e-4), ("DPO", False, 1e-6), ("DPO", True, 1e-5)]
)
def test_documented_learning_rates(stage: str, lora: bool, rate: float) -> None:
    from erniekit.config.parse import Entry, SourceLocation
    from erniekit.config.resolve import resolve

    location = SourceLocation("")
    builder = resolve([[Entry("stage", stage, location), Entry("lora", lora, location)]], "train")
    assert builder["learning_rate"] == rate


def test_other_derived_defaults() -> None:
    config = load(per_device_train_batch_size=3, output_dir="out/")
    assert config.evaluation.per_device_eval_batch_size == 3
    assert config.basic.logging_dir == "out/logs"
    assert config.basic.do_train is True
    assert Config.from_mapping({}, verb="chat").basic.do_train is False


@pytest.mark.parametrize(
    ("values", "strategy"),
    [
        ({}, "concat"),
        ({"train_dataset_path": "a,b"}, "concat"),
        ({"train_dataset_path": "a,b", "train_dataset_prob": "0.8,0.2"}, "random"),
        ({"train_dataset_path": "a,b", "train_dataset_prob": "1,0"}, "concat"),
        ({"num_samples_each_epoch": 100}, "random"),
        ({"num_samples_each_epoch": 6000000}, "concat"),
        ({"train_dataset_path": "a,b", "train_dataset_prob": "0.8,0.2", "mix_strategy": "concat"}, "concat"),
    ],
)
def test_mixing_follows_what_the_user_asked_for(values: dict[str, Any], strategy: str) -> None:
    assert load(**values).sft.mix_strategy == strategy


# Rules


def test_what_is_required_depends_on_verb_and_values() -> None:
    assert "`output_dir`: is required" in problems(output_dir="")
    assert "`train_dataset_path`: is required" in problems(train_dataset_path="")
    Config.from_mapping({"model_name_or_path": "m", "train_dataset_path": "t"}, verb="preview")
    assert "nothing to do" in problems(do_train=False, train_dataset_path="")
    assert "set `eval_dataset_path` or `eval_split`, or `do_eval: false`" in problems(do_eval=True)
    load(do_eval=True, eval_split=0.1)
    alone = problems(do_train=False, do_eval=True, evaluation_strategy="no")
    assert "`eval_dataset_path`: evaluation has no data" in alone and "do_eval" not in alone
    load(do_eval=True, evaluation_strategy="no")
    load(do_train=False, do_eval=True, eval_dataset_path="e.jsonl", train_dataset_path="")


def test_sources_get_a_format_and_a_weight_each() -> None:
    config = load(train_dataset_path="a,b,c", train_dataset_type="alpaca")
    assert config.training.train_dataset_type == ("alpaca",) * 3
    assert config.training.train_dataset_prob == (1.0,) * 3
    text = problems(train_dataset_path="a,b,c", train_dataset_type="alpaca,messages")
    assert "2 values for 3 files of `train_dataset_path`; write one value for each file" in text
    assert "3 values for 1 file of `eval_dataset_path`" in problems(eval_dataset_path="e", eval_dataset_prob="1,1,1")


def test_formats_fit_the_stage() -> None:
    config = load(stage="PT", train_dataset_type="erniekit")
    assert config.training.train_dataset_type == ("text",)
    assert "changed train_dataset_type [erniekit] -> [text] because stage PT reads plain text" in config.messages
    assert load(stage="PT").messages == ()
    assert "stage PT cannot read [messages]" in problems(stage="PT", train_dataset_type="messages")
    assert "stage SFT cannot read plain text" in problems(train_dataset_type="text")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"lr_scheduler_type": "wsd"}, "`wsd` needs the length of its decay; set `decay_steps`"),
        (
            {"lr_scheduler_type": "wsd", "decay_steps": 8, "warmup_steps": 3, "max_steps": 10},
            "warmup_steps + decay_steps = 11 exceed max_steps = 10",
        ),
        ({"lr_scheduler_type": "cosine", "min_lr": 1e-3}, "0.001 exceeds learning_rate 3e-05"),
        ({"lr_scheduler_type": "polynomial", "lr_end": 1e-3}, "0.001 exceeds learning_rate 3e-05"),
        ({"resume_from_checkpoint": True, "init_from_checkpoint": "c"}, "remove it or `resume_from_checkpoint`"),
        ({"init_from_checkpoint": "c", "continue_training": False}, "asks for random weights"),
        ({"pp_seg_method": [3, 5]}, "must start at 0 and increase"),
        ({"pp_seg_method": [0, 5, 5]}, "must start at 0 and increase"),
        ({"pp_seg_method": [0, 5, 8, 9], "pipeline_parallel_degree": 2}, "4 boundaries do not make 2 stages"),
        ({"max_evaluate_steps": 0}, "0 would evaluate nothing"),
        ({"lora_alpha": 0}, "must be above 0, or -1"),
        ({"lora": True, "rslora_plus": True, "lora_alpha": 8}, "contradicts `rslora_plus`, which makes it 4.0"),
        ({"ref_model_update_steps": 0}, "0 is no interval"),
        ({"stage": "DPO", "pref_loss_ratio": 0}, "both loss weights are 0"),
        ({"stage": "DPO", "max_seq_len": 10}, "leaves no room for a prompt"),
        ({"from_hf_hub": True, "from_modelscope": True}, "exclude each other"),
    ],
)
def test_rule_refuses(values: dict[str, Any], expected: str) -> None:
    assert expected in problems(**values)


def test_rules_pass_over_values_that_could_not_be_read() -> None:
    text = problems(lr_scheduler_type="wsd", decay_steps="long")
    assert "`decay_steps`: expected an integer" in text
    assert "needs the length" not in text


# Messages


def test_changes_are_told_only_for_what_the_user_set() -> None:
    assert load().messages == ()
    assert load().distributed.sequence_parallel is False
    assert load(sequence_parallel=True).messages == (
        "changed sequence_parallel True -> False because tensor_parallel_degree is 1",
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"beta": 0.2}, "`beta` (given values) has no effect with stage SFT"),
        (
            {"max_new_tokens": 7},
            "`max_new_tokens` (given values) has no effect with `erniekit train`; it applies to chat, generate",
        ),
        ({"min_lr": 1e-6}, "`min_lr` (given values) has no effect because lr_scheduler_type is linear"),
        (
            {"max_steps": 3, "num_train_epochs": 2},
            "`num_train_epochs` (given values) has no effect because max_steps is 3",
        ),
        ({"save_steps": 5}, "`save_steps` (given values) has no effect because save_strategy is no"),
        (
            {"sharding": "stage1", "sharding_parallel_degree": 1},
            "`sharding` (given values) has no effect because sharding_parallel_degree is 1; "
            "it needs `sharding_parallel_degree` above 1 or `sharding_parallel_degree` -1",
        ),
        (
            {"optim_shard_num": 8},
            "`optim_shard_num` (given values) has no effect because unified_checkpoint_config is []; "
            "it needs `unified_checkpoint_config` ignore_merge_optimizer",
        ),
        (
            {"fp16_opt_level": "O2"},
            "`fp16_opt_level` (given values) has no effect because bf16 is false and fp16 is false",
        ),
        (
            {"dropout_warmup_steps": 5},
            "`dropout_warmup_steps` (given values) has no effect because all probabilities of dropout",
        ),
        (
            {"do_eval": True, "eval_dataset_path": "e", "evaluation_strategy": "epoch", "eval_steps": 5},
            "`eval_steps` (given values) has no effect because evaluation_strategy is epoch",
        ),
        (
            {"train_dataset_path": "a,b", "train_dataset_prob": "0.8,0.2", "mix_strategy": "concat"},
            "`train_dataset_prob` (given values) has no effect because mix_strategy is concat",
        ),
        (
            {"use_sp_callback": True},
            "`use_sp_callback` (given values) has no effect because sequence_parallel is false",
        ),
        (
            {"packing": False, "buffer_size": 64},
            "`buffer_size` (given values) has no effect because packing is false",
        ),
        (
            {"warmup_steps": 50, "max_steps": 10},
            "warmup_steps 50 takes all of the 10 steps, so learning_rate is never reached: the last step has 18% of it",
        ),
        (
            {"num_samples_each_epoch": 5, "mix_strategy": "concat"},
            "`num_samples_each_epoch` (given values) has no effect because mix_strategy is concat",
        ),
    ],
)
def test_value_without_effect_is_reported(values: dict[str, Any], expected: str) -> None:
    messages = load(**values).messages
    assert len(messages) == 1
    assert messages[0].startswith(expected)


def test_value_equal_to_the_default_is_not_reported() -> None:
    assert load(beta=0.1, max_new_tokens=1024, save_steps=100, per_device_eval_batch_size=1).messages == ()


def test_fp16_on_a_cpu_is_reported_not_refused() -> None:
    config = load(compute_type="fp16", device="cpu", fuse_rope=True, fuse_linear=False, fp16_opt_level="O2")
    assert config.ignored_on_cpu() == [
        "`fuse_rope: true` (given values) has no effect on a CPU",
        "`fp16: true` (compute_type (given values)) has no effect on a CPU: fp32 runs",
        "`fp16_opt_level: O2` (given values) has no effect on a CPU",
    ]
    assert load().ignored_on_cpu() == []
    assert load(bf16=True, cpu_bf16="always", fp16_opt_level="O2").ignored_on_cpu() == []


@pytest.mark.proves("device")
def test_what_only_a_cpu_does_is_told_on_a_gpu() -> None:
    config = load(bf16=True, cpu_bf16="always", device="gpu")
    assert config.ignored_on_gpu() == ["`cpu_bf16: always` (given values) has no effect on a GPU"]
    for values in ({"device": "cpu"}, {"device": "npu"}, {"cpu_bf16": "auto"}):
        assert load(**{"bf16": True, "cpu_bf16": "always"} | values).ignored_on_gpu() == []


def test_preview_takes_a_training_configuration_without_comment() -> None:
    assert load("preview", learning_rate=1e-3, num_train_epochs=3, save_strategy="steps").messages == ()


# The resolved configuration


def test_resolved_configuration_round_trips_through_yaml_and_json(tmp_path: Path) -> None:
    config = load(train_dataset_path="a,b", train_dataset_prob="0.8,0.2", report_to="none", lr_scheduler_type="cosine")
    resolved = config.resolved()
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(resolved), encoding="utf-8")
    (tmp_path / "a.json").write_text(json.dumps(resolved, indent=1), encoding="utf-8")
    for name in ("a.yaml", "a.json"):
        again = Config.load(tmp_path / name)
        assert again.resolved() == resolved
        assert again.messages == ()


def test_given_values_may_be_tuples() -> None:
    assert load(train_dataset_path=("a", "b")).training.train_dataset_path == ("a", "b")
    assert Config.from_mapping(SMALLEST, ["seed=3"]).training.seed == 3


def test_keys_of_a_configuration_for_the_original_are_taken() -> None:
    """One GPU's worth of keys as users of the original write them; what they cannot have here is said."""
    config = Config.from_mapping(
        {
            "stage": "SFT",
            "fine_tuning": "Full",
            "model_name_or_path": "models/ernie",
            "output_dir": "./output",
            "logging_dir": "./vdl_log",
            "train_dataset_type": "erniekit",
            "train_dataset_path": "./a.jsonl,./b.jsonl",
            "train_dataset_prob": "0.7,0.3",
            "eval_dataset_path": "./c.jsonl",
            "eval_dataset_prob": "1.0",
            "num_samples_each_epoch": 6000000,
            "mix_strategy": "random",
            "batch_size": 1,
            "do_train": True,
            "do_eval": True,
            "evaluation_strategy": "steps",
            "distributed_dataloader": False,
            "learning_rate": "5e-6",
            "lr_scheduler_type": "cosine",
            "min_lr": "5e-7",
            "release_grads": True,
            "moe_group": "dummy",
            "sharding": "stage1",
            "sharding_parallel_degree": 1,
            "sequence_parallel": True,
            "pipeline_parallel_config": "disable_partial_send_recv enable_clear_every_step_cache",
            "compute_type": "bf16",
            "fp16_opt_level": "O2",
            "amp_master_grad": True,
            "amp_custom_white_list": ["matmul", "flash_attn"],
            "amp_custom_black_list": ["cos"],
            "use_attn_mask_start_row_indices": True,
            "report_to": "none",
            "unified_checkpoint": True,
            "max_shard_size": 5,
            "hf_hub_id": None,
        }
    )
    assert [line.split("`")[1] for line in config.messages if "no effect" in line] == [
        "logging_dir",
        "sharding",
        "pipeline_parallel_config",
    ]
    assert config.ignored_on_cpu() == []


@pytest.mark.parametrize("written", [["none"], ["NO"], "none", []])
def test_no_event_files_may_be_asked_for_as_text_or_list(written: Any) -> None:
    assert load(report_to=written).basic.report_to == ()


def test_a_word_for_a_whole_list_stands_alone() -> None:
    assert load(report_to=["all"]).basic.report_to == ("visualdl", "tensorboard")
    assert "expected visualdl, tensorboard, wandb" in problems(report_to=["none", "visualdl"])


def test_a_warm_up_that_ends_within_the_run_needs_no_message() -> None:
    assert load(warmup_steps=9, max_steps=10).messages == ()
    assert load(warmup_steps=50).messages == ()  # the steps are not known yet; the run tells
    assert load(warmup_steps=10, max_steps=10).messages != ()


def test_a_budget_of_tokens_takes_the_place_of_packing() -> None:
    config = load(batch_tokens=8192, per_device_train_batch_size=3)
    assert config.acceleration.packing is False
    assert config.origin("packing") == "default because batch_tokens is set"
    assert any("`per_device_train_batch_size`" in line and "batch_tokens" in line for line in config.messages)
    with pytest.raises(ConfigurationError, match="either packed or batched by length"):
        load(batch_tokens=8192, packing=True)
    with pytest.raises(ConfigurationError, match=r"a sample of 8,192 tokens .* `max_sample_len: 4096`"):
        load(batch_tokens=4096)
    assert load(batch_tokens=4096, max_sample_len=4096).acceleration.max_sample_len == 4096
    with pytest.raises(ConfigurationError, match="no sample can have 20 to 10 tokens"):
        load(batch_tokens=8192, min_sample_len=20, max_sample_len=10)
    assert load(max_batch_samples=3).messages[-1].endswith("it needs `batch_tokens` above 0 or `batch_seconds` above 0")


def test_needs_are_followed_to_their_end() -> None:
    config = load(packing=False)
    assert unmet_needs(PARAMETERS["buffer_size"], config.resolved()) == [
        when("packing"), when("batch_tokens", above=0), when("batch_seconds", above=0),
    ]  # fmt: skip
    assert unmet_needs(PARAMETERS["buffer_size"], load().resolved()) == []


def test_an_evaluation_on_its_own_reads_everything_unless_told() -> None:
    alone = {"do_train": False, "do_eval": True, "eval_dataset_path": "e.jsonl"}
    assert load().evaluation.max_evaluate_steps == 1
    assert load(**alone).evaluation.max_evaluate_steps == -1
    assert load(**alone, max_evaluate_steps=1).evaluation.max_evaluate_steps == 1


def test_any_of_three_switches_asks_for_a_dense_mask() -> None:
    assert not load().uses_dense_mask
    for name in ("use_flash_attention", "use_sparse_flash_attn", "use_attn_mask_startend_row_indices"):
        assert load(**{name: False}).uses_dense_mask


@pytest.mark.proves("stage")
def test_the_stage_decides_what_applies() -> None:
    assert (load().stage.name, load(stage="DPO").stage.name) == ("SFT", "DPO")
    assert load(stage="DPO").applies("beta") and not load().applies("beta")


@pytest.mark.proves("device")
def test_what_only_gpus_do_is_told_on_other_devices() -> None:
    assert "has no effect on a CPU" in load(fp16=True).ignored_on_cpu()[0]
    told = load(bf16=True, cpu_bf16="always", cpu_kernels="paddle", device="npu").ignored_on_cpu()
    assert len(told) == 3 and all("has no effect on npu" in line for line in told)
    assert load(fp16=True, device="gpu").ignored_on_cpu() == []


@pytest.mark.proves(
    "reference_model", "reference_free", "loss_type", "lora", "ref_model_name_or_path", "ref_model_update_steps"
)
@pytest.mark.parametrize(
    ("values", "lora", "mode"),
    [
        ({}, False, "precomputed"),
        ({}, True, "adapters"),
        ({"ref_model_update_steps": 2}, False, "copy"),
        ({"ref_model_name_or_path": "other"}, True, "precomputed"),
        ({"reference_model": "copy"}, False, "copy"),
        ({"reference_model": "precomputed"}, True, "precomputed"),
        ({"reference_free": True}, False, "none"),
        ({"loss_type": "simpo"}, False, "none"),
        ({"loss_type": "grpo"}, False, "copy"),
    ],
    ids=str,
)
def test_the_kind_of_a_reference(values: dict, lora: bool, mode: str) -> None:
    assert reference_mode(DpoParameters(**values), lora=lora) == mode
