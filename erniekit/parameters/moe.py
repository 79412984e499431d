"""2.5 Mixture of experts and multi-token prediction: the weights of additional losses."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.parameters.declaration import parameter, section, when

COMING = "mixture-of-experts models"


@dataclass(frozen=True)
class MoeParameters:
    """The weights of the losses that keep experts in balance, and of multi-token prediction."""

    moe_aux_loss_lambda: float = parameter(
        1e-5,
        "The weight of the loss that spreads tokens evenly over the experts.",
        minimum=0.0,
        available=(1e-5,),
        coming=COMING,
    )
    moe_z_loss_lambda: float = parameter(
        0.0,
        "The weight of the loss that keeps the router's logits small.",
        minimum=0.0,
        available=(0.0,),
        coming=COMING,
    )
    moe_orthogonal_loss_lambda: float = parameter(
        0.0,
        "The weight of the loss that keeps the router's rows for different experts orthogonal.",
        minimum=0.0,
        available=(0.0,),
        coming=COMING,
    )
    multi_token_pred_lambda: float = parameter(
        0.3,
        "The weight of the loss of the multi-token prediction layers.",
        minimum=0.0,
        needs=when("num_nextn_predict_layers", above=0),
    )


SECTION = section(MoeParameters, key="moe", title="2.5 Mixture of experts", verbs=("train",))
