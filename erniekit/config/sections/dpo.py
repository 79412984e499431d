"""2.3 DPO: training on preferences."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, Derived, parameter, rule, section, when
from erniekit.config.sections.grpo import POLICY_LOSSES
from erniekit.config.values import PATH_OR_URL

COMPARING_STAGES = ("DPO", "KTO")  # whose losses compare the model with a reference
REFERENCE_STAGES = (*COMPARING_STAGES, "GRPO")  # whose losses do, or may
ANSWER_STAGES = (*COMPARING_STAGES, "RM")  # whose records are prompts with answers
REFERENCE_FREE_LOSSES = ("simpo", "orpo")
SMOOTHED_LOSSES = ("sigmoid", "robust", "simpo")
OFFSET_LOSSES = ("sigmoid", "robust")
PREFERENCE_LOSSES = (
    "sigmoid", "robust", "hinge", "ipo", "kto_pair", "simpo", "orpo", "dpop", "sppo_hard", "nca_pair",
)  # fmt: skip
MIN_ANSWER_TOKENS = 10  # tokens that a prompt always leaves to its answers, as upstream documents


@dataclass(frozen=True)
class DpoParameters:
    """The loss over pairs of a preferred and a rejected answer, and its reference model."""

    beta: float = parameter(
        Derived("0.1; 0 for stage GRPO", lambda builder: (_default_beta(builder), ""), 0.1),
        "The factor of the log-probability differences in the loss. A larger beta keeps the model closer to the "
        "reference. In stage GRPO it weighs the divergence from the reference, see `kl_estimator`; 0 needs no "
        "reference.",
        minimum=0.0,
        stages=REFERENCE_STAGES,
        example=0.3,
    )
    loss_type: str = parameter(
        Derived("`sigmoid`; `grpo` for stage GRPO", lambda builder: (_default_loss(builder), ""), "sigmoid"),
        "The loss of stage DPO or GRPO. `sigmoid` is DPO's own, `robust` DPO for labels that may be swapped, `hinge` "
        "SLiC's; the others are named after their papers. `simpo` and `orpo` take the mean log-probability over an "
        "answer's tokens and need no reference; the others take the sum over its tokens, less the reference's. `orpo` "
        "includes its SFT loss. Of stage GRPO: `grpo` averages over the tokens of each answer, `dr_grpo` over "
        "`max_completion_len`, `dapo` over all tokens of the step, `gspo` has the ratio of whole answers, `rloo` "
        "compares an answer with the mean of the others, `reinforce++` with all answers of a rollout.",
        choices=(*PREFERENCE_LOSSES, *POLICY_LOSSES),
        stages=("DPO", "GRPO"),
        spellings={"or": "orpo"},
    )
    simpo_gamma: float = parameter(
        0.5,
        "SimPO's target margin between the rewards of the two answers.",
        needs=when("loss_type", "simpo"),
        example=1.0,
    )
    offset_alpha: float = parameter(
        0.0,
        "Require a larger margin where the scores of two answers differ more: alpha / beta x log(score difference) is "
        "subtracted from the preference logits of the `sigmoid` and `robust` losses, before they are multiplied by "
        "beta. The scores are the two numbers of `sort` in erniekit records, `score_chosen` and `score_rejected` in "
        "others; the preferred answer must have the higher score. 0 disables the offset.",
        minimum=0.0,
        verbs=("train", "eval", "preview"),
        example=1.0,
    )
    max_prompt_len: int = parameter(
        2048,
        "The largest length of a prompt, at most `max_seq_len` - 10. The oldest turns of a longer prompt are removed "
        "and counted; its system text and last question stay. If these alone are too long, `over_length_policy` "
        "applies to the record. In stage GRPO it is at most `max_seq_len` - `max_completion_len`, and "
        "`over_length_policy` says what becomes of longer prompts.",
        minimum=1,
        verbs=("train", "eval", "preview"),
        stages=(*ANSWER_STAGES, "GRPO"),
        unit="tokens",
        example=1024,
    )
    pref_loss_ratio: float = parameter(
        1.0,
        "The weight of the preference loss in the total, `pref_loss_ratio` x preference loss + `sft_loss_ratio` x SFT "
        "loss. Lower it, together with a `sft_loss_ratio` above 0, where answers get shorter or worse while rewards "
        "rise: 0.5 and 0.5 weigh both alike. It scales the gradient, so `learning_rate` may need the inverse; it costs "
        "nothing.",
        minimum=0.0,
        example=0.5,
    )
    sft_loss_ratio: float = parameter(
        0.0,
        "The weight of an SFT loss on the preferred answers in the total: the mean over the pairs of each answer's "
        "mean negative log-likelihood. A small weight keeps their probability from falling together with that of "
        "the rejected answers.",
        minimum=0.0,
        example=0.1,
    )
    label_smoothing: float = parameter(
        0.0,
        "The assumed probability that the two answers of a pair are swapped, for the `sigmoid`, `robust` and `simpo` "
        "losses; `robust` needs it.",
        minimum=0.0,
        below=0.5,
        example=0.1,
    )
    normalize_logps: bool = parameter(
        False,
        "Rescale each answer's log-probability to the mean length of the pair's two answers, so that the longer one "
        "does not count for more. The papers of the losses do not rescale.",
    )
    dpop_lambda: float = parameter(
        50.0,
        "The weight of DPO-positive's penalty for preferred answers that become less likely than under the reference.",
        minimum=0.0,
        needs=when("loss_type", "dpop"),
        example=5.0,
    )
    reference_free: bool = parameter(
        False,
        "Train without a reference model: its log-probabilities count as 0. For losses of the difference between both "
        "answers (`sigmoid`, `robust`, `hinge`, `ipo`) this is a reference that finds them equally likely.",
    )
    ref_model_name_or_path: str = parameter(
        "",
        "The reference model: a folder, or a name on the hub as for `model_name_or_path`. It must use the same "
        "tokenizer. Empty means the model that the run starts from.",
        kind=PATH_OR_URL,
        stages=REFERENCE_STAGES,
        example="output/sft",
    )
    reference_model: str = parameter(
        "auto",
        "Where the reference's log-probabilities come from; all choices give the same values. `adapters`: from the "
        "same model with its adapters disabled, for LoRA. `copy`: from a frozen copy, which takes the memory of the "
        "weights again. `precomputed`: those of every record are computed once before the first step and kept on disk. "
        "`auto`: `adapters` with LoRA; otherwise `precomputed`, or `copy` with `ref_model_update_steps` and in stage "
        "GRPO, whose answers are not known before.",
        choices=("auto", "adapters", "copy", "precomputed"),
        verbs=("train",),
        stages=REFERENCE_STAGES,
        example="copy",
    )
    ref_model_update_steps: int = parameter(
        -1,
        "Copy the trained model into the reference every this many optimizer steps. -1 never does.",
        minimum=-1,
        stages=REFERENCE_STAGES,
        unit="optimizer steps",
        example=500,
    )


def _default_beta(builder: ConfigBuilder) -> float:
    return 0.0 if builder.stage.reads_prompts else 0.1


def _default_loss(builder: ConfigBuilder) -> str:
    return POLICY_LOSSES[0] if builder.stage.reads_prompts else PREFERENCE_LOSSES[0]


def compares_with_reference(section: DpoParameters) -> bool:
    """Return whether the loss has a reference model."""
    return section.beta > 0 and not section.reference_free and section.loss_type not in REFERENCE_FREE_LOSSES


def reference_mode(section: DpoParameters, *, lora: bool) -> str:
    """Return `adapters`, `copy` or `precomputed` from `reference_model`; `none` for losses without a reference."""
    if not compares_with_reference(section):
        return "none"
    if section.reference_model != "auto":
        return section.reference_model
    if lora and not section.ref_model_name_or_path:
        return "adapters"
    return "copy" if section.ref_model_update_steps > 0 or section.loss_type in POLICY_LOSSES else "precomputed"


@rule("max_prompt_len", "max_seq_len", stages=ANSWER_STAGES)
def prompt_leaves_space(builder: ConfigBuilder) -> None:
    """`max_prompt_len` is at most `max_seq_len` - 10, so that there is room for answers."""
    limit = builder["max_seq_len"] - MIN_ANSWER_TOKENS
    if builder["max_prompt_len"] > limit:
        if limit < 1:
            builder.problem("max_seq_len", "leaves no room for a prompt and its answers", "write at least 11")
        else:
            builder.change("max_prompt_len", limit, f"max_seq_len is {builder['max_seq_len']}")


@rule("loss_type", "beta", "stage")
def the_loss_is_of_the_stage(builder: ConfigBuilder) -> None:
    """`loss_type` is a loss of the stage; `beta` is above 0 in stages DPO and KTO."""
    losses = POLICY_LOSSES if builder.stage.reads_prompts else PREFERENCE_LOSSES
    if builder["stage"] in ("DPO", "GRPO") and builder["loss_type"] not in losses:
        what = f"`{builder['loss_type']}` is no loss of stage {builder['stage']}"
        builder.problem("loss_type", what, f"write one of {', '.join(losses)}")
    if builder["stage"] in COMPARING_STAGES and not builder["beta"]:
        builder.problem("beta", "must be above 0", "write for example 0.1")


@rule("ref_model_update_steps")
def reference_update_not_zero(builder: ConfigBuilder) -> None:
    """`ref_model_update_steps` is positive, or -1 for never."""
    if builder["ref_model_update_steps"] == 0:
        builder.problem("ref_model_update_steps", "0 is no interval", "write -1 for never")


@rule("pref_loss_ratio", "sft_loss_ratio", stages=("DPO",))
def some_loss_remains(builder: ConfigBuilder) -> None:
    """`pref_loss_ratio` and `sft_loss_ratio` may not both be 0."""
    if not (builder["pref_loss_ratio"] or builder["sft_loss_ratio"]):
        builder.problem("pref_loss_ratio", "both loss weights are 0", "give one of them a positive value")


@rule(
    "loss_type", "label_smoothing", "offset_alpha", "normalize_logps", "reference_free",
    "reference_model", "ref_model_name_or_path", "ref_model_update_steps", stages=("DPO",),
)  # fmt: skip
def options_fit_the_loss(builder: ConfigBuilder) -> None:
    """Each loss accepts only the options of its paper: smoothing, offsets, rescaled lengths, a reference or none."""
    loss = builder["loss_type"]
    if builder["label_smoothing"] and loss not in SMOOTHED_LOSSES:
        losses = ", ".join(SMOOTHED_LOSSES)
        builder.problem("label_smoothing", f"the loss {loss} has none", f"remove it, or choose one of {losses}")
    if loss == "robust" and not builder["label_smoothing"]:
        builder.problem(
            "loss_type", "`robust` corrects for swapped labels", "give their share as `label_smoothing`, such as 0.1"
        )
    if builder["offset_alpha"] and loss not in OFFSET_LOSSES:
        losses = ", ".join(OFFSET_LOSSES)
        builder.problem("offset_alpha", f"the loss {loss} has no offset", f"remove it, or choose one of {losses}")
    if builder["normalize_logps"] and loss in REFERENCE_FREE_LOSSES:
        builder.no_effect("normalize_logps", f"because {loss} takes means over tokens already")
    if builder["reference_free"] and loss in REFERENCE_FREE_LOSSES:
        builder.no_effect("reference_free", f"because {loss} has no reference")
    if builder["reference_free"] or loss in REFERENCE_FREE_LOSSES:
        for name in ("reference_model", "ref_model_name_or_path", "ref_model_update_steps"):
            if builder.differs(name):
                builder.no_effect(name, "because the loss has no reference")


@rule("reference_model", "lora", "ref_model_update_steps", "ref_model_name_or_path", stages=REFERENCE_STAGES)
def reference_fits_the_training(builder: ConfigBuilder) -> None:
    """`reference_model`: `adapters` needs LoRA, `copy` is for all weights, `precomputed` is never updated."""
    mode, other = builder["reference_model"], builder["ref_model_name_or_path"]
    if builder.stage.reads_prompts and mode == "precomputed":
        builder.problem("reference_model", "answers are not known before they are sampled", "write `auto`")
        return
    if mode == "adapters" and not builder["lora"]:
        builder.problem("reference_model", "there are no adapters to disable without `lora`", "write `auto`")
    if mode == "adapters" and other:
        builder.problem(
            "reference_model", "with `ref_model_name_or_path` the reference is another model", "write `auto`"
        )
    if mode == "copy" and builder["lora"] and not other:
        builder.problem(
            "reference_model", "with adapters the frozen weights are the reference, without a copy", "write `adapters`"
        )
    if builder["ref_model_update_steps"] <= 0:
        return
    if mode == "precomputed":
        builder.problem(
            "reference_model",
            "log-probabilities that are computed once cannot follow `ref_model_update_steps`",
            f"write `{'adapters' if builder['lora'] else 'copy'}`",
        )
    if other:
        builder.problem(
            "ref_model_update_steps",
            "a reference that is another model is not updated",
            "remove it or `ref_model_name_or_path`",
        )


@rule("beta", "reference_model", "ref_model_name_or_path", "ref_model_update_steps", stages=("GRPO",), verbs=("train",))
def no_reference_without_beta(builder: ConfigBuilder) -> None:
    """In stage GRPO the parameters of the reference have no effect while `beta` is 0."""
    if not builder["beta"]:
        for name in ("reference_model", "ref_model_name_or_path", "ref_model_update_steps"):
            if builder.differs(name):
                builder.no_effect(name, "because beta is 0")


SECTION = section(
    DpoParameters,
    key="dpo",
    title="2.3 DPO",
    verbs=("train", "eval"),
    stages=("DPO",),
    rules=(
        the_loss_is_of_the_stage,
        prompt_leaves_space,
        reference_update_not_zero,
        some_loss_remains,
        options_fit_the_loss,
        reference_fits_the_training,
        no_reference_without_beta,
    ),
)
