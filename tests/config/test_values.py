"""Values as users write them."""

from __future__ import annotations

from typing import Any

import pytest

from erniekit.config.parse import Entry, SourceLocation
from erniekit.config.registry import PARAMETERS
from erniekit.config.resolve import resolve
from tests.config.samples import load, problems


@pytest.mark.parametrize(
    ("name", "written", "read"),
    [
        ("learning_rate", "1e-5", 1e-5),
        ("learning_rate", 1, 1.0),
        ("scale_loss", "2 ** 15", 32768),
        ("scale_loss", "2**15", 32768),
        ("max_seq_len", "8192", 8192),
        ("max_seq_len", 4096.0, 4096),
        ("num_samples_each_epoch", "1e4", 10000),
        ("lora_alpha", "-1", -1.0),
        ("amp_custom_white_list", "matmul  flash_attn", ["matmul", "flash_attn"]),
        ("amp_custom_white_list", ["matmul", "flash_attn"], ["matmul", "flash_attn"]),
        (
            "pipeline_parallel_config",
            "enable_timer best_unbalanced_scheduler",
            ["enable_timer", "best_unbalanced_scheduler"],
        ),
        ("pipeline_parallel_config", "", []),
        ("pp_seg_method", [0, 29, 57], [0, 29, 57]),
        ("pp_seg_method", "[0,29,57]", [0, 29, 57]),
        ("pp_seg_method", "layer:Ernie4_5_DecoderLayer|EmptyLayer", "layer:Ernie4_5_DecoderLayer|EmptyLayer"),
        ("train_dataset_path", "a.jsonl, b.jsonl", ["a.jsonl", "b.jsonl"]),
        ("train_dataset_path", ["with, comma.jsonl"], ["with, comma.jsonl"]),
        ("train_dataset_prob", 1.0, [1.0]),
        ("train_dataset_prob", "0.8,0.2", [0.8, 0.2]),
        ("train_dataset_type", "ERNIEKit, chatml", ["erniekit", "messages"]),
        ("stage", "sft", "SFT"),
        ("evaluation_strategy", False, "no"),
        ("save_strategy", "No", "no"),
        ("weight_quantize_algo", None, "none"),
        ("weight_quantize_algo", "fp8linear", "fp8_linear"),
        ("moe_group", "dp", "data"),
        ("sharding", "", "none"),
        ("save_total_limit", None, None),
        ("save_total_limit", "None", None),
        ("report_to", "none", []),
        ("report_to", "all", ["visualdl", "tensorboard"]),
        ("report_to", "VisualDL tensorboard", ["visualdl", "tensorboard"]),
        ("report_to", "visualdl, tensorboard", ["visualdl", "tensorboard"]),
        ("lora_target_modules", "q_proj v_proj", ["q_proj", "v_proj"]),
        ("lora_target_modules", " q_proj,v_proj , o_proj\n", ["q_proj", "v_proj", "o_proj"]),
        ("lora_target_modules", "re:.*[qk]_proj", ["re:.*[qk]_proj"]),
        ("lora_target_modules", [r"re:.*\.1\d{0,1}\..*", "up_proj"], [r"re:.*\.1\d{0,1}\..*", "up_proj"]),
        ("lora_target_modules", "q_proj,,v_proj", ["q_proj", "", "v_proj"]),
        ("lora_target_modules", "", []),
        ("distributed_dataloader", False, 0),
        ("device", "GPU:1", "gpu:1"),
        ("hf_hub_id", None, ""),
        ("train_dataset_path", None, []),
        ("resume_from_checkpoint", True, True),
        ("resume_from_checkpoint", "true/checkpoint-3", "true/checkpoint-3"),
    ],
)
def test_value_is_read(name: str, written: Any, read: Any) -> None:
    value = PARAMETERS[name].read(written)
    assert value == read
    assert type(value) is type(read)


@pytest.mark.parametrize(
    ("name", "written", "expected"),
    [
        ("do_eval", "True", 'expected true or false, got the string "True"; remove the quotes'),
        ("do_eval", "maybe", "expected true or false, got maybe"),
        ("do_eval", 2, "expected true or false, got 2"),
        ("max_steps", 1.5, "expected an integer, got 1.5"),
        ("max_steps", True, "expected an integer, got true"),
        ("max_steps", "2 ** x", "expected an integer, got 2 ** x"),
        ("learning_rate", "fast", "expected a finite number, got fast"),
        ("learning_rate", float("nan"), "expected a finite number, got nan"),
        ("learning_rate", "inf", "expected a finite number, got inf"),
        ("learning_rate", 10**400, "expected a finite number"),
        ("learning_rate", -1e-5, "must be at least 0.0, got -1e-05"),
        ("layerwise_lr_decay_bound", 0, "must be greater than 0.0, got 0.0"),
        ("hidden_dropout_prob", 1.0, "must be less than 1.0, got 1.0"),
        ("max_seq_len", 1, "must be at least 2 (tokens), got 1"),
        ("port", 70000, "must be at most 65535"),
        ("learning_rate", 9223372036854775808, "must be at most 100"),
        ("max_steps", 10**22, "must be at most 1000000000"),
        ("num_train_epochs", 1e308, "must be at most 1000000"),
        ("lora_rank", 1e308, "must be at most 65536"),
        ("weight_decay", 1e308, "must be at most 1000000000000"),
        ("output_dir", 2024, "expected a string"),
        ("output_dir", "", "is required"),
        ("lr_scheduler_type", "cosin", "did you mean `cosine`?"),
        ("lr_scheduler_type", None, "has no value; write"),
        ("seed", None, "has no value; write an integer, or remove the line for the default 42"),
        (
            "pipeline_parallel_config",
            "enable_timer best_unbalanced_schedule",
            "did you mean `best_unbalanced_scheduler`?",
        ),
        ("pipeline_parallel_config", "enable_timer enable_timer", "contains the same item twice"),
        ("unified_checkpoint_config", "async_sav", "did you mean `async_save`?"),
        ("sharding_parallel_config", {"a": 1}, "expected words"),
        ("tensor_parallel_config", [1], "expected words"),
        ("pp_seg_method", "layers", "expected `uniform`"),
        ("pp_seg_method", [0, -1], "expected `uniform`"),
        ("train_dataset_prob", "0.5,nan", "expected one or more finite numbers"),
        ("train_dataset_prob", "0.5,-1", "must be at least 0.0, got -1.0"),
        ("train_dataset_prob", [], "expected one or more"),
        ("train_dataset_prob", 0, "no file has a probability above 0"),
        ("train_dataset_type", "ernikit", "did you mean `erniekit`?"),
        ("train_dataset_path", "a,,b", "has no value"),
        ("device", "tpu", "expected `auto`, `cpu`, `gpu`, one of Paddle's other devices"),
        ("report_to", "comet", "expected visualdl, tensorboard, wandb, mlflow, swanlab or trackio, got comet"),
        ("distributed_dataloader", 2, "must be at most 1"),
        ("apply_online_actscale_step", True, "it counts steps"),
        ("resume_from_checkpoint", 3, "expected a folder, true or false"),
        ("resume_from_checkpoint", "true", 'got the string "true"; remove the quotes'),
        ("resume_from_checkpoint", "None", "expected a folder, true or false, got None"),
        ("max_steps", 0, "to evaluate only, `do_train: false` and `do_eval: true`"),
        ("hadamard_block_size", 48, "48 is not a power of two"),
    ],
)
def test_value_is_refused_with_what_to_write(name: str, written: Any, expected: str) -> None:
    text = problems(**{name: written})
    assert f"`{name}`: " in text
    assert expected in text
    assert "problems" not in text  # exactly one


def test_list_values_reach_the_program_as_tuples() -> None:
    config = load(amp_custom_white_list="matmul flash_attn", report_to=["tensorboard"])
    assert config.precision.amp_custom_white_list == ("matmul", "flash_attn")
    assert config["report_to"] == ("tensorboard",)


def test_another_spelling_of_a_choice_is_told() -> None:
    builder = resolve([[Entry("weight_quantize_algo", "fp8linear", SourceLocation("sft.yaml", 3))]], "train")
    assert "`weight_quantize_algo: fp8linear` (sft.yaml:3) is read as fp8_linear" in builder.messages
