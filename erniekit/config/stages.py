"""Declare the training stages: what each one reads, reports and refuses, and its default learning rates.

Code asks a stage for what it needs (`config.stage.records`, `config.applies("max_prompt_len")`) and never compares its
name. Its objective needs Paddle and is built in `erniekit.runners.stages`.

To add a stage:

1. Declare it in `STAGES` below.
2. Add it to `erniekit.runners.stages.STAGES` with the objective that it minimises.
3. Declare its own parameters in `erniekit/config/sections/NAME.py` with `section(..., stages=("NAME",))`. Combinations
   of parameters that it refuses are rules of that section: `@rule(..., stages=("NAME",))`. A parameter of another stage
   that the new one also reads, such as `beta`, names both stages.

Every other parameter applies to the new stage without a change, because sections apply to all stages by default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

Key = TypeVar("Key")
RecordKind = Literal["text", "dialogues", "pairs", "verdicts", "codes", "prompts"]

TOKEN_METRICS = ("eval_loss", "eval_perplexity", "eval_token_accuracy")
PREFERENCE_METRICS = (
    "eval_loss", "eval_reward_accuracy", "eval_reward_margin", "eval_reward_chosen", "eval_preference_loss",
    "eval_logps_chosen",
)  # fmt: skip
REWARD_METRICS = (
    "eval_loss", "eval_reward_accuracy", "eval_reward_margin", "eval_reward_chosen", "eval_reward_rejected",
)  # fmt: skip
VERDICT_METRICS = ("eval_loss", "eval_reward_auc", "eval_reward_desirable", "eval_reward_undesirable", "eval_kl")
DISTILLATION_METRICS = (
    "eval_loss", "eval_divergence", "eval_teacher_agreement", "eval_token_accuracy", "eval_sft_loss",
)  # fmt: skip
GENERATION_METRICS = (  # of answers to held-out dialogues
    "eval_exact_match", "eval_rouge1", "eval_rouge2", "eval_rougeL", "eval_bleu", "eval_wer", "eval_cer",
)  # fmt: skip
POLICY_METRICS = ("eval_reward", "eval_completion_len", "eval_completions_cut")  # and `eval_reward_NAME`
SPEECH_METRICS = ("eval_loss", "eval_code_accuracy")
SPOKEN_METRICS = ("eval_wer", "eval_cer", "eval_speaker_similarity")  # of held-out texts that are spoken


@dataclass(frozen=True)
class Stage:
    """A training stage: its data, metrics and defaults.

    Attributes:
        name: the value of the parameter `stage`.
        records: the contents of one record of its data: plain `text`, one of `dialogues`, or `pairs` of a preferred and
            a rejected answer to the same prompt, `verdicts` on single answers, `codes` of a recording of a text, or
            `prompts` that the model answers.
        metrics: the metrics of an evaluation, one of which `metric_for_best_model` names.
        answer_metrics: those that it has, too, where `eval_answers` lets the model answer; () where it cannot.
        learning_rate: the default of `learning_rate` where all weights are trained.
        lora_learning_rate: the default of `learning_rate` where adapters are trained.
        needs_reference: whether its losses may compare the model with a reference model.
        trains_score: whether the model gives a text a score, and predicts no tokens.
    """

    name: str
    records: RecordKind
    metrics: tuple[str, ...] = TOKEN_METRICS
    answer_metrics: tuple[str, ...] = GENERATION_METRICS
    learning_rate: float = 3e-5
    lora_learning_rate: float = 3e-4
    needs_reference: bool = False
    trains_score: bool = False

    @property
    def reads_text(self) -> bool:
        """Whether its records are plain text, so that it needs no chat template and no dialogue can be answered."""
        return self.records == "text"

    @property
    def reads_pairs(self) -> bool:
        """Whether its records are pairs of answers."""
        return self.records == "pairs"

    @property
    def reads_verdicts(self) -> bool:
        """Whether its records are single answers, each with a verdict."""
        return self.records == "verdicts"

    @property
    def reads_codes(self) -> bool:
        """Whether its records are codes of recordings: the model speaks, and needs no chat template."""
        return self.records == "codes"

    @property
    def reads_dialogues(self) -> bool:
        """Whether its records are dialogues, answers to one with verdicts or in pairs, or prompts, so it needs a
        template."""
        return self.records in ("dialogues", "pairs", "verdicts", "prompts")

    @property
    def reads_prompts(self) -> bool:
        """Whether its records are prompts, and its samples what the model answers."""
        return self.records == "prompts"


STAGES: Mapping[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("PT", "text", answer_metrics=()),
        Stage("SFT", "dialogues"),
        Stage(
            "DPO",
            "pairs",
            metrics=PREFERENCE_METRICS,
            learning_rate=1e-6,
            lora_learning_rate=1e-5,
            needs_reference=True,
        ),
        Stage(
            "KTO",
            "verdicts",
            metrics=VERDICT_METRICS,
            learning_rate=1e-6,
            lora_learning_rate=1e-5,
            needs_reference=True,
        ),
        Stage(
            "RM",
            "pairs",
            metrics=REWARD_METRICS,
            answer_metrics=(),
            learning_rate=1e-5,
            lora_learning_rate=1e-4,
            trains_score=True,
        ),
        Stage(
            "TTS",
            "codes",
            metrics=SPEECH_METRICS,
            answer_metrics=SPOKEN_METRICS,
            learning_rate=1e-4,
            lora_learning_rate=1e-4,
        ),
        Stage("DISTILL", "dialogues", metrics=DISTILLATION_METRICS),
        Stage(
            "GRPO",
            "prompts",
            metrics=POLICY_METRICS,
            answer_metrics=(),
            learning_rate=1e-6,
            lora_learning_rate=1e-5,
            needs_reference=True,
        ),
    )
}
ALL_STAGES = tuple(STAGES)
ANSWERING_STAGES = tuple(name for name, stage in STAGES.items() if stage.answer_metrics)
DIALOGUE_STAGES = tuple(name for name, stage in STAGES.items() if stage.reads_dialogues)  # which need a chat template
WORD_STAGES = tuple(name for name, stage in STAGES.items() if not stage.reads_codes)  # which predict words alone


def stages_by_metrics() -> dict[tuple[str, ...], list[str]]:
    """Return the metrics of evaluations with the names of the stages that report them."""
    return _group((stage.metrics, stage.name) for stage in STAGES.values())


def stages_by_answer_metrics() -> dict[tuple[str, ...], list[str]]:
    """Return the metrics of answers with the names of the stages that report them."""
    return _group((stage.answer_metrics, stage.name) for stage in STAGES.values() if stage.answer_metrics)


def stages_by_learning_rate() -> dict[float, list[str]]:
    """Return the default learning rates with the trainings that have them, such as "SFT with LoRA"."""
    return _group(
        item
        for stage in STAGES.values()
        for item in [(stage.learning_rate, stage.name), (stage.lora_learning_rate, f"{stage.name} with LoRA")]
    )


def _group(items: Iterable[tuple[Key, str]]) -> dict[Key, list[str]]:
    groups: dict[Key, list[str]] = {}
    for key, name in items:
        groups.setdefault(key, []).append(name)
    return groups
