"""The names that other suites' configuration files use, with the word for each one here, or why there is none.

Names of ERNIE's and PaddleFormers' files are read: `config/foreign.py` translates them and says so. Names of other
suites are refused with the line to write instead. docs/migrating.md is generated from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

ERNIE, PADDLEFORMERS = "ERNIE", "PaddleFormers"
LLAMA_FACTORY, AXOLOTL, TRANSFORMERS = "LLaMA-Factory", "axolotl", "trl and Transformers"
SUITES = (ERNIE, PADDLEFORMERS, LLAMA_FACTORY, AXOLOTL, TRANSFORMERS)


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


def _renamed(suites: tuple[str, ...], names: Mapping[str, str], *, read: bool) -> list[ForeignName]:
    return [ForeignName(name, suites, word=word, read=read) for name, word in names.items()]


def _idle(suites: tuple[str, ...], reasons: Mapping[str, str]) -> list[ForeignName]:
    return [ForeignName(name, suites, why=why) for name, why in reasons.items()]


def _absent(suites: tuple[str, ...], reasons: Mapping[str, str]) -> list[ForeignName]:
    return [ForeignName(name, suites, why=why, read=False) for name, why in reasons.items()]


def _flag(parameter: str, word: str, value: bool = True) -> Mapping[Any, Mapping[str, Any]]:
    """The values of a boolean that stands for a word of a list."""
    return {value: {parameter: word}, not value: {}}


_ERNIE, _FORMERS, _BOTH = (ERNIE,), (PADDLEFORMERS,), (ERNIE, PADDLEFORMERS)
_VISION = "it belongs to vision, and ERNIEKit trains text models"
_SERVER = "it belongs to the server; `erniekit chat` answers one dialogue in the terminal"
_OFFLINE = "indexed .bin/.idx data cannot be read here; name text files (JSONL, Parquet) as train_dataset_path"

_OF_ERNIE = [
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
    *_idle(
        _BOTH,
        {
            "loss_subbatch_seqlen": "use_fused_head_and_loss_fn computes the loss in pieces of a size of its own",
            "pre_alloc_memory": "memory is allocated when tensors need it",
            "load_choices": "weights are always read from safetensors files",
            "reasoning_parser": "`erniekit chat` prints answers as the model writes them",
            "tool_call_parser": "`erniekit chat` prints answers as the model writes them",
            "max_num_seqs": _SERVER,
            "max_num_batched_tokens": _SERVER,
            "host": _SERVER,
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
    *_absent(
        _BOTH,
        {
            "input_dir": _OFFLINE,
            "dataset_type": _OFFLINE,
            "split": _OFFLINE,
            "data_impl": _OFFLINE,
            "eval_iters": "the number of batches of an evaluation is max_evaluate_steps",
            "mergekit_task_config": "models are not merged here; `erniekit export` merges adapters into their model",
            **dict.fromkeys(
                (
                    "use_moe", "moe_use_aux_free_update_coef", "moe_use_hard_gate", "text_dataset_path",
                    "text_dataset_prob", "modality_ratio", "variable_resolution", "pad_to_max_seqlen",
                    "render_timestamp", "serialize_output", "one_sample_in_one_seq", "add_sys_token", "same_data",
                    "freeze_config", "trigger_data_prob", "from_scratch", "drop_history_with_k", "moe_gate_lr_ratio",
                    "visual_ld", "vit_lr_ratio", "pp_need_data", "pp_need_data_degree", "use_recompute_moe",
                    "multimodal", "limit_mm_per_prompt",
                ),
                _VISION,
            ),
        },
    ),
]  # fmt: skip

_OF_PADDLEFORMERS = [
    *_renamed(
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
    ForeignName("partial_send_recv", _FORMERS, values=_flag("pipeline_parallel_config", "disable_partial_send_recv", False)),
    ForeignName("batch_p2p_comm", _FORMERS, values=_flag("pipeline_parallel_config", "disable_batch_p2p_comm", False)),
    ForeignName("overlap_p2p_comm", _FORMERS, values=_flag("pipeline_parallel_config", "enable_overlap_p2p_comm")),
    ForeignName("clear_every_step_cache", _FORMERS, values=_flag("pipeline_parallel_config", "enable_clear_every_step_cache")),
    ForeignName("best_unbalanced_scheduler", _FORMERS, values=_flag("pipeline_parallel_config", "best_unbalanced_scheduler")),
    ForeignName("pp_delay_scale_loss", _FORMERS, values=_flag("pipeline_parallel_config", "enable_delay_scale_loss")),
    ForeignName("pp_release_grads", _FORMERS, values=_flag("pipeline_parallel_config", "enable_release_grads")),
    ForeignName("tp_delay_scale_loss", _FORMERS, values=_flag("tensor_parallel_config", "enable_delay_scale_loss")),
    ForeignName("tp_sync_param", _FORMERS, values=_flag("tensor_parallel_config", "sync_param")),
    ForeignName("sync_grad", _FORMERS, values=_flag("tensor_parallel_config", "sync_grad")),
    ForeignName("tp_sync_moment", _FORMERS, values=_flag("tensor_parallel_config", "sync_moment")),
    ForeignName("sd_release_grads", _FORMERS, values=_flag("sharding_parallel_config", "enable_release_grads")),
    ForeignName(
        "convert_from_hf", _FORMERS, values={True: {}}, why="model folders are read in Hugging Face's layout only"
    ),
    ForeignName("save_to_hf", _FORMERS, values={True: {}}, why="model folders are written in Hugging Face's layout only"),
    ForeignName(
        "eval_with_do_generation",
        _FORMERS,
        values={False: {}},
        why="write eval_answers: the number of dialogues to answer in an evaluation",
    ),
    ForeignName(
        "do_predict", _FORMERS, values={False: {}}, why="`erniekit generate` answers prompts, `erniekit eval` held-out ones"
    ),
    ForeignName(
        "moe_router_force_load_balancing",
        _FORMERS,
        values={False: {}},
        why="it replaces the router's choice of experts, which only measures speed; moe_aux_loss_lambda balances them",
    ),
    ForeignName("use_dualpipev", _FORMERS, values={False: {}}, why="write virtual_pp_degree, which shrinks the bubble, too"),
    ForeignName("padding_free", _FORMERS, values={True: {"packing": True}, False: {}}),
    *_idle(
        _FORMERS,
        {
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
            "loss_subbatch_sequence_length": "use_fused_head_and_loss_fn computes the loss in pieces of a size of its own",
            "skip_profile_timer": "`erniekit` measures steps, not the phases of a step",
            "reorder_pipeline_priority": "the order of a pipeline's ranks is fleet's",
            "copy_custom_file_list": "an exported model has its tokenizer and configuration; code is never copied",
            "gc_interval": "Python collects its garbage by itself",
            "prefetch_factor": "dataloader_num_workers prepare a fixed number of batches ahead",
            "disable_pipeline_warmup": "every step of a pipeline is like the first",
        },
    ),
    *_absent(
        _FORMERS,
        {"tokenizer_name_or_path": "model and tokenizer come from one folder, model_name_or_path"},
    ),
]  # fmt: skip

# Names that several other suites share, and their words here.
_OTHER = (LLAMA_FACTORY, AXOLOTL, TRANSFORMERS)
_LF, _AX, _HF = (LLAMA_FACTORY,), (AXOLOTL,), (TRANSFORMERS,)
_LF_HF, _AX_HF = (LLAMA_FACTORY, TRANSFORMERS), (AXOLOTL, TRANSFORMERS)
_REPORT = "write report_to: visualdl or tensorboard"
_SPLIT = "held-out data is a file of its own: write eval_dataset_path"
_WARMUP = "write warmup_steps; `erniekit validate --data` counts the steps of a run"
_DEEPSPEED = "write sharding: stage1, stage2 or stage3"
_CODE = "code of a model folder is never run"

_HINTS = [
    *_renamed(
        _OTHER,
        {
            "eval_strategy": "evaluation_strategy",
            "gradient_checkpointing": "recompute",
            "lora_r": "lora_rank",
        },
        read=False,
    ),
    *_renamed(
        _LF,
        {
            "dataset": "train_dataset_path",
            "eval_dataset": "eval_dataset_path",
            "cutoff_len": "max_seq_len",
            "adapter_name_or_path": "lora_path",
            "lora_target": "lora_target_modules",
            "use_rslora": "rslora",
            "use_dora": "dora",
            "loraplus_lr_ratio": "lora_plus_scale",
            "max_samples": "num_samples_each_epoch",
            "interleave_probs": "train_dataset_prob",
            "pref_beta": "beta",
            "pref_loss": "loss_type",
            "pref_ftx": "sft_loss_ratio",
            "dpo_label_smoothing": "label_smoothing",
            "ref_model": "ref_model_name_or_path",
            "neat_packing": "packing",
            "export_size": "max_shard_size",
            "export_hub_model_id": "hf_hub_id",
            "ddp_timeout": "distributed_timeout",
        },
        read=False,
    ),
    *_renamed(
        _AX,
        {
            "base_model": "model_name_or_path",
            "sequence_len": "max_seq_len",
            "sample_packing": "packing",
            "micro_batch_size": "per_device_train_batch_size",
            "eval_batch_size": "per_device_eval_batch_size",
            "num_epochs": "num_train_epochs",
            "optimizer": "optim",
            "lr_scheduler": "lr_scheduler_type",
            "lora_model_dir": "lora_path",
            "peft_use_dora": "dora",
            "peft_use_rslora": "rslora",
            "loraplus_lr_ratio": "lora_plus_scale",
            "dpo_beta": "beta",
            "rl_beta": "beta",
            "flash_attention": "use_flash_attention",
            "hub_model_id": "hf_hub_id",
            "dataset_prepared_path": "data_cache_dir",
        },
        read=False,
    ),
    *_renamed(
        _HF,
        {
            "dataset_name": "train_dataset_path",
            "train_file": "train_dataset_path",
            "data_path": "train_dataset_path",
            "validation_file": "eval_dataset_path",
            "max_length": "max_seq_len",
            "max_seq_length": "max_seq_len",
            "model_max_length": "max_seq_len",
            "block_size": "max_seq_len",
            "max_prompt_length": "max_prompt_len",
            "use_peft": "lora",
            "r": "lora_rank",
            "target_modules": "lora_target_modules",
            "use_rslora": "rslora",
            "use_dora": "dora",
            "rpo_alpha": "sft_loss_ratio",
            "save_only_model": "ignore_save_lr_and_optim",
            "hub_model_id": "hf_hub_id",
            "ddp_timeout": "distributed_timeout",
            "per_gpu_train_batch_size": "per_device_train_batch_size",
            "model": "model_name_or_path",
            "model_name": "model_name_or_path",
            "epochs": "num_train_epochs",
            "lr": "learning_rate",
            "seq_len": "max_seq_len",
            "warmup": "warmup_steps",
            "gradient_clipping": "max_grad_norm",
        },
        read=False,
    ),
    *_absent(
        _OTHER,
        {
            "warmup_ratio": _WARMUP,
            "deepspeed": _DEEPSPEED,
            "fsdp": _DEEPSPEED,
            "fsdp_config": _DEEPSPEED,
            "trust_remote_code": _CODE,
            "push_to_hub": "write hf_hub_id, or `erniekit export --push REPO`",
            "neftune_noise_alpha": "noise on embeddings is not implemented",
            "load_in_4bit": "write weight_quantize_algo: nf4, with lora: true",
            "load_in_8bit": "write weight_quantize_algo: weight_only_int8, with lora: true",
            "tf32": "products in TF32 are not offered; write bf16: true",
            "group_by_length": "write batch_tokens, which batches samples of similar length",
            "chat_template": "the chat template of the model's folder is used",
            "torch_compile": "ERNIEKit runs on PaddlePaddle",
            "remove_unused_columns": "fields of records that are not used are reported",
            "early_stopping_steps": "write early_stopping_patience, in evaluations",
            "run_name": "runs are told apart by output_dir",
            "flash_attn": "write use_flash_attention: true or false",
        },
    ),
    ForeignName("compute_dtype", _OTHER, word="compute_type", read=False),
    ForeignName("torch_dtype", _OTHER, why="write compute_type: bf16, fp16 or fp32", read=False),
    *_absent(
        _LF,
        {
            "finetuning_type": "write fine_tuning: LoRA or Full",
            "dataset_dir": "write the paths of the files themselves as train_dataset_path",
            "overwrite_cache": "tokens are cached by the content of data and tokenizer, so the cache is never stale",
            "preprocessing_num_workers": "the number of processes that tokenise is chosen by the machine",
            "val_size": _SPLIT,
            "plot_loss": "every run draws loss.png",
            "quantization_bit": "write weight_quantize_algo: weight_only_int8 or nf4, with lora: true",
            "quantization_method": "write weight_quantize_algo: weight_only_int8 or nf4, with lora: true",
            "train_on_prompt": "only answers are trained in stage SFT; stage PT trains on all of a text",
            "mask_history": "a record's `label` says which answers are trained",
            "enable_liger_kernel": "write fuse_rope, fuse_rms_norm, fuse_swiglu: true",
            "use_unsloth": "write fuse_rope, fuse_rms_norm, fuse_swiglu: true",
            "disable_gradient_checkpointing": "write recompute: true or false",
            "pissa_init": "write lora_init: pissa",
            "infer_backend": "`erniekit generate` and `chat` have one engine",
            "infer_dtype": "write compute_type: bf16, fp16 or fp32",
            "export_dir": "write `erniekit export FILE --output DIR`",
            "export_quantization_bit": "write `erniekit export FILE --output DIR weight_quantize_algo=nf4`",
            "export_legacy_format": "models are written as safetensors only",
            "use_swanlab": _REPORT,
            "reward_model": "stages are PT, SFT and DPO",
            "freeze_trainable_layers": "all weights or adapters are trained",
        },
    ),
    *_absent(
        _AX,
        {
            "datasets": "write train_dataset_path: FILE and train_dataset_type: alpaca, messages, ...",
            "test_datasets": "write eval_dataset_path: FILE and eval_dataset_type: alpaca, messages, ...",
            "adapter": "write fine_tuning: LoRA; qlora also takes weight_quantize_algo: nf4",
            "rl": "write stage: DPO, and loss_type",
            "lora_target_linear": "adapters reach all linear layers where lora_target_modules is not written",
            "val_set_size": _SPLIT,
            "evals_per_epoch": "write eval_steps",
            "saves_per_epoch": "write save_strategy: steps and save_steps, or save_strategy: epoch",
            "pad_to_sequence_len": "rows are padded to the longest of their micro-batch",
            "eval_sample_packing": "packing holds for evaluation, too",
            "train_on_inputs": "only answers are trained in stage SFT; stage PT trains on all of a text",
            "model_type": "config.json of the model names its family",
            "tokenizer_type": "the files of the tokenizer say what it is",
            "special_tokens": "tokens are those of the model's tokenizer",
            "xformers_attention": "write use_flash_attention: true or false",
            "sdp_attention": "write use_flash_attention: true or false",
            "wandb_project": _REPORT,
            "wandb_entity": _REPORT,
            "wandb_watch": _REPORT,
            "wandb_name": _REPORT,
            "wandb_log_model": _REPORT,
            "local_rank": "the launcher numbers the ranks",
            "strict": "an unknown name is always refused",
            "auto_resume_from_checkpoints": "write resume_from_checkpoint: true",
            "gradient_checkpointing_kwargs": "write recompute_use_reentrant: true or false",
            "debug": "`erniekit train FILE --try` checks a configuration on one sample",
        },
    ),
    *_absent(
        _HF,
        {
            "attn_implementation": "write use_flash_attention: true or false",
            "dtype": "write compute_type: bf16, fp16 or fp32",
            "data": "write train_dataset_path",
            "dataset_text_field": "records of type text have the field text",
            "eval_packing": "packing holds for evaluation, too",
            "completion_only_loss": "only answers are trained in stage SFT",
            "assistant_only_loss": "only answers are trained in stage SFT",
            "max_completion_length": "answers take what the prompt leaves of max_seq_len",
            "load_best_model": "write load_best_model_at_end",
            "auto_find_batch_size": "`erniekit validate` estimates the memory of a batch size",
            "logging_first_step": "the first step is reported where logging_steps is 1",
            "lr_scheduler_kwargs": "write min_lr, num_cycles, lr_end or power",
            "data_seed": "seed decides the order of samples, too",
            "prediction_loss_only": "an evaluation keeps sums, not the outputs of its batches",
            "batch": "write per_device_train_batch_size",
            "no_cuda": "write device: cpu",
            "use_cpu": "write device: cpu",
        },
    ),
]  # fmt: skip


def _merged(rows: list[ForeignName]) -> dict[str, ForeignName]:
    """Return the rows by name; a name of several suites keeps its first row and gets all the suites."""
    table: dict[str, ForeignName] = {}
    for row in rows:
        known = table.get(row.name)
        suites = (*known.suites, *row.suites) if known else row.suites
        table[row.name] = replace(known or row, suites=tuple(dict.fromkeys(suites)))
    return table


FOREIGN_NAMES: Mapping[str, ForeignName] = _merged([*_OF_ERNIE, *_OF_PADDLEFORMERS, *_HINTS])
