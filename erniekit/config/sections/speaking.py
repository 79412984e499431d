"""3.3 Speaking: how the codes of a recording are made from a text."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import parameter, section


@dataclass(frozen=True)
class SpeakingParameters:
    """How `erniekit speak`, and evaluations with `eval_answers`, make the codes of a text."""

    unmask_steps: int = parameter(
        32,
        "The number of steps in which a model of `tts_objective: masked` unmasks the codes of a text. Fewer are "
        "faster, more are clearer; 16 is often enough.",
        minimum=1,
        maximum=10_000,
        unit="steps",
        example=16,
    )
    guidance_scale: float = parameter(
        2.0,
        "How far the probabilities of codes are moved away from those without the text: log p + scale x (log p - log "
        "p without text), for models of `tts_objective: masked`. 0 computes the model once, not twice.",
        minimum=0.0,
        maximum=100.0,
        example=0.0,
    )
    time_shift: float = parameter(
        0.1,
        "The share of codes that are written after step i of N is s x / (1 + (s - 1) x) with x = i / N and this s: "
        "below 1 the first steps unmask few codes and the last ones many; 1 unmasks equally many in each.",
        above=0.0,
        maximum=100.0,
        example=1.0,
    )
    layer_penalty: float = parameter(
        5.0,
        "What the score of a code loses for each level above it, so that the coarse levels are unmasked first.",
        minimum=0.0,
        maximum=1000.0,
        example=0.0,
    )
    position_temperature: float = parameter(
        5.0,
        "The temperature with which the codes that a step unmasks are drawn by their scores; 0 takes the best ones.",
        minimum=0.0,
        maximum=1000.0,
        example=0.0,
    )
    class_temperature: float = parameter(
        0.0,
        "The temperature with which the value of a code is drawn, from the likeliest tenth of the codebook; also at "
        "the later levels of `tts_objective: ar_nar`. 0 takes the likeliest value.",
        minimum=0.0,
        maximum=1000.0,
        example=0.5,
    )
    min_p: float = parameter(
        0.0,
        "Draw codes of the first level of `tts_objective: ar_nar` only from those whose probability is at least this "
        "share of the likeliest one's. 0 sets no limit. Evaluations take the likeliest.",
        minimum=0.0,
        maximum=1.0,
        verbs=("speak", "server"),
        example=0.05,
    )


SECTION = section(
    SpeakingParameters,
    key="speaking",
    title="3.3 Speaking",
    verbs=("train", "eval", "speak", "server"),
    stages=("TTS",),
)
