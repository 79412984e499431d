"""2.10 Reward models: training a model that gives answers a score."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, parameter, rule, section


@dataclass(frozen=True)
class RewardModelParameters:
    """The loss over the scores of a preferred and a rejected answer; 2.3 DPO has `max_prompt_len`."""

    margin_scale: float = parameter(
        0.0,
        "The preferred answer's score must exceed the rejected one's by `margin_scale` x the record's margin: its "
        "`margin`, or the difference of its scores. 1 is what trl and Llama 2 do; 0 asks for no margin. A record "
        "without one has margin 0.",
        minimum=0.0,
        example=1.0,
    )
    center_rewards_coefficient: float = parameter(
        0.0,
        "The weight of a term that keeps scores around 0: the mean of (score of the preferred answer + score of the "
        "rejected one) squared. Without it only differences of scores are trained, and their level drifts.",
        minimum=0.0,
        example=0.01,
    )


_OF_LOGITS = (
    "use_fused_head_and_loss_fn", "use_sparse_head_and_loss_fn", "tensor_parallel_output", "multi_token_pred_lambda",
    "num_nextn_predict_layers",
)  # fmt: skip


@rule(*_OF_LOGITS, stages=("RM",))
def a_score_has_no_logits(builder: ConfigBuilder) -> None:
    """Parameters of the head that predicts tokens have no effect in stage RM, whose head gives one score."""
    for name in _OF_LOGITS:
        if builder.differs(name):
            builder.no_effect(name, "in stage RM, whose head gives a score and predicts no tokens")


SECTION = section(
    RewardModelParameters,
    key="reward_model",
    title="2.10 Reward models",
    verbs=("train", "eval"),
    stages=("RM",),
    rules=(a_score_has_no_logits,),
)
