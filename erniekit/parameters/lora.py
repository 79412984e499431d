"""2.2 LoRA: low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.parameters.declaration import parameter, rule, section, shorthand, when
from erniekit.parameters.draft import Draft
from erniekit.parameters.values import shown


@dataclass(frozen=True)
class LoraParameters:
    """Low-rank adapters: small trainable updates beside frozen weights."""

    lora: bool = parameter(
        False,
        "Train low-rank adapters and keep the weights of the model frozen.",
        available=(False,),
        coming="LoRA",
        example=True,
    )
    lora_rank: int = parameter(
        8,
        "The rank r of the update B @ A. Each adapted matrix of m x n gains r (m + n) parameters; 8, 16 and 32 are "
        "usual.",
        minimum=1,
        needs=when("lora"),
        example=32,
    )
    lora_alpha: float = parameter(
        -1.0,
        "The update is multiplied by alpha / r, or by alpha / sqrt(r) with `rslora`. -1 stands for 2 r, or for 4 with "
        "`rslora`.",
        minimum=-1.0,
        needs=when("lora"),
        example=64,
    )
    rslora: bool = parameter(
        False,
        "Divide alpha by the square root of the rank instead of the rank, which keeps the size of the update stable at "
        "ranks of 64 and more.",
        needs=when("lora"),
    )
    lora_plus_scale: float = parameter(
        1.0,
        "LoRA+: train the factor B with this multiple of the learning rate. Between 4 and 16 often learns faster.",
        above=0.0,
        needs=when("lora"),
        example=4.0,
    )
    rslora_plus: bool = parameter(
        False,
        "A preset: `rslora`, alpha 4 and `lora_plus_scale` 4. It learns more and may forget more.",
        needs=when("lora"),
    )
    lora_path: str = parameter(
        "",
        "A folder of adapters to start from; empty starts from new ones.",
        needs=when("lora"),
        verbs=("train", "eval", "chat", "generate", "export"),
        example="output/lora",
    )


@rule("lora_alpha", "lora")
def alpha_is_positive(draft: Draft) -> None:
    """`lora_alpha` is positive, or -1 for its usual value."""
    if draft["lora_alpha"] != -1 and draft["lora_alpha"] <= 0:
        draft.problem("lora_alpha", "must be above 0, or -1 for 2 x lora_rank", "write -1 or a positive number")


@rule("rslora_plus", "lora_alpha", "lora_plus_scale", "rslora", "lora")
def preset_is_not_contradicted(draft: Draft) -> None:
    """`rslora_plus` fixes `rslora`, `lora_alpha` (4) and `lora_plus_scale` (4); other values beside it are errors."""
    if not (draft["rslora_plus"] and draft["lora"]):
        return
    for name, value in (("rslora", True), ("lora_alpha", 4.0), ("lora_plus_scale", 4.0)):
        if draft.differs(name) and draft[name] != value:
            draft.problem(name, f"contradicts `rslora_plus`, which makes it {shown(value)}", "remove one of the two")
        draft.change(name, value, "rslora_plus is true")


SECTION = section(
    LoraParameters,
    key="lora",
    title="2.2 LoRA",
    verbs=("train",),
    stages=("SFT", "DPO"),
    aliases=(
        shorthand(
            "fine_tuning",
            "What is trained: low-rank adapters (`LoRA`) or all weights (`Full`).",
            {"LoRA": {"lora": True}, "Full": {"lora": False}},
        ),
    ),
    rules=(alpha_is_positive, preset_is_not_contradicted),
)
