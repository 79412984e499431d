"""What has no effect, or another effect than elsewhere, is told: by `erniekit validate` and at the start of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.build.preflight import preflight
from erniekit.config import Config
from erniekit.config.foreign import FOREIGN_NAMES
from erniekit.config.registry import ALIASES, PARAMETERS
from tests.config.samples import load, problems

TENSOR = {"tensor_parallel_degree": 2}
SYNCED = TENSOR | {"tensor_parallel_config": "sync_moment"}
EVAL = {"do_eval": True, "eval_dataset_path": "a,b"}
BEST = {"load_best_model_at_end": True, "save_strategy": "steps"}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (EVAL | {"eval_dataset_prob": "0.3,0.7"}, "`eval_dataset_prob` (given values) has no effect beyond"),
        (EVAL | {"eval_dataset_prob": "5,5"}, "`eval_dataset_prob` (given values) has no effect beyond"),
        ({"distributed_dataloader": 1}, "`distributed_dataloader` (given values) has no effect"),
        ({"optim": "adamw", "offload_optim": True}, "`optim` (given values) has no effect because offload_optim"),
        ({"optim": "adamw", "use_lowprecision_moment": True}, "`optim` (given values) has no effect because use_low"),
        ({"offload_optim": True, "tensorwise_offload_optimizer": True}, "`offload_optim` (given values) has no effect"),
        ({"logging_dir": "x", "report_to": "none"}, "`logging_dir` (given values) has no effect because report_to"),
        ({"unified_checkpoint_config": "async_save"}, "`unified_checkpoint_config` (given values) has no effect"),
        ({"unified_checkpoint": False}, "`unified_checkpoint` (given values) has no effect because save_strategy"),
        ({"ckpt_quant_stage": "O1"}, "`ckpt_quant_stage` (given values) has no effect because save_strategy"),
        ({"ignore_save_lr_and_optim": True}, "`ignore_save_lr_and_optim` (given values) has no effect because save"),
        ({"use_sparse_flash_attn": False}, "dense mask, without FlashAttention, because use_sparse_flash_attn is fal"),
        ({"use_attn_mask_startend_row_indices": False}, "because use_attn_mask_startend_row_indices is false"),
        ({"pipeline_parallel_degree": 4}, "4 pipeline stages wait for each other for 75% of a step; write 16"),
        (EVAL | BEST, "the best model is chosen on 1 batch of the held-out data"),
        (EVAL | BEST | {"save_total_limit": 1}, "the newest checkpoint and the best one stay, so up to 2"),
        ({"dropout_warmup_steps": 5, "hidden_dropout_prob": 0.1}, "grows over 5 steps and then stays; the upstream"),
        (
            TENSOR | {"tensor_parallel_config": "sync_moment", "use_lowprecision_moment": True},
            "sync_moment has no effect",
        ),
        *(
            (
                {"stage": "RM", name: value},
                f"`{name}` (given values) has no effect in stage RM, whose head gives a score",
            )
            for name, value in {
                "use_fused_head_and_loss_fn": True,
                "use_sparse_head_and_loss_fn": True,
                "tensor_parallel_output": False,
                "num_nextn_predict_layers": 1,
                "multi_token_pred_lambda": 0.5,
            }.items()
        ),
        (SYNCED | {"offload_optim": True}, "sync_moment has no effect"),
        (SYNCED | {"optim": "adamw_custom"}, "sync_moment has no effect"),
    ],
)
def test_it_is_told(values: dict[str, Any], told: str) -> None:
    messages = load(**values).messages
    assert len([line for line in messages if told in line]) == 1, messages


@pytest.mark.parametrize(
    "values",
    [
        EVAL | {"eval_dataset_prob": "1,0"},
        TENSOR | {"distributed_dataloader": 1},
        {"optim": "adamw_custom", "offload_optim": True},
        {"offload_optim": True},
        {"logging_dir": "x"},
        {"unified_checkpoint_config": "async_save", "save_strategy": "epoch"},
        {"unified_checkpoint_config": "master_weight_compatible", "resume_from_checkpoint": True},
        {"ckpt_quant_stage": "O1", "save_strategy": "steps"},
        {"pipeline_parallel_degree": 4, "gradient_accumulation_steps": 8},
        EVAL | BEST | {"max_evaluate_steps": -1, "save_total_limit": 2},
    ],
)
def test_what_acts_is_not_told(values: dict[str, Any]) -> None:
    assert not [line for line in load(**values).messages if "sequence_parallel" not in line]


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"bf16": True, "amp_custom_white_list": "matmul tanh", "amp_custom_black_list": "matmul"}, "matmul: also in"),
    ],
)
def test_what_cannot_run_is_refused(values: dict[str, Any], refused: str) -> None:
    assert refused in problems(**values)


def test_lora_trains_plain_text(make_config: Callable[..., Config], tiny_base: Path) -> None:
    """Its parameters apply to stage PT, with the learning rate of adapters, and nothing says otherwise."""
    config = load(stage="PT", lora=True, lora_rank=2)
    assert not [line for line in config.messages if "lora" in line]
    assert config.applies("lora_rank") and config.training.learning_rate == 3e-4
    assert config.origin("learning_rate") == "default for PT with LoRA"


@pytest.fixture
def notes(make_config: Callable[..., Config]) -> Callable[..., list[str]]:
    return lambda **values: list(preflight(make_config(**values)).notes)


def test_a_run_that_leaves_no_checkpoint_says_what_to_write(notes: Callable[..., list[str]]) -> None:
    assert [line for line in notes() if "writes no checkpoint" in line and "save_strategy: steps" in line]
    assert not notes(save_strategy="epoch")
    assert not notes(do_train=False, do_eval=True, eval_dataset_path=__file__)


def test_the_scale_of_log_probabilities_is_told_where_upstream_differs(notes: Callable[..., list[str]]) -> None:
    pairs: dict[str, Any] = {"stage": "DPO", "save_strategy": "epoch"}
    assert "normalize_logps is false: sigmoid sums" in notes(**pairs)[0]
    assert not notes(**pairs, normalize_logps=False) and not notes(**pairs, loss_type="simpo")


def test_what_depends_on_the_model_is_told(notes: Callable[..., list[str]], tiny_base: Path) -> None:
    saves = {"save_strategy": "epoch"}
    assert notes(**saves, recompute=True, no_recompute_layers=1) == []
    assert "leaves no layer to recompute" in notes(**saves, recompute=True, no_recompute_layers=2)[0]
    mixed = {"lora": True, "weight_quantize_algo": "weight_only_mix", "continue_training": True}
    assert "is weight_only_int8 here" in notes(**saves, **mixed, model_name_or_path=str(tiny_base))[0]
    for values in ({"moe_group": "data"}, {"moe_multimodal_dispatch_use_allgather": "v2-allgather"}):
        assert "has no experts" in notes(**saves, **values)[0]


def test_a_name_of_other_suites_is_none_of_ours() -> None:
    """A name that becomes a parameter leaves the table of foreign names, which would refuse it."""
    assert not set(FOREIGN_NAMES) & {*PARAMETERS, *ALIASES}
    assert load(warmup_ratio=0.1).training.warmup_ratio == 0.1
