"""The names and values of other suites' files: read, refused with what to write, and the table of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from erniekit.config import Config
from erniekit.config.foreign import FOREIGN_NAMES
from erniekit.config.foreign_names import ERNIE, PADDLEFORMERS, SUITES
from erniekit.config.json_schema import structural_problems
from erniekit.config.registry import ALIASES, PARAMETERS, suggestion
from erniekit.errors import ConfigurationError
from tests.config.samples import load, problems

# What PaddleFormers' files for text contain beside words that both suites share.
OF_PADDLEFORMERS: dict[str, Any] = {
    "template": "qwen3",
    "template_backend": "custom",
    "_attn_implementation": "flashmask",
    "eval_accumulation_steps": 16,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 4,
    "use_expert_parallel": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "save_checkpoint_format": "flex_checkpoint",
    "load_checkpoint_format": "flex_checkpoint",
    "convert_from_hf": True,
    "eval_with_do_generation": False,
    "hybrid_parallel_topo_order": "sharding_first",
    "tp_delay_scale_loss": True,
    "tp_sync_param": True,
    "sync_grad": True,
    "pp_delay_scale_loss": True,
    "partial_send_recv": False,
    "batch_p2p_comm": False,
    "clear_every_step_cache": True,
    "split_param": True,
    "moe_router_force_load_balancing": False,
    "moe_subbatch_token_num_before_dispatch": 0,
    "router_aux_loss_coef": 0.01,
    "pre_alloc_memory": 60,
    "loss_subbatch_sequence_length": 8192,
    "truncate_packing": False,
    "max_estimate_samples": 500,
    "sharding": "stage1",
    "device": "iluvatar_gpu",
}


def test_words_of_paddleformers_mean_what_they_mean_there() -> None:
    config = load(**OF_PADDLEFORMERS, gradient_accumulation_steps=4)
    assert config.distributed.tensor_parallel_degree == config.distributed.pipeline_parallel_degree == 2
    assert set(config.distributed.tensor_parallel_config) == {"enable_delay_scale_loss", "sync_param", "sync_grad"}
    assert set(config.distributed.pipeline_parallel_config) == {
        "enable_delay_scale_loss", "disable_partial_send_recv", "disable_batch_p2p_comm",
        "enable_clear_every_step_cache",
    }  # fmt: skip
    assert config.distributed.moe_group == "data" and config.memory.recompute
    assert config.moe.moe_aux_loss_lambda == 0.01 and config.acceleration.use_flash_attention
    told = "\n".join(config.messages)
    honoured_as_they_are = {
        "_attn_implementation", "convert_from_hf", "eval_with_do_generation", "moe_router_force_load_balancing",
        "recompute_granularity",
    }  # fmt: skip
    assert {name for name in OF_PADDLEFORMERS if f"`{name}: " not in told} == honoured_as_they_are
    assert "`tensor_model_parallel_size: 2` (given values) is read as tensor_parallel_degree" in told
    assert "`pre_alloc_memory: 60` (given values) has no effect: memory is allocated when tensors need it" in told


def test_words_of_ernie_mean_what_they_mean_there() -> None:
    config = load(
        download_hub="aistudio", use_recompute_loss_fn=True, loss_subbatch_seqlen=8192, moe_use_aux_free=False,
        moe_multimodal_dispatch_use_allgather="", greedy_intokens=1, packing=0, device="npu:1",
    )  # fmt: skip
    assert config.basic.from_aistudio and config.memory.use_fused_head_and_loss_fn
    assert not config.moe.moe_use_aux_free and not config.acceleration.packing
    assert config.acceleration.moe_multimodal_dispatch_use_allgather == "v2-alltoall-unpad"
    told = "\n".join(config.messages)
    assert "`moe_multimodal_dispatch_use_allgather: ''` (given values) is read as v2-alltoall-unpad" in told
    assert "ERNIEKit has never been run on npu" in told
    text = load(moe_multimodal_dispatch_use_allgather="v2-alltoall-unpad-text")
    assert text.acceleration.moe_multimodal_dispatch_use_allgather == "v2-alltoall-unpad"
    chat = load("chat", quantization="wint8", load_choices="default_v1", reasoning_parser="ernie_x1", port=8189)
    assert chat.basic.weight_quantize_algo == "weight_only_int8"
    assert {"`load_choices:", "`reasoning_parser:", "`port`"} <= {line.split(" ")[0] for line in chat.messages}


def test_what_the_user_writes_in_our_words_wins_or_contradicts() -> None:
    base = {"model_name_or_path": "m", "output_dir": "o", "train_dataset_path": "t"}
    given = {**base, "tensor_model_parallel_size": 2, "partial_send_recv": False}
    words = ["tensor_parallel_degree=4", "pipeline_parallel_config="]
    config = Config.from_mapping(given, words)
    assert config.distributed.tensor_parallel_degree == 4 and config.distributed.pipeline_parallel_config == ()
    assert not any("tensor_model_parallel_size" in line for line in config.messages)
    both = problems(tensor_model_parallel_size=2, tensor_parallel_degree=4)
    assert "`tensor_model_parallel_size` expands to tensor_parallel_degree: 2" in both and "remove one" in both
    lists = load(pipeline_parallel_config="enable_timer", batch_p2p_comm=False, pipeline_parallel_degree=2)
    assert lists.distributed.pipeline_parallel_config == ("enable_timer", "disable_batch_p2p_comm")
    assert "`tensor_parallel_degree` (from `tensor_model_parallel_size`)" in problems(tensor_model_parallel_size="many")
    assert load(template=None).messages == ()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("cutoff_len", 2048, "`cutoff_len`: a name of LLaMA-Factory: write `max_seq_len: 2048`"),
        ("sequence_len", 4096, "`sequence_len`: a name of axolotl: write `max_seq_len: 4096`"),
        ("gradient_checkpointing", True, "LLaMA-Factory, axolotl and Transformers: write `recompute: true`"),
        ("val_size", 0.1, "write eval_split, the fraction of the training records that is held out"),
        ("input_dir", "data", "indexed .bin/.idx data cannot be read here"),
        ("vit_lr_ratio", 0.9, "it belongs to vision"),
        ("recompute_method", "block", "expected uniform, got block; write recompute: true, and no_recompute_layers"),
        ("quantization", ["wint4"], "expected wint4 or wint8, got [wint4]; write weight_quantize_algo"),
        ("eval_with_do_generation", True, "write eval_answers"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_what_to_write(name: str, value: Any, told: str) -> None:
    assert told in problems(**{name: value})


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: m\nepochs: 3\nlearing_rate: 1.0e-4\ntemplate: qwen3\n")
    with pytest.raises(ConfigurationError) as raised:
        Config.load(file)
    lines = str(raised.value).splitlines()
    assert lines[0] == "6 problems in the configuration"
    assert [line.partition("mine.yaml")[2].split("`")[1] for line in lines[1:]] == [
        "model", "epochs", "learing_rate", "model_name_or_path", "output_dir", "train_dataset_path",
    ]  # fmt: skip
    assert "`epochs`: a name of Transformers: write `num_train_epochs: 3`" in lines[2]


@pytest.mark.parametrize("foreign", FOREIGN_NAMES.values(), ids=lambda foreign: foreign.name)
def test_a_row_of_the_table_leads_somewhere(foreign: Any) -> None:
    assert foreign.suites and set(foreign.suites) <= set(SUITES)
    assert foreign.name not in {*PARAMETERS, *ALIASES}
    assert bool(foreign.word) or foreign.values or foreign.why
    assert not foreign.word or foreign.word in {*PARAMETERS, *ALIASES}
    assert not foreign.read or set(foreign.suites) & {ERNIE, PADDLEFORMERS}
    for meant in foreign.values.values():
        values = {name: [value] if PARAMETERS[name].kind.is_list else value for name, value in meant.items()}
        assert list(structural_problems(values)) == []


def test_hints_lead_somewhere() -> None:
    known = (*PARAMETERS, *ALIASES)
    for word, meant in {
        "learing_rate": "learning_rate", "learn_rate": "learning_rate", "num_train_epoch": "num_train_epochs",
        "outputdir": "output_dir", "lora_ranks": "lora_rank", "save_step": "save_steps",
    }.items():  # fmt: skip
        assert suggestion(word, known) == meant
    for word in ("input_dir", "use_moe", "text_dataset_path", "eval_iters", "vit_lr_ratio", "trigger_data_prob"):
        assert suggestion(word, known) == ""


@pytest.mark.parametrize(("degree", "sharding", "group", "expected"), [
    (None, "stage1", "dummy", -1), (None, "none", "dummy", 1), (None, "stage1", "data", 1), (1, "stage1", "dummy", 1),
    (4, "stage1", "dummy", 4), (-1, "stage2", "dummy", -1),
])  # fmt: skip
def test_sharding_without_a_degree_takes_all_ranks(
    degree: int | None, sharding: str, group: str, expected: int
) -> None:
    written = {} if degree is None else {"sharding_parallel_degree": degree}
    config = load(sharding=sharding, moe_group=group, **written)
    assert config.distributed.sharding_parallel_degree == expected
    assert Config.from_mapping(config.resolved()).distributed.sharding_parallel_degree == expected


def test_no_rank_cannot_share() -> None:
    assert "write 1, more, or -1 for all" in problems(sharding="stage1", sharding_parallel_degree=0)
    assert "write sharding: stage1" in problems(sharding="stage2", tensor_parallel_degree=2)
