"""Random transformers models of every family, for the parity tests and for recording vectors."""

from __future__ import annotations

import json

import numpy as np
import torch
import transformers

VOCABULARY = 61
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# the factor is the ratio of the lengths: where it is not, versions of transformers differ
YARN = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "max_position_embeddings": 256,
}
GEMMA = {"head_dim": 18, "sliding_window": 16, "query_pre_attn_scalar": 12, "rope_local_base_freq": 100.0}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 18, "sliding_window": 16}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 256,
}

# Every case: family and what differs from `random_model`'s shape.
CASES = {
    "llama: grouped queries, untied": ("llama", {}),
    "llama: tied, one key head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama: biases, own head size": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 18}),
    "llama: Llama 3's scaling": ("llama", {"rope_scaling": LLAMA3_SCALING, "rope_theta": 500000.0}),
    "llama: linear scaling": ("llama", {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "llama: yarn": ("llama", YARN),
    "mistral: a window of 16": ("mistral", {"sliding_window": 16}),
    "mistral: no window, tied, own head size": (
        "mistral",
        {"sliding_window": None, "tie_word_embeddings": True, "head_dim": 18},
    ),
    "qwen2: grouped queries, untied": ("qwen2", {}),
    "qwen2: tied, all key heads, other theta": (
        "qwen2",
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "rope_theta": 1e6},
    ),
    "qwen2: yarn without original length": (
        "qwen2",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2}},
    ),
    "qwen3: own head size": ("qwen3", {"head_dim": 18}),
    "qwen3: tied, bias, other epsilon": (
        "qwen3",
        {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 8, "rms_norm_eps": 1e-3},
    ),
    "qwen3_moe: every layer, weights of experts as they are": (
        "qwen3_moe",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    ),
    "qwen3_moe: every other layer but one, normalised, tied, own head size": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "head_dim": 18,
        },
    ),
    "mixtral: a window, grouped queries": ("mixtral", {"num_local_experts": 5, "sliding_window": 16}),
    "mixtral: three experts a token, tied, own head size": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 3, "tie_word_embeddings": True, "head_dim": 18},
    ),
    "qwen2_moe: a gated shared expert beside experts as they are": (
        "qwen2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
        },
    ),
    "qwen2_moe: every other layer, normalised, tied": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "tie_word_embeddings": True,
        },
    ),
    "granite: all multipliers": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
        },
    ),
    "granite: biases, tied, no multipliers": (
        "granite",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "smollm3: every fourth layer without positions": ("smollm3", {"num_hidden_layers": 4}),
    "smollm3: layers named, untied, biases of MLPs": (
        "smollm3",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 0],
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "olmo2: grouped queries": ("olmo2", {}),
    "olmo2: bias, all key heads, other theta": (
        "olmo2",
        {"attention_bias": True, "num_key_value_heads": 4, "rope_theta": 5e5},
    ),
    "glm4: half of each head turned": ("glm4", {"head_dim": 16}),
    "glm4: a quarter, no biases, tied": (
        "glm4",
        {"head_dim": 24, "partial_rotary_factor": 0.25, "attention_bias": False, "tie_word_embeddings": True},
    ),
    "gemma3_text: every other layer with a window, linear scaling": (
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        },
    ),
    "gemma3_text: every third layer without a window, untied, bias": (
        "gemma3_text",
        {
            **GEMMA,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 3,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "sliding_window": 40,
        },
    ),
    "gpt_oss: layers of both types, sinks": ("gpt_oss", {**GPT_OSS, "rope_scaling": None}),
    "gpt_oss: yarn without whole pairs, one key head": (
        "gpt_oss",
        {
            **GPT_OSS,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention"],
            **YARN,
            "rope_scaling": {**YARN["rope_scaling"], "truncate": False},
        },
    ),
    "deepseek_v3: groups of experts, yarn": (
        "deepseek_v3",
        {**DEEPSEEK, "rope_scaling": {**YARN["rope_scaling"], "mscale": 0.7, "mscale_all_dim": 0.5}},
    ),
    "deepseek_v3: no latent of queries, one group, values as wide as keys": (
        "deepseek_v3",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "v_head_dim": 14,
            "attention_bias": True,
            "norm_topk_prob": False,
        },
    ),
    "ernie4_5_moe: shared and routed experts": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_intermediate_size": 12,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "num_hidden_layers": 3,
        },
    ),
    "ernie4_5_moe: no shared experts, every layer": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 3,
            "moe_intermediate_size": 12,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_norm_min": 0.95,
        },
    ),
    "ernie4_5_moe: every other layer, up to the third, untied": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 3,
            "moe_k": 2,
            "moe_intermediate_size": 12,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 2,
            "moe_layer_interval": 2,
            "num_hidden_layers": 4,
            "tie_word_embeddings": False,
        },
    ),
    "ernie4_5: tied": ("ernie4_5", {"tie_word_embeddings": True, "head_dim": 8}),
    "ernie4_5: one key head, untied": (
        "ernie4_5",
        {"num_key_value_heads": 1, "tie_word_embeddings": False, "head_dim": 8},
    ),
    "ernie4_5: as many key heads, bias": ("ernie4_5", {"num_key_value_heads": 4, "use_bias": True, "head_dim": 8}),
    "ernie4_5: odd head size": ("ernie4_5", {"head_dim": 18, "use_bias": True, "tie_word_embeddings": False}),
    "ernie4_5: three layers, other theta and epsilon": (
        "ernie4_5",
        {"num_hidden_layers": 3, "rope_theta": 10000.0, "rms_norm_eps": 1e-3, "head_dim": 8},
    ),
    "ernie4_5: linear scaling": ("ernie4_5", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "head_dim": 8}),
}
CLASSES = {
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "ernie4_5": (transformers.Ernie4_5Config, transformers.Ernie4_5ForCausalLM),
    "ernie4_5_moe": (transformers.Ernie4_5_MoeConfig, transformers.Ernie4_5_MoeForCausalLM),
    "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "glm4": (transformers.Glm4Config, transformers.Glm4ForCausalLM),
    "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
    "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
}


def random_model(family, seed=0, **shape):
    """A transformers model whose weights are large enough, and whose norms uneven enough, for errors to show."""
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        **shape,
    }
    torch.manual_seed(seed)
    config_class, model_class = CLASSES[family]
    model = model_class(config_class(**values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.4, 1.8)
                parameter.sub_(1.0 if family == "gemma3_text" else 0.0)  # it adds 1
            elif name.endswith("e_score_correction_bias"):
                parameter.normal_(0.0, 0.05)  # more would leave experts without any token
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            else:
                parameter.normal_(0.0, 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.05)
    return model.eval()


def record(model, path, ids, labels):
    """Write the model, its logits and the gradients of its summed loss, with the versions that computed them."""
    logits = model(input_ids=torch.tensor(ids[None])).logits
    loss = torch.nn.functional.cross_entropy(logits[0], torch.tensor(labels), reduction="sum")
    loss.backward()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    np.savez_compressed(
        path,
        config=np.frombuffer(json.dumps(model.config.to_dict()).encode(), np.uint8),
        versions=np.frombuffer(json.dumps(versions).encode(), np.uint8),
        ids=ids,
        labels=labels,
        logits=logits[0].detach().numpy(),
        loss=np.float32(loss.item()),
        **{f"weight/{name}": parameter.detach().numpy() for name, parameter in model.named_parameters()},
        **{f"gradient/{name}": parameter.grad.numpy() for name, parameter in model.named_parameters()},
    )
    print(f"{path}: {path.stat().st_size:,} bytes, {versions}")
