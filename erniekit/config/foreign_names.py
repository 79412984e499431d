"""The names of other suites' configuration files: for each its word here, or why there is none.

Here are those of ERNIE and PaddleFormers, whose files are read: `config/foreign.py` translates them and says so. Names
of other suites, in `foreign_hints.py`, are refused with the line to write instead. docs/migrating.md is generated from
both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ERNIE, PADDLEFORMERS = "ERNIE", "PaddleFormers"
LLAMA_FACTORY, AXOLOTL, TRANSFORMERS = "LLaMA-Factory", "axolotl", "Transformers"
MS_SWIFT, VERL = "ms-swift", "verl"
SUITES = (ERNIE, PADDLEFORMERS, LLAMA_FACTORY, AXOLOTL, TRANSFORMERS, MS_SWIFT, VERL)


@dataclass(frozen=True)
class ForeignName:
    """One name of another suite.

    Attributes:
        suites: whose files contain it.
        word: the parameter here that takes the same values; "" if there is none.
        values: a value that files contain -> the parameters that it stands for; none where it asks for what is done
            here anyway. A word for a parameter that is a list is added to the list.
        why: a sentence: why it does nothing here or does not exist, or what to write in place of other values.
        read: whether files with the name are accepted; otherwise the name is refused with what to write.
    """

    name: str
    suites: tuple[str, ...]
    word: str = ""
    values: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict)
    why: str = ""
    read: bool = True


def renamed(suites: tuple[str, ...], names: Mapping[str, str], *, read: bool) -> list[ForeignName]:
    """Return a row for each name with the parameter that takes the same values."""
    return [ForeignName(name, suites, word=word, read=read) for name, word in names.items()]


def idle(suites: tuple[str, ...], reasons: Mapping[str, str]) -> list[ForeignName]:
    """Return a row for each name that is read and has no effect, with the reason."""
    return [ForeignName(name, suites, why=why) for name, why in reasons.items()]


def absent(suites: tuple[str, ...], reasons: Mapping[str, str]) -> list[ForeignName]:
    """Return a row for each name that is refused, with the reason or what to write instead."""
    return [ForeignName(name, suites, why=why, read=False) for name, why in reasons.items()]


_ERNIE, _FORMERS, _BOTH = (ERNIE,), (PADDLEFORMERS,), (ERNIE, PADDLEFORMERS)
_VISION = "it belongs to vision, and no family here sees images"
_SERVER = "it belongs to another server; ours has port, host, max_num_seqs and max_waiting_requests"
_OFFLINE = "indexed .bin/.idx data cannot be read here; name text files (JSONL, Parquet) as train_dataset_path"

OF_ERNIE = [
    ForeignName(
        "download_hub",
        _BOTH,
        values={
            "huggingface": {"from_hf_hub": True},
            "aistudio": {"from_aistudio": True},
            "modelscope": {"from_modelscope": True},
        },
        why="write from_hf_hub, from_aistudio or from_modelscope: true",
    ),
    ForeignName(
        "quantization",
        _BOTH,
        values={
            "wint4": {"weight_quantize_algo": "weight_only_int4"},
            "wint8": {"weight_quantize_algo": "weight_only_int8"},
        },
        why="write weight_quantize_algo: weight_only_int8 or weight_only_int4",
    ),
    ForeignName(
        "use_recompute_loss_fn",
        _ERNIE,
        values={True: {"use_fused_head_and_loss_fn": True}, False: {}},
        why="write use_fused_head_and_loss_fn",
    ),
    *idle(
        _BOTH,
        {
            "loss_subbatch_seqlen": "use_fused_head_and_loss_fn computes the loss in pieces of a size of its own",
            "pre_alloc_memory": "memory is allocated when tensors need it",
            "load_choices": "weights are always read from safetensors files",
            "reasoning_parser": "`erniekit chat` prints answers as the model writes them",
            "tool_call_parser": "`erniekit server` finds calls of tools by the chat template",
            "max_num_batched_tokens": _SERVER,
            "metrics_port": _SERVER,
            "engine_worker_queue_port": _SERVER,
            "use_warmup": _SERVER,
            "gpu_memory_utilization": _SERVER,
            "block_size": _SERVER,
            "kv_cache_ratio": _SERVER,
            "copy_tokenizer": "an exported model always has its tokenizer",
        },
    ),
    ForeignName("enable_mm", _BOTH, values={False: {}}, why=_VISION),
    *absent(
        _BOTH,
        {
            "input_dir": _OFFLINE,
            "split": _OFFLINE,
            "data_impl": _OFFLINE,
            "eval_iters": "the number of batches of an evaluation is max_evaluate_steps",
            "mergekit_task_config": "models are not merged here; `erniekit export` merges adapters into their model",
            **dict.fromkeys(
                (
                    "use_moe", "moe_use_aux_free_update_coef", "moe_use_hard_gate", "text_dataset_path",
                    "text_dataset_prob", "modality_ratio", "variable_resolution", "pad_to_max_seqlen",
                    "render_timestamp", "serialize_output", "one_sample_in_one_seq", "add_sys_token", "same_data",
                    "trigger_data_prob", "from_scratch", "drop_history_with_k", "moe_gate_lr_ratio",
                    "visual_ld", "vit_lr_ratio", "pp_need_data", "pp_need_data_degree", "use_recompute_moe",
                    "multimodal", "limit_mm_per_prompt",
                ),
                _VISION,
            ),
        },
    ),
]  # fmt: skip

OF_PADDLEFORMERS = [
    *renamed(
        _FORMERS,
        {
            "tensor_model_parallel_size": "tensor_parallel_degree",
            "pipeline_model_parallel_size": "pipeline_parallel_degree",
            "virtual_pipeline_model_parallel_size": "virtual_pp_degree",
            "sharding_parallel_size": "sharding_parallel_degree",
            "sharding_degree": "sharding_parallel_degree",
            "router_aux_loss_coef": "moe_aux_loss_lambda",
            "apply_rope_fusion": "fuse_rope",
        },
        read=True,
    ),
    ForeignName(
        "use_expert_parallel",
        _FORMERS,
        values={True: {"moe_group": "data"}, False: {}},
        why="write moe_group: data",
    ),
    ForeignName(
        "recompute_method",
        _FORMERS,
        values={"uniform": {"recompute": True}},
        why="write recompute: true, and no_recompute_layers for layers that are not recomputed",
    ),
    *(
        ForeignName(
            name,
            _FORMERS,
            values={
                "flashmask": {}, "sdpa": {"use_flash_attention": False}, "eager": {"use_flash_attention": False},
            },
            why="write use_flash_attention: true or false",
        )
        for name in ("_attn_implementation", "attn_impl")
    ),
    *(
        ForeignName(name, _FORMERS, values={value: {parameter: word}, not value: {}})
        for name, value, parameter, word in (
            ("partial_send_recv", False, "pipeline_parallel_config", "disable_partial_send_recv"),
            ("batch_p2p_comm", False, "pipeline_parallel_config", "disable_batch_p2p_comm"),
            ("overlap_p2p_comm", True, "pipeline_parallel_config", "enable_overlap_p2p_comm"),
            ("clear_every_step_cache", True, "pipeline_parallel_config", "enable_clear_every_step_cache"),
            ("best_unbalanced_scheduler", True, "pipeline_parallel_config", "best_unbalanced_scheduler"),
            ("pp_delay_scale_loss", True, "pipeline_parallel_config", "enable_delay_scale_loss"),
            ("pp_release_grads", True, "pipeline_parallel_config", "enable_release_grads"),
            ("tp_delay_scale_loss", True, "tensor_parallel_config", "enable_delay_scale_loss"),
            ("tp_sync_param", True, "tensor_parallel_config", "sync_param"),
            ("sync_grad", True, "tensor_parallel_config", "sync_grad"),
            ("tp_sync_moment", True, "tensor_parallel_config", "sync_moment"),
            ("sd_release_grads", True, "sharding_parallel_config", "enable_release_grads"),
        )
    ),
    ForeignName(
        "convert_from_hf", _FORMERS, values={True: {}}, why="model folders are read in Hugging Face's layout only"
    ),
    ForeignName(
        "save_to_hf", _FORMERS, values={True: {}}, why="model folders are written in Hugging Face's layout only"
    ),
    ForeignName(
        "eval_with_do_generation",
        _FORMERS,
        values={False: {}},
        why="write eval_answers: the number of dialogues to answer in an evaluation",
    ),
    ForeignName("do_predict", _FORMERS, values={False: {}}, why="`erniekit generate` answers prompts"),
    ForeignName(
        "moe_router_force_load_balancing",
        _FORMERS,
        values={False: {}},
        why="it replaces the router's choice of experts, which only measures speed; moe_aux_loss_lambda balances them",
    ),
    ForeignName(
        "use_dualpipev", _FORMERS, values={False: {}}, why="write virtual_pp_degree, which shrinks the bubble, too"
    ),
    ForeignName("padding_free", _FORMERS, values={True: {"packing": True}, False: {}}),
    ForeignName("dataset_type", _FORMERS, values={"map": {}, "iterable": {}}, why=_OFFLINE),
    ForeignName("use_template", _FORMERS, values={True: {}}, why="write stage: PT for text without a chat template"),
    ForeignName(
        "dataloader_shuffle",
        _FORMERS,
        values={True: {"random_shuffle": True}, False: {"random_shuffle": False}},
    ),
    ForeignName(
        "truncation_strategy",
        _FORMERS,
        values={"delete": {"over_length_policy": "drop"}},
        why="write over_length_policy: drop, truncate_turns or error",
    ),
    *idle(
        _FORMERS,
        {
            "expert_parallel_degree": "`moe_group: data` distributes the experts over all ranks that train on "
            "different data",
            "ep_communication_type": "moe_multimodal_dispatch_use_allgather says how tokens reach their experts",
            "use_unified_moe": "there is one layer of experts",
            "moe_use_fusion_node": "there is one layer of experts",
            "moe_expert_fusion": "there is one layer of experts",
            "moe_shared_expert_overlap": "shared experts are computed with the others",
            "use_filtered_label_loss": "use_sparse_head_and_loss_fn computes the loss only where there is a label",
            "dataset_num_proc": "the number of processes that tokenise is chosen by the machine",
            "save_checkpoint_format": "unified_checkpoint decides whether checkpoints hold full tensors or a file per "
            "rank",
            "load_checkpoint_format": "a checkpoint says itself how it was written",
            "expert_model_parallel_size": "`moe_group: data` distributes the experts over all ranks that train on "
            "different data",
            "split_param": "`sharding: stage1` assigns whole tensors to ranks; `sharding_parallel_config: split_param` "
            "shards each one evenly",
            "data_parallel_size": "data parallelism takes the ranks that the other degrees leave",
            "recompute_num_layers": "each layer is recomputed by itself",
            "recompute_modules": "use_fused_head_and_loss_fn computes the loss in pieces, again in the backward pass",
            "eval_accumulation_steps": "an evaluation keeps sums, not the outputs of its batches",
            "template": "the chat template of the model's folder is used",
            "template_backend": "the chat template of the model's folder is used",
            "sharding_comm_buffer_size_MB": "the sizes of buffers are fleet's",
            "hybrid_parallel_topo_order": "ranks are numbered by data, pipeline, sharding and tensor, slowest first",
            "save_sharding_stage1_model_include_freeze_params": "a saved model always has all its weights",
            "load_sharded_model": "a checkpoint says itself how it was written",
            "save_sharded_model": "unified_checkpoint decides whether checkpoints hold full tensors or a file per rank",
            "load_via_cpu": "weights are always read one tensor after another",
            "truncate_packing": "over_length_policy decides what becomes of long samples",
            "max_estimate_samples": "steps are counted on all samples",
            "moe_subbatch_token_num_before_dispatch": "experts take the tokens of a micro-batch at once",
            "offload_queue": "offloaded states are loaded one tensor after another",
            "loss_subbatch_sequence_length": "use_fused_head_and_loss_fn computes the loss in pieces of its own size",
            "skip_profile_timer": "`erniekit` measures steps, not the phases of a step",
            "reorder_pipeline_priority": "the order of a pipeline's ranks is fleet's",
            "copy_custom_file_list": "an exported model has its tokenizer and configuration; code is never copied",
            "gc_interval": "Python collects its garbage by itself",
            "prefetch_factor": "dataloader_num_workers prepare a fixed number of batches ahead",
            "disable_pipeline_warmup": "every step of a pipeline is like the first",
        },
    ),
    *absent(
        _FORMERS,
        {
            "num_hidden_layers": "the shape of a model is that of its config.json",
            "tokenizer_name_or_path": "model and tokenizer come from one folder, model_name_or_path",
        },
    ),
]  # fmt: skip
