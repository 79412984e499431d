"""The keys of `config.json` that no architecture reads: which of them change nothing here, and why.

transformers, paddlenlp and others write many keys that do not decide what a model computes. They are named here, with
the reason. Every other key that an architecture does not read is refused by its name: it may change the computation,
and nobody would notice. So it went with `rope_parameters`, which replaced `rope_theta` and `rope_scaling` in
transformers 5. A key whose value is null says nothing. Needs neither Paddle nor NumPy.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from erniekit.model.architectures.architecture import Architecture, EncoderConfig

IGNORE_PARAMETER = "ignore_config_keys"

_INERT_BY_REASON: dict[str, str] = {  # keys that change nothing here, whatever their value
    "who wrote the file, and which program opens it": """
        architectures auto_map _name_or_path name_or_path model_name _commit_hash transformers_version paddlenlp_version
        paddleformers_version tokenizer_class unsloth_version unsloth_fixed transformers.js_config is_llama_config
        _attn_implementation _attn_implementation_autoset attn_implementation _experts_implementation
        experts_implementation""",
    "the type of stored weights, which their files say themselves": "torch_dtype dtype use_bfloat16 torchscript",
    "ids of tokens, which the tokenizer and generation_config.json name": """
        bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id mask_token_id
        decoder_start_token_id""",
    "how answers are sampled; parameters of generate and chat decide": """
        bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
        exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length
        max_new_tokens min_length min_new_tokens min_p no_repeat_ngram_size num_beam_groups num_beams
        num_return_sequences remove_invalid_values repetition_penalty suppress_tokens temperature top_k top_p
        typical_p cache_implementation epsilon_cutoff eta_cutoff guidance_scale max_time penalty_alpha
        renormalize_logits stop_strings _from_model_config""",
    "what a forward pass returns, beside the logits": """
        use_cache output_attentions output_hidden_states output_router_logits output_scores return_dict
        return_dict_in_generate use_return_dict use_last_token_for_generation tie_last_hidden_states""",
    "heads of other tasks, which a causal language model does not have": """
        id2label label2id num_labels num_choices problem_type finetuning_task task_specific_params prefix
        classifier_dropout""",
    "lengths of texts in earlier trainings": """
        seq_length max_sequence_length model_max_length tokenizer_model_max_length""",
    "training; parameters of the run decide": """
        router_aux_loss_coef router_z_loss_coef moe_aux_loss_lambda moe_z_loss_lambda moe_orthogonal_loss_lambda
        moe_group_orthogonal_loss moe_capacity moe_reverse_token_drop moe_use_aux_free moe_gate_detach
        moe_token_drop_policy moe_expert_capacity_factor moe_router_load_balancing_type moe_router_bias_update_rate
        moe_router_force_load_balancing mtp_loss_scaling_factor enable_delay_scale_loss enable_mtp_magic_send
        global_aux_loss token_balance_loss token_balance_seqlen ignored_index dpo_config num_acc_steps
        micro_batch_size sinkhorn_2gate sinkhorn_temp tf_legacy_loss""",
    "how a computation is arranged, not its result": """
        pretraining_tp chunk_size_feed_forward is_decoder use_flash_attention use_flash_attn
        use_flash_attention_for_generation immediate_clear_past_key_value use_sparse_flash_attn use_var_len_flash_attn
        use_fast_ln use_fused_rms_norm use_fused_rope use_fused_linear use_fused_dropout_add
        use_fused_linear_cross_entropy use_fused_head_and_loss_fn use_sparse_head_and_loss_fn use_filtered_label_loss
        loss_subbatch_sequence_length fuse_ln fuse_rms_norm fuse_linear fuse_rope fuse_swiglu fuse_softmax_mask
        fuse_attention_qkv fuse_attention_ffn fuse_attn_ffn fuse_gate_detach_matmul fuse_sequence_parallel_allreduce
        apply_rope_fusion moe_expert_fusion moe_router_fusion moe_grouped_gemm tensor_parallel_degree
        tensor_model_parallel_size tensor_parallel_rank tensor_parallel_output pipeline_parallel_degree
        pipeline_model_parallel_size virtual_pp_degree virtual_pipeline_model_parallel_size pp_seg_method
        sep_parallel_degree sep_parallel_size context_parallel_degree context_parallel_size
        expert_model_parallel_size sequence_parallel disable_ffn_model_parallel add_tail_layers moe_group
        moe_group_origin moe_rank moe_world_size moe_multimodal_dispatch_use_allgather moe_token_dispatcher_type
        ep_communication_type use_ep_comm_overlap recompute recompute_granularity recompute_use_reentrant
        refined_recompute skip_recompute_ops offload_recompute_inputs no_recompute_layers pp_recompute_interval
        use_recompute use_recompute_attn use_recompute_moe use_recompute_mtp use_recompute_lm_head
        use_recompute_loss_fn fp8_mem_configs using_precision_check use_pure_fp16""",
    "weights of a bias that no supported model has": "weight_share_add_bias",
}
INERT_KEYS: dict[str, str] = {key: reason for reason, keys in _INERT_BY_REASON.items() for key in keys.split()}

# Probabilities that act in training, here by parameters of the run: not lost without a word where they are not 0.
DROPOUT_KEYS: dict[str, str] = {
    "attention_dropout": "attention_probs_dropout_prob",
    "attention_dropout_prob": "attention_probs_dropout_prob",
    "attention_probs_dropout_prob": "attention_probs_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
    "hidden_dropout": "hidden_dropout_prob",
    "hidden_dropout_prob": "hidden_dropout_prob",
    "resid_pdrop": "hidden_dropout_prob",
    "embd_pdrop": "hidden_dropout_prob",
    "moe_dropout_prob": "hidden_dropout_prob",
    "moe_all_to_all_dropout": "hidden_dropout_prob",
}

# Keys that would change the computation, with the values that do not. Those of an architecture come on top.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1, 1.0),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_bias": (False,),
    "layer_types": ("full_attention",),  # of a list, every entry
    "use_sliding_window": (False,),
    "use_mrope": (False,),
    "rope_scaling_factor": (1, 1.0),  # paddlenlp's; acts beside rope_scaling_type
    "num_nextn_predict_layers": (0,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
}
_STORED_FORMATS = ("pack-quantized", "float-quantized", "nf4")  # of weights in few bits; see model/storage
# what paddlenlp writes of every model; these entries name a method where there is one
_PADDLENLP_METHODS = ("weight_quantize_algo", "quant_method", "quant_type")


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 80, 80, 40


def shown(value: Any) -> str:
    """Return a value of a file for a message: short, on one line, and nothing that steers a terminal."""
    return _SHORT.repr(value)


def shown_key(key: str) -> str:
    """Return a key of a file for a message, as it is written where that is harmless."""
    return key if key.isprintable() and len(key) <= 80 else shown(key)


def key_problems(
    architecture: Architecture | EncoderConfig,
    values: Mapping[str, Any],
    used: Collection[str],
    ignored: Sequence[str] = (),
    path: str = "",
) -> list[str]:
    """Return a line for each key that may change the computation in a way that is not available.

    Args:
        values: the keys of a `config.json`, or of a dictionary in it, without those that the user says to ignore.
        used: the keys that the architecture reads.
        ignored: the keys that the user says to ignore.
        path: stands in front of a key in messages, such as "text_config.".
    """
    problems = []
    neutral = {key: kept for key, kept in _NEUTRAL.items() if key not in used} | dict(architecture.neutral)
    for key, kept in neutral.items():
        value = values.get(key)
        entries = value if isinstance(value, list) and value else [value]
        if any(entry is not None and entry not in kept for entry in entries):
            problems.append(f"{path}{key}: {shown(value)} is not supported; only {kept[-1]!r} is")
    understood = {*used, *neutral, *INERT_KEYS, *DROPOUT_KEYS, *architecture.inert_keys, "quantization_config"}
    unknown = {
        shown_key(path + key): value for key, value in values.items() if key not in understood and value is not None
    }
    problems += [
        f"{key}: {shown(value)} is not understood, and may change what the model computes"
        for key, value in unknown.items()
    ]
    if unknown:
        problems.append(
            f"If it changes nothing, say so: {IGNORE_PARAMETER}: [{', '.join(unknown)}], with generate and chat "
            f"--{IGNORE_PARAMETER.replace('_', '-')} {','.join(unknown)}"
        )
    problems += [
        f"{IGNORE_PARAMETER}: {path}{key} is understood, so it cannot be ignored"
        for key in ignored
        if key in understood
    ]
    return problems + _quantization_problems(values.get("quantization_config"))


def key_remarks(values: Mapping[str, Any], ignored: Sequence[str], path: str = "") -> list[str]:
    """Return a line for each thing in a usable `config.json` that acts elsewhere and not here.

    Args:
        values: the keys of the file, or of a dictionary in it.
        ignored: the keys that the user says to ignore.
        path: as of `key_problems`.
    """
    remarks = [
        f"{shown_key(path + key)}: {shown(values[key])} is ignored, as {IGNORE_PARAMETER} asks; a saved model has no "
        "such key"
        if key in values
        else f"{shown_key(path + key)}: {IGNORE_PARAMETER} names it, but there is no such key"
        for key in dict.fromkeys(ignored)
    ]
    for key, parameter in DROPOUT_KEYS.items():
        if values.get(key):
            remarks.append(f"{path}{key}: {shown(values[key])} has no effect here; the run's {parameter} decides")
    return remarks


def _quantization_problems(quantized: Any) -> list[str]:
    if quantized is None:
        return []
    if isinstance(quantized, dict):
        if quantized.get("format") in _STORED_FORMATS:
            return []
        if "weight_quantize_algo" in quantized and not any(quantized.get(name) for name in _PADDLENLP_METHODS):
            return []
    named = quantized.get("format") or quantized.get("quant_method") if isinstance(quantized, dict) else quantized
    return [f"quantization_config: weights as {shown(named)} cannot be read; formats: {', '.join(_STORED_FORMATS)}"]
