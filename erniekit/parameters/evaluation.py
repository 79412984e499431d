"""1.2 Evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.parameters.declaration import Derived, parameter, rule, section, when
from erniekit.parameters.draft import Draft
from erniekit.parameters.sources import FORMATS, agree_on_sources, source_kinds
from erniekit.parameters.values import NUMBERS, TEXTS


@dataclass(frozen=True)
class EvaluationParameters:
    """The held-out data, and when and how much of it is evaluated."""

    eval_dataset_path: tuple[str, ...] = parameter(
        (),
        "The file or files of held-out records; required when `do_eval` evaluates. Several are separated by commas or "
        "written as a YAML list.",
        kind=TEXTS,
        needs=when("do_eval"),
        example="data/sft-eval.jsonl",
    )
    eval_dataset_type: tuple[str, ...] = parameter(
        ("erniekit",),
        f"The format of each evaluation file; one word may serve all. {FORMATS}",
        **source_kinds(),
        needs=when("do_eval"),
    )
    eval_dataset_prob: tuple[float, ...] = parameter(
        (1.0,),
        "The weight of each evaluation file, in the order of `eval_dataset_path`. A file of weight 0 is left out; of "
        "the others every record is read once, whatever the weight, so that figures can be compared between runs.",
        kind=NUMBERS,
        minimum=0.0,
        needs=when("do_eval"),
        example="1.0,0.0",
    )
    per_device_eval_batch_size: int = parameter(
        Derived(
            "the value of `per_device_train_batch_size`",
            lambda draft: (draft["per_device_train_batch_size"], "as per_device_train_batch_size"),
            1,
        ),
        "How many packs (or single samples without packing) one forward pass of an evaluation takes. It changes "
        "speed and memory only: loss and perplexity are weighted by tokens.",
        minimum=1,
        unit="packs",
        needs=when("do_eval"),
        example=4,
    )
    evaluation_strategy: str = parameter(
        "steps",
        "When `do_eval` evaluates during training: every `eval_steps` (`steps`), at the end of each epoch "
        "(`epoch`), or not at all (`no`).",
        choices=("steps", "epoch", "no"),
        needs=when("do_eval"),
    )
    eval_steps: int = parameter(
        100,
        "Evaluate every so many optimizer steps.",
        minimum=1,
        unit="optimizer steps",
        needs=(when("do_eval"),),
        example=500,
    )
    max_evaluate_steps: int = parameter(
        Derived(
            "1; -1 with `do_train: false`, where the evaluation is all that is done",
            lambda draft: (1, "") if draft["do_train"] else (-1, "with do_train false"),
            1,
        ),
        "Stop an evaluation after this many batches of `per_device_eval_batch_size`, so that one during training takes "
        'little of its time; the line printed says "n of N". -1 reads everything.',
        minimum=-1,
        unit="batches",
        needs=when("do_eval"),
        example=-1,
    )


@rule("do_eval", "eval_dataset_path", "evaluation_strategy", "do_train")
def evaluation_needs_data(draft: Draft) -> None:
    """`do_eval: true` needs `eval_dataset_path`, unless `evaluation_strategy` is `no`."""
    periodic = draft["evaluation_strategy"] != "no" or not draft["do_train"]
    if draft["do_eval"] and periodic and not draft["eval_dataset_path"]:
        draft.problem("do_eval", "evaluation has no data", "set `eval_dataset_path`, or `do_eval: false`")


@rule("evaluation_strategy", "eval_steps", "do_eval")
def eval_steps_need_their_strategy(draft: Draft) -> None:
    """`eval_steps` has no effect unless `evaluation_strategy` is `steps`."""
    if draft.differs("eval_steps") and draft["do_eval"] and draft["evaluation_strategy"] != "steps":
        draft.no_effect("eval_steps", f"because evaluation_strategy is {draft['evaluation_strategy']}")


@rule("max_evaluate_steps")
def max_evaluate_steps_not_zero(draft: Draft) -> None:
    """`max_evaluate_steps` is positive, or -1 for no limit."""
    if draft["max_evaluate_steps"] == 0:
        draft.problem("max_evaluate_steps", "0 would evaluate nothing", "write -1 for no limit, or `do_eval: false`")


@rule("eval_dataset_path", "eval_dataset_type", "eval_dataset_prob", "stage")
def evaluation_sources_agree(draft: Draft) -> None:
    """Evaluation files, formats and probabilities agree in number (one value may serve all); formats fit the stage."""
    agree_on_sources(draft, "eval")


SECTION = section(
    EvaluationParameters,
    key="evaluation",
    title="1.2 Evaluation",
    verbs=("train", "eval"),
    rules=(
        evaluation_needs_data,
        eval_steps_need_their_strategy,
        max_evaluate_steps_not_zero,
        evaluation_sources_agree,
    ),
)
