"""What trl, LLaMA-Factory, ms-swift and verl call the parameters of learning from feedback, and what to write here."""

from __future__ import annotations

from erniekit.config.foreign_names import (
    LLAMA_FACTORY,
    MS_SWIFT,
    TRANSFORMERS,
    VERL,
    ForeignName,
    absent,
    renamed,
)

_LF, _HF, _SWIFT, _VERL = (LLAMA_FACTORY,), (TRANSFORMERS,), (MS_SWIFT,), (VERL,)
_BOTH = (TRANSFORMERS, MS_SWIFT)
_ENGINE = "the model that is trained answers itself, so there is no second engine to place or to feed"
_FUNCTIONS = "write rewards: python:FILE.py:FUNCTION for a function of yours, or one of the others by name"

FEEDBACK_HINTS: list[ForeignName] = [
    *renamed(
        _BOTH,
        {
            "max_completion_length": "max_completion_len",
            "epsilon": "clip_ratio_low",
            "epsilon_high": "clip_ratio_high",
            "delta": "clip_ratio_max",
        },
        read=False,
    ),
    *renamed(_SWIFT, {"dynamic_sample": "dynamic_sampling", "max_resample_times": "max_sampling_rounds"}, read=False),
    *renamed(
        _VERL,
        {
            "actor_rollout_ref.model.path": "model_name_or_path",
            "data.train_files": "train_dataset_path",
            "data.val_files": "eval_dataset_path",
            "data.max_prompt_length": "max_prompt_len",
            "data.max_response_length": "max_completion_len",
            "actor_rollout_ref.rollout.n": "num_generations",
            "actor_rollout_ref.rollout.temperature": "rollout_temperature",
            "actor_rollout_ref.actor.optim.lr": "learning_rate",
            "actor_rollout_ref.actor.ppo_epochs": "num_iterations",
            "actor_rollout_ref.actor.clip_ratio_low": "clip_ratio_low",
            "actor_rollout_ref.actor.clip_ratio_high": "clip_ratio_high",
            "actor_rollout_ref.actor.clip_ratio_c": "clip_ratio_max",
            "actor_rollout_ref.actor.kl_loss_coef": "beta",
            "algorithm.filter_groups.enable": "dynamic_sampling",
            "algorithm.filter_groups.max_num_gen_batches": "max_sampling_rounds",
            "algorithm.norm_adv_by_std_in_grpo": "scale_rewards",
            "trainer.total_epochs": "num_train_epochs",
            "trainer.save_freq": "save_steps",
            "trainer.default_local_dir": "output_dir",
        },
        read=False,
    ),
    *absent(
        _BOTH,
        {
            "reward_funcs": _FUNCTIONS,
            "mask_truncated_completions": "write overlong_handling: mask",
            "generation_batch_size": "write steps_per_generation; a rollout has the answers of so many steps",
            "use_vllm": _ENGINE,
            "vllm_mode": _ENGINE,
            "vllm_gpu_memory_utilization": _ENGINE,
            "vllm_tensor_parallel_size": _ENGINE,
            "log_completions": "every answer is written to rollouts.jsonl in output_dir",
            "sync_ref_model": "write ref_model_update_steps, the steps after which the reference becomes the model",
            "ref_model_mixup_alpha": "write ref_model_update_steps; the reference then becomes the model, unmixed",
            "ref_model_sync_steps": "write ref_model_update_steps",
            "top_entropy_quantile": "all tokens of an answer are trained",
            "lmbda": "write stage: DISTILL; docs/feedback-training.md says whose answers it learns from",
            "seq_kd": "let the teacher answer with `erniekit generate`, and train on that with stage: SFT",
        },
    ),
    *absent(
        _HF,
        {
            "reward_model_path": "write rewards: reward_model:FOLDER, with stage: GRPO",
            "reward_model_name_or_path": "write rewards: reward_model:FOLDER, with stage: GRPO",
            "precompute_ref_log_probs": "write reference_model: precomputed",
            "num_ppo_epochs": "write num_iterations, with stage: GRPO and loss_type: rloo",
            "rloo_k": "write num_generations, with stage: GRPO and loss_type: rloo",
            "kl_coef": "write beta, with stage: GRPO",
            "cliprange": "write clip_ratio_low and clip_ratio_high, with stage: GRPO",
        },
    ),
    *absent(
        _SWIFT,
        {
            "rlhf_type": "write stage: DPO, KTO, RM, DISTILL or GRPO",
            "external_plugins": _FUNCTIONS,
            "overlong_filter": "write overlong_handling: mask",
            "soft_max_length": "write max_completion_len, and overlong_handling: soft",
            "soft_cache_length": "write overlong_buffer, and overlong_handling: soft",
            "num_infer_workers": _ENGINE,
            "sleep_level": _ENGINE,
            "offload_model": _ENGINE,
            "teacher_model": "write stage: DISTILL, and teacher_model_name_or_path",
            "log_entropy": "the entropy is always reported",
        },
    ),
    *absent(
        (LLAMA_FACTORY, MS_SWIFT),
        {"reward_model": "write rewards: reward_model:FOLDER, with stage: GRPO"},
    ),
    *absent(
        _LF,
        {
            "kto_chosen_weight": "write desirable_weight, with stage: KTO",
            "kto_rejected_weight": "write undesirable_weight, with stage: KTO",
            "ppo_epochs": "write num_iterations, with stage: GRPO",
            "ppo_buffer_size": "write steps_per_generation, with stage: GRPO",
            "ppo_score_norm": "advantages of stage GRPO are normalised in groups",
            "ppo_target": "the weight of the divergence is beta, and stays the same",
            "ppo_whiten_rewards": "write loss_type: reinforce++, which normalises over the rollout",
            "reward_model_type": "write rewards: reward_model:FOLDER, with stage: GRPO",
        },
    ),
    *absent(
        _VERL,
        {
            "algorithm.adv_estimator": "write stage: GRPO, and loss_type: grpo, rloo or reinforce++",
            "actor_rollout_ref.actor.loss_agg_mode": "write loss_type: dapo (token-mean), grpo (seq-mean-token-mean) "
            "or dr_grpo (seq-mean-token-sum-norm)",
            "actor_rollout_ref.actor.kl_loss_type": "write kl_estimator: k1 (kl), k2 (mse) or k3 (low_var_kl)",
            "actor_rollout_ref.actor.use_kl_loss": "write beta, 0 for none",
            "algorithm.use_kl_in_reward": "write loss_type: rloo or reinforce++, and beta",
            "actor_rollout_ref.actor.ppo_mini_batch_size": "write steps_per_generation, and "
            "gradient_accumulation_steps",
            "data.train_batch_size": "a rollout has per_device_train_batch_size x gradient_accumulation_steps x ranks "
            "x steps_per_generation answers",
            "data.prompt_key": "the prompt is the field `prompt` or `messages` of a record",
            "data.reward_fn_key": "every reward scores every answer; a function gets data_source as an argument",
            "custom_reward_function.path": _FUNCTIONS,
            "custom_reward_function.name": _FUNCTIONS,
            "reward_model.enable": "write rewards: reward_model:FOLDER",
            "reward_model.overlong_buffer.enable": "write overlong_handling: soft",
            "reward_model.overlong_buffer.len": "write overlong_buffer, and overlong_handling: soft",
            "actor_rollout_ref.rollout.name": _ENGINE,
            "actor_rollout_ref.rollout.gpu_memory_utilization": _ENGINE,
            "actor_rollout_ref.rollout.tensor_model_parallel_size": "write tensor_parallel_degree: training and "
            "answers have the same layout",
        },
    ),
]
