"""2.5 Mixture of experts and multi-token prediction: the weights of additional losses."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, parameter, rule, section, when


@dataclass(frozen=True)
class MoeParameters:
    """The weights of the losses that keep experts in balance, and of multi-token prediction."""

    moe_aux_loss_lambda: float = parameter(
        1e-5,
        "The weight of the loss that balances the tokens over the experts. 0 disables it. Like the other losses of "
        "routers it is a mean over the tokens of a micro-batch, summed over the layers, and it is reported as a "
        "separate metric: the reported loss is that of the target tokens.",
        minimum=0.0,
        example=1e-3,
    )
    moe_z_loss_lambda: float = parameter(
        0.0,
        "The weight of the loss that keeps the router's logits small.",
        minimum=0.0,
        example=1e-3,
    )
    moe_orthogonal_loss_lambda: float = parameter(
        0.0,
        "The weight of the loss that keeps the router's rows for different experts orthogonal.",
        minimum=0.0,
        example=1e-3,
    )
    moe_use_aux_free: bool = parameter(
        True,
        "Choose experts by their probability plus the correction bias of the router, where the model has one. When "
        "false the bias is set to zero and stays so, in the saved model too: probabilities alone choose.",
        verbs=("train", "eval"),
        example=False,
    )
    moe_router_bias_update_rate: float = parameter(
        0.0,
        "Balance without a loss: after each optimizer step the correction bias of experts with less than the mean load "
        "rises by this much, and that of the others falls. The bias affects only the choice of experts. 0 does not "
        "change it; training of adapters does not change it either.",
        minimum=0.0,
        example=1e-3,
    )
    multi_token_pred_lambda: float = parameter(
        0.3,
        "The weight of the mean loss of the multi-token prediction layers.",
        minimum=0.0,
        needs=when("num_nextn_predict_layers", above=0),
        example=0.1,
    )


@rule("moe_use_aux_free", "moe_router_bias_update_rate")
def a_bias_of_zero_is_not_updated(builder: ConfigBuilder) -> None:
    """`moe_router_bias_update_rate` is 0 while `moe_use_aux_free` is false."""
    if not builder["moe_use_aux_free"]:
        builder.change("moe_router_bias_update_rate", 0.0, "moe_use_aux_free is false")


SECTION = section(
    MoeParameters,
    key="moe",
    title="2.5 Mixture of experts",
    verbs=("train",),
    rules=(a_bias_of_zero_is_not_updated,),
)
