"""2.2 LoRA: low-rank adapters."""

from __future__ import annotations

import re
from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, parameter, rule, section, shorthand, when
from erniekit.config.values import INTEGERS, PATH_OR_URL, WORDS, format_value


@dataclass(frozen=True)
class LoraParameters:
    """Low-rank adapters: small trainable updates of frozen weights."""

    lora: bool = parameter(
        False,
        "Train low-rank adapters and keep the weights of the model frozen. `output_dir` then holds the adapters, in "
        "PEFT's format, without the model.",
        example=True,
    )
    lora_rank: int = parameter(
        8,
        "The rank r of the update B @ A. Each adapted matrix of m x n gains r (m + n) parameters; 8, 16 and 32 are "
        "usual.",
        minimum=1,
        maximum=65_536,
        needs=when("lora"),
        example=32,
    )
    lora_alpha: float = parameter(
        -1.0,
        "The update is multiplied by alpha / r, or by alpha / sqrt(r) with `rslora`. -1 means 2 r, or 4 with `rslora`.",
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
        "LoRA+: multiply the learning rate of the factor B by this, in addition to `layerwise_lr_decay_bound`. Values "
        "between 4 and 16 often learn faster.",
        above=0.0,
        needs=when("lora"),
        example=4.0,
    )
    rslora_plus: bool = parameter(
        False,
        "A preset: `rslora`, alpha 4 and `lora_plus_scale` 4. It learns more and may forget more.",
        needs=when("lora"),
        stands_for=("rslora", "lora_alpha", "lora_plus_scale"),
    )
    lora_target_modules: tuple[str, ...] = parameter(
        (),
        "The linear layers that get an adapter; empty means all of the decoder: attention, MLP and experts, and the "
        "multi-token prediction layers that the run trains. Each item is the end of a layer's name (`q_proj`, "
        "`self_attn.o_proj`), the full name of a module for all linear layers in it (`model.layers.3.mlp`), a full "
        "name with wildcards (`model.layers.[0-3].*`), or `re:` and a regular expression for full names. Layers of an "
        "audio encoder or its projector get an adapter only if an item begins with their name: `audio_tower` and "
        "`multi_modal_projector` stand for all their layers, `audio_tower.*.q_proj` for one in each. "
        "Expressions with spaces or commas must be items of a YAML list. Embedding, head and routers get no adapter.",
        kind=WORDS,
        needs=when("lora"),
        example="q_proj v_proj",
    )
    lora_dropout: float = parameter(
        0.0,
        "The probability with which an element of an adapter's input is zeroed in training. The path through the "
        "frozen weight is not affected. `dropout_warmup_steps` applies to it, too.",
        minimum=0.0,
        below=1.0,
        needs=when("lora"),
        example=0.05,
    )
    dora: bool = parameter(
        False,
        "DoRA: train the magnitude of every output's weights separately from their direction, which the adapter "
        "changes. It often helps at low ranks, and makes a step about 50% slower.",
        needs=when("lora"),
    )
    lora_init: str = parameter(
        "kaiming",
        "How new adapters are initialised: with no effect (`kaiming`: A random, B zero), or with the largest singular "
        "values of the weight, which are removed from the frozen weight during the run (`pissa`). `pissa` adapters are "
        "saved as the difference from their initial values, with twice the rank, so that they fit the original model.",
        choices=("kaiming", "pissa"),
        needs=when("lora"),
        example="pissa",
    )
    lora_codebooks: tuple[int, ...] = parameter(
        (),
        "The levels of codes that the adapters serve, from 0, where `tts_objective` is `ar_nar`: training draws no "
        "other level, and `erniekit speak` switches the adapters off at the others. Empty means all levels.",
        kind=INTEGERS,
        minimum=0,
        maximum=63,
        needs=when("lora"),
        stages=("TTS",),
        example="0",
    )
    lora_path: str = parameter(
        "",
        "A folder of adapters to start from, in PEFT's or paddlenlp's format; empty starts from new ones. The folder "
        "then determines rank, alpha and the other settings; different values in the configuration are errors.",
        kind=PATH_OR_URL,
        needs=when("lora"),
        verbs=("train", "eval", "chat", "generate", "export"),
        example="output/lora",
    )


@rule("lora_alpha", "lora")
def alpha_is_positive(builder: ConfigBuilder) -> None:
    """`lora_alpha` is positive, or -1 for its usual value."""
    if builder["lora_alpha"] != -1 and builder["lora_alpha"] <= 0:
        builder.problem("lora_alpha", "must be above 0, or -1 for 2 x lora_rank", "write -1 or a positive number")


@rule("rslora_plus", "lora_alpha", "lora_plus_scale", "rslora", "lora")
def preset_is_not_contradicted(builder: ConfigBuilder) -> None:
    """`rslora_plus` fixes `rslora`, `lora_alpha` (4) and `lora_plus_scale` (4); other values are errors."""
    if not (builder["rslora_plus"] and builder["lora"]):
        return
    for name, value in (("rslora", True), ("lora_alpha", 4.0), ("lora_plus_scale", 4.0)):
        if builder.differs(name) and builder[name] != value:
            builder.problem(
                name, f"contradicts `rslora_plus`, which makes it {format_value(value)}", "remove one of the two"
            )
        builder.change(name, value, "rslora_plus is true")


@rule("lora_target_modules", "lora")
def patterns_can_be_read(builder: ConfigBuilder) -> None:
    """Every item of `lora_target_modules` is a name, a name with wildcards, or `re:` and a regular expression."""
    for pattern in builder["lora_target_modules"]:
        if not pattern.strip():
            builder.problem("lora_target_modules", "contains an empty name", "remove it")
        elif pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                builder.problem("lora_target_modules", f"{format_value(pattern)} is not a regular expression: {error}")


@rule("lora", "lora_path", "init_from_checkpoint", "continue_training")
def adapters_have_a_base(builder: ConfigBuilder) -> None:
    """Adapters need pretrained weights."""
    if builder.verb != "train" or not builder["lora"]:
        return
    if builder["lora_path"] and builder["init_from_checkpoint"]:
        builder.problem(
            "lora_path", "adapters come from one place, and init_from_checkpoint names another", "remove one"
        )
    if not builder["continue_training"] and not builder["init_from_checkpoint"]:
        builder.problem(
            "lora",
            "adapters of random weights are of no use, because these weights are not saved",
            "write `continue_training: true`, or `lora: false` to train all weights",
        )


@rule("weight_quantize_algo", "lora", "lora_init", "do_train")
def weights_in_few_bits_are_frozen(builder: ConfigBuilder) -> None:
    """Quantized weights (`weight_quantize_algo`) stay frozen while adapters are trained, and cannot start PiSSA."""
    algorithm = builder["weight_quantize_algo"]
    if builder.verb != "train" or not builder["do_train"] or algorithm in ("none", "fp8_linear"):
        return
    if not builder["lora"]:
        builder.problem(
            "weight_quantize_algo",
            f"{algorithm} stores quantized weights, which cannot be trained",
            "write `lora: true` to train adapters instead, or `fp8_linear` to train all weights",
        )
    elif builder["lora_init"] == "pissa":
        builder.problem(
            "lora_init",
            f"pissa needs the singular values of the weights, which {algorithm} has rounded",
            "write `kaiming`, or `weight_quantize_algo: none`",
        )


@rule("lora_codebooks", "tts_objective", "codec_levels", "lora", stages=("TTS",))
def adapters_serve_levels_of_the_codec(builder: ConfigBuilder) -> None:
    """`lora_codebooks` names levels of the codec, and needs `tts_objective: ar_nar`, whose samples have one level."""
    chosen, levels = builder["lora_codebooks"], builder["codec_levels"]
    if not builder["lora"] or not chosen:
        return
    if builder["tts_objective"] != "ar_nar":
        what = "samples of tts_objective masked have all levels at once"
        builder.problem("lora_codebooks", what, "remove it, or write `tts_objective: ar_nar`")
    elif levels is not None and max(chosen) >= levels:
        what = f"there is no level {max(chosen)}: `codec_levels` is {levels}, and the first one is 0"
        builder.problem("lora_codebooks", what, "remove it from the list")


SECTION = section(
    LoraParameters,
    key="lora",
    title="2.2 LoRA",
    verbs=("train",),
    aliases=(
        shorthand(
            "fine_tuning",
            "Train low-rank adapters (`LoRA`) or all weights (`Full`).",
            {"LoRA": {"lora": True}, "Full": {"lora": False}},
        ),
    ),
    rules=(
        alpha_is_positive,
        preset_is_not_contradicted,
        patterns_can_be_read,
        adapters_have_a_base,
        weights_in_few_bits_are_frozen,
        adapters_serve_levels_of_the_codec,
    ),
)
