"""2.14 GRPO: groups of answers from the weights that are being trained, and the loss over them."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, Derived, parameter, rule, section, when

POLICY_LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce++")
KL_IN_REWARD = ("rloo", "reinforce++")  # the others add the divergence to the loss
SCALED = ("grpo", "dapo", "gspo")  # whose advantages are divided by the deviation of their group
OF_SEQUENCES = ("gspo", "rloo")  # whose ratio is that of a whole answer
_CLIP_HIGH = {"dapo": 0.28, "gspo": 4e-4}
_UNUSED = (
    "greedy_intokens", "buffer_size", "batch_tokens", "max_batch_samples", "min_sample_len",
    "max_sample_len", "curriculum", "dataloader_num_workers", "distributed_dataloader", "multi_token_pred_lambda",
    "max_evaluate_steps", "per_device_eval_batch_size", "media_dir",
)  # fmt: skip


def _clip_low(builder: ConfigBuilder) -> tuple[float, str]:
    return (3e-4, "with loss_type gspo") if builder["loss_type"] == "gspo" else (0.2, "")


def _clip_high(builder: ConfigBuilder) -> tuple[float, str]:
    loss = builder["loss_type"]
    return (_CLIP_HIGH[loss], f"with loss_type {loss}") if loss in _CLIP_HIGH else (0.2, "")


def _estimator(builder: ConfigBuilder) -> tuple[str, str]:
    loss = builder["loss_type"]
    return ("k1", f"with loss_type {loss}") if loss in KL_IN_REWARD else ("k3", "")


def _level(builder: ConfigBuilder) -> tuple[str, str]:
    loss = builder["loss_type"]
    return ("sequence", f"with loss_type {loss}") if loss in OF_SEQUENCES else ("token", "")


def _scales(builder: ConfigBuilder) -> tuple[bool, str]:
    loss = builder["loss_type"]
    return (False, f"with loss_type {loss}") if loss in POLICY_LOSSES and loss not in SCALED else (True, "")


@dataclass(frozen=True)
class GrpoParameters:
    """How answers are sampled from the weights that are being trained, and what is learned from them.

    One rollout is the answers that are sampled at once. It has `per_device_train_batch_size` x
    `gradient_accumulation_steps` x data-parallel ranks x `steps_per_generation` answers, `num_generations` of them to
    each prompt, and serves `steps_per_generation` x `num_iterations` optimizer steps. `rewards` scores them; each is
    written to `rollouts.jsonl` in `output_dir`.
    """

    num_generations: int = parameter(
        8,
        "The number of answers to a prompt, its group: an answer is compared with the others. More of them make the "
        "comparison less noisy. The answers of a rollout must be a multiple of it.",
        minimum=1,
        unit="answers",
        example=16,
    )
    steps_per_generation: int = parameter(
        1,
        "The number of optimizer steps among which the answers of a rollout are divided. With more than 1 the later "
        "ones learn from answers of slightly older weights, which the clipped ratio accounts for; fewer, larger "
        "rollouts generate faster.",
        minimum=1,
        unit="optimizer steps",
        example=4,
    )
    num_iterations: int = parameter(
        1,
        "How often the answers of a rollout are learned from. The ratio accounts for the weights having changed.",
        minimum=1,
        unit="passes",
        example=2,
    )
    max_completion_len: int = parameter(
        256,
        "The most tokens of a sampled answer, with its end of turn; a longer one is cut, see `overlong_handling`. "
        "Prompt and answer together have at most `max_seq_len` tokens.",
        minimum=1,
        unit="tokens",
        verbs=("train", "eval"),
        example=1024,
    )
    rollout_temperature: float = parameter(
        1.0,
        "Divide the logits by this where answers are sampled and where their probabilities are computed, so that both "
        "are of one policy. Nothing else changes the distribution: no top-p, top-k or penalty.",
        above=0.0,
        example=0.8,
    )
    scale_rewards: bool = parameter(
        Derived("true for loss_type `grpo`, `dapo` and `gspo`, else false", _scales, True),
        "Divide an answer's advantage by the standard deviation of the rewards in its group. Without it easy and hard "
        "prompts count by how far their rewards differ (Dr. GRPO). `rloo` and `reinforce++` have none.",
    )
    importance_sampling_level: str = parameter(
        Derived("`sequence` for loss_type `gspo` and `rloo`, else `token`", _level, "token"),
        "Whether the ratio that is clipped is that of each `token`, or of a whole answer (`sequence`): the exponential "
        "of the mean of its tokens' log-ratios, for `rloo` of their sum.",
        choices=("token", "sequence"),
        example="sequence",
    )
    clip_ratio_low: float = parameter(
        Derived("0.0003 for loss_type `gspo`, else 0.2", _clip_low, 0.2),
        "A token whose advantage is negative is not made less likely any more once the ratio of its probability to "
        "that at sampling is below 1 minus this.",
        above=0.0,
        below=1.0,
        example=0.1,
    )
    clip_ratio_high: float = parameter(
        Derived("0.28 for loss_type `dapo`, 0.0004 for `gspo`, else 0.2", _clip_high, 0.2),
        "A token whose advantage is positive is not made more likely any more once the ratio is above 1 plus this. "
        "Larger than `clip_ratio_low`, it keeps rare tokens from dying out (DAPO's clip-higher).",
        above=0.0,
        example=0.28,
    )
    clip_ratio_max: float = parameter(
        0.0,
        "The largest ratio of a token whose advantage is negative, which bounds its loss (two-sided clipping). 0 sets "
        "no bound; otherwise it is above 1 + `clip_ratio_high`.",
        minimum=0.0,
        example=4.0,
    )
    kl_estimator: str = parameter(
        Derived("`k1` for loss_type `rloo` and `reinforce++`, else `k3`", _estimator, "k3"),
        "How the divergence from the reference, times `beta`, is estimated: `k1` log p - log q, `k2` half its square, "
        "`k3` q / p - 1 - log(q / p). `rloo` and `reinforce++` take it from the reward, the others add it to the loss. "
        "There `k1` is refused: its gradient is 0 on average.",
        choices=("k1", "k2", "k3"),
        needs=when("beta", above=0),
        example="k2",
    )
    overlong_handling: str = parameter(
        "keep",
        "What becomes of answers that `max_completion_len` cuts: `keep` scores them like others, `mask` learns nothing "
        "from them, `soft` lowers the reward of answers in the last `overlong_buffer` tokens, evenly down to -1 "
        "(DAPO); evaluations do not.",
        choices=("keep", "mask", "soft"),
        example="mask",
    )
    overlong_buffer: int = parameter(
        32,
        "The last tokens of `max_completion_len` over which `overlong_handling: soft` lowers the reward.",
        minimum=1,
        unit="tokens",
        needs=when("overlong_handling", "soft"),
        example=128,
    )
    dynamic_sampling: bool = parameter(
        False,
        "Sample further prompts in the place of those whose answers all have the same reward, and teach nothing, until "
        "the rollout is full or `max_sampling_rounds` is reached (DAPO).",
    )
    max_sampling_rounds: int = parameter(
        10,
        "How often a rollout is sampled at most with `dynamic_sampling`. What is lacking then is filled with groups of "
        "equal rewards, which is told.",
        minimum=2,
        unit="rounds",
        needs=when("dynamic_sampling"),
        example=4,
    )
    rollout_workers: int = parameter(
        0,
        "The number of processes of Ray (`pip install 'erniekit[ray]'`) that sample the answers of training, each with "
        "a copy of the model and with a share of the prompts of a rollout. Before each rollout they get the weights, "
        "and the run ends where a process has others. The answers are those of the run without workers. 0 samples in "
        "the training process. Held-out prompts are always answered there.",
        minimum=0,
        unit="processes",
        example=4,
    )
    ray_address: str = parameter(
        "",
        "The address of a Ray cluster, `HOST:PORT`, whose machines run the workers; `ray start --head` prints it. "
        "Empty starts a Ray for this run alone, which listens on the loopback address of this machine and ends with "
        "the run.",
        needs=when("rollout_workers", above=0),
        example="10.0.0.1:6379",
    )


def policy_loss(builder: ConfigBuilder) -> str:
    """Return the loss of stage GRPO."""
    return str(builder["loss_type"])


@rule("num_generations", "loss_type", "steps_per_generation", stages=("GRPO",), verbs=("train",))
def groups_compare_answers(builder: ConfigBuilder) -> None:
    """`num_generations` is at least 2, except for `reinforce++`, which compares answers to different prompts."""
    if builder["num_generations"] < 2 and policy_loss(builder) != "reinforce++":
        builder.problem("num_generations", "one answer has no others to be compared with", "write at least 2")


@rule("loss_type", "importance_sampling_level", "scale_rewards", stages=("GRPO",))
def levels_fit_the_loss(builder: ConfigBuilder) -> None:
    """`importance_sampling_level` is `sequence` for `gspo` and `rloo`; `scale_rewards` is for losses with groups."""
    loss = policy_loss(builder)
    if loss in OF_SEQUENCES and builder["importance_sampling_level"] != "sequence":
        what = f"{loss} has the ratio of whole answers"
        builder.problem("importance_sampling_level", what, "write `sequence`, or `loss_type: grpo`")
    if loss in KL_IN_REWARD and builder["scale_rewards"]:
        builder.no_effect("scale_rewards", f"because {loss} has advantages of its own")


@rule("clip_ratio_high", "clip_ratio_max", stages=("GRPO",))
def the_second_side_is_further(builder: ConfigBuilder) -> None:
    """`clip_ratio_max` is 0, or above 1 + `clip_ratio_high`."""
    most, least = builder["clip_ratio_max"], 1 + builder["clip_ratio_high"]
    if most and most <= least:
        builder.problem("clip_ratio_max", f"lies inside of the clip, which ends at {least:g}", "write more, or 0")


@rule(
    "steps_per_generation", "num_iterations", "clip_ratio_low", "clip_ratio_high", "clip_ratio_max", stages=("GRPO",),
    verbs=("train",),
)  # fmt: skip
def one_update_clips_nothing(builder: ConfigBuilder) -> None:
    """`clip_ratio_*` have an effect where a rollout serves more than one optimizer step."""
    if builder["steps_per_generation"] * builder["num_iterations"] > 1:
        return
    for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_max"):
        if builder.differs(name):
            why = "because a rollout serves one optimizer step, in which the ratio is 1 (steps_per_generation, "
            builder.no_effect(name, why + "num_iterations)")


@rule("kl_estimator", "loss_type", "beta", stages=("GRPO",))
def the_estimator_has_a_gradient(builder: ConfigBuilder) -> None:
    """`kl_estimator: k1` is for losses that take the divergence from the reward."""
    if builder["beta"] and builder["kl_estimator"] == "k1" and policy_loss(builder) not in KL_IN_REWARD:
        what = "its gradient is 0 on average where the divergence is added to the loss"
        builder.problem("kl_estimator", what, "write `k2` or `k3`")


@rule("max_completion_len", "max_prompt_len", "max_seq_len", "overlong_buffer", "overlong_handling", stages=("GRPO",))
def answers_have_room(builder: ConfigBuilder) -> None:
    """`max_completion_len` is below `max_seq_len`, and `max_prompt_len` at most what it leaves; `overlong_buffer` is
    at most `max_completion_len`."""
    longest, whole = builder["max_completion_len"], builder["max_seq_len"]
    if longest >= whole:
        builder.problem("max_completion_len", f"leaves no room for a prompt in max_seq_len {whole}", "write less")
        return
    if builder["max_prompt_len"] > whole - longest:
        why = f"max_seq_len is {whole} and max_completion_len {longest}"
        builder.change("max_prompt_len", whole - longest, why)
    if builder["overlong_handling"] == "soft" and builder["overlong_buffer"] > longest:
        builder.problem("overlong_buffer", f"is above max_completion_len {longest}", "write less")


@rule("hidden_dropout_prob", "attention_probs_dropout_prob", "lora_dropout", "lora", stages=("GRPO",))
def nothing_is_dropped(builder: ConfigBuilder) -> None:
    """Stage GRPO has no dropout: answers come from the whole model, and the first ratio must be 1."""
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", *(["lora_dropout"] if builder["lora"] else [])):
        if builder[name]:
            what = "answers are sampled from the model without dropout, so that the first ratio would not be 1"
            builder.problem(name, what, "write 0")


@rule("sharding", stages=("GRPO",), verbs=("train",))
def generation_has_the_weights(builder: ConfigBuilder) -> None:
    """Stage GRPO refuses `sharding: stage3`."""
    if builder["sharding"] == "stage3":
        what = "ranks then have whole weights for one layer at a time, and answers need all of them for each token"
        builder.problem("sharding", what, "write `stage1` or `stage2`")


@rule("moe_group", stages=("GRPO",))
def answers_differ_in_length(builder: ConfigBuilder) -> None:
    """Stage GRPO refuses `moe_group: data`."""
    if builder["moe_group"] == "data":
        what = "ranks that share experts compute together, and their answers differ in length"
        builder.problem("moe_group", what, "write `mp`, or `dummy`")


@rule("pipeline_parallel_degree", stages=("GRPO",))
def one_stage_of_a_pipeline(builder: ConfigBuilder) -> None:
    """Stage GRPO refuses pipelines."""
    if builder["pipeline_parallel_degree"] > 1:
        what = "a pipeline would compute answers token by token through all of its stages, most of them idle"
        builder.problem("pipeline_parallel_degree", what, "write 1, and `tensor_parallel_degree` for a large model")


@rule("rollout_workers", "tensor_parallel_degree", "weight_quantize_algo", "device", stages=("GRPO",), verbs=("train",))
def workers_have_whole_models(builder: ConfigBuilder) -> None:
    """`rollout_workers` is 0 with tensor parallelism, with FP8 and on other devices than a CPU."""
    if not builder["rollout_workers"]:
        return
    reasons = {
        "tensor_parallel_degree": builder["tensor_parallel_degree"] > 1
        and "a worker answers with a whole model, and a rank has a slice of each weight to send",
        "weight_quantize_algo": builder["weight_quantize_algo"] == "fp8_linear"
        and "FP8 computes with ranges of activations that training measures, and workers only get weights",
        "device": builder["device"] not in ("auto", "cpu") and "workers compute on CPUs only",
    }
    for name, what in reasons.items():
        if what:
            builder.problem("rollout_workers", f"{what} (`{name}: {builder[name]}`)", f"write 0, or another `{name}`")


@rule("ray_address", stages=("GRPO",), verbs=("train",))
def an_address_has_a_port(builder: ConfigBuilder) -> None:
    """`ray_address` is empty or `HOST:PORT`."""
    host, _, port = builder["ray_address"].rpartition(":")
    if builder["ray_address"] and not (host and "/" not in host and port.isdecimal()):
        builder.problem(
            "ray_address", "is no `HOST:PORT`", "write what `ray start --head` prints, such as 10.0.0.1:6379"
        )


@rule("train_dataset_type", stages=("GRPO",))
def prompts_are_not_packed(builder: ConfigBuilder) -> None:
    """Stage GRPO reads records of dialogues, whose last answer may be missing."""
    if others := [kind for kind in builder["train_dataset_type"] if kind in ("packed", "asr", "text", "aligned_units")]:
        what = f"stage GRPO reads prompts, not {others[0]}"
        builder.problem("train_dataset_type", what, "write the format of dialogues, such as `messages`")


@rule(*_UNUSED, stages=("GRPO",), verbs=("train", "eval"))
def answers_are_laid_in_order(builder: ConfigBuilder) -> None:
    """In stage GRPO answers are packed in their order; parameters of other packing and of reading ahead have no
    effect."""
    for name in _UNUSED:
        if builder.differs(name):
            builder.no_effect(name, "in stage GRPO: answers are packed in their order, and prompts are read once")


SECTION = section(
    GrpoParameters,
    key="grpo",
    title="2.14 GRPO",
    verbs=("train",),
    stages=("GRPO",),
    rules=(
        groups_compare_answers,
        levels_fit_the_loss,
        the_second_side_is_further,
        one_update_clips_nothing,
        the_estimator_has_a_gradient,
        answers_have_room,
        nothing_is_dropped,
        generation_has_the_weights,
        answers_differ_in_length,
        one_stage_of_a_pipeline,
        workers_have_whole_models,
        an_address_has_a_port,
        prompts_are_not_packed,
        answers_are_laid_in_order,
    ),
)
