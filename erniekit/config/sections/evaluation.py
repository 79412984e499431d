"""1.2 Evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, Derived, parameter, renamed, rule, section, when
from erniekit.config.sections.sources import FORMATS, agree_on_sources, source_kinds
from erniekit.config.stages import ANSWERING_STAGES, STAGES, stages_by_answer_metrics, stages_by_metrics
from erniekit.config.values import NUMBERS, PATH, PATHS_OR_URLS

ANSWER_METRICS = tuple(dict.fromkeys(name for stage in STAGES.values() for name in stage.answer_metrics))
METRICS = tuple(dict.fromkeys([*(name for stage in STAGES.values() for name in stage.metrics), *ANSWER_METRICS]))


def _by_stages(groups: dict[tuple[str, ...], list[str]]) -> str:
    return "; ".join(
        f"{', '.join(metrics)} for stage{'s' * (len(stages) > 1)} {' and '.join(stages)}"
        for metrics, stages in groups.items()
    )


def _eval_answers(builder: ConfigBuilder) -> tuple[int, str]:
    if builder["do_train"]:
        return 0, ""
    if builder.stage.reads_codes and not builder["speech_judge"]:
        return 0, "because speech_judge is not set"
    return 100, "with do_train false"


@dataclass(frozen=True)
class EvaluationParameters:
    """The held-out data, when it is evaluated, and how much of it."""

    eval_dataset_path: tuple[str, ...] = parameter(
        (),
        "The file or files of held-out records; required when `do_eval` evaluates, unless `eval_split` holds some out. "
        "Several are separated by commas or written as a YAML list; URLs as in `train_dataset_path`.",
        kind=PATHS_OR_URLS,
        excludes=("eval_split",),
        needs=when("do_eval"),
        example="data/sft-eval.jsonl",
    )
    eval_dataset_type: tuple[str, ...] = parameter(
        ("erniekit",),
        f"The format of each evaluation file; one value applies to all files. {FORMATS}",
        **source_kinds(),
        needs=when("do_eval"),
    )
    eval_dataset_prob: tuple[float, ...] = parameter(
        (1.0,),
        "Which evaluation files are read, in the order of `eval_dataset_path`: a file of weight 0 is left out. "
        "Upstream draws records with these probabilities; here every record of the other files is read once, whatever "
        "the weight, so that metrics can be compared between runs, and a message says so.",
        kind=NUMBERS,
        minimum=0.0,
        needs=when("do_eval"),
        example="1.0,0.0",
    )
    eval_split: float = parameter(
        0.0,
        "The fraction of the records of each training file that is held out of training, for data without a file of "
        "its own for evaluation. `seed` draws one record of each stretch of 1 / `eval_split` records, so that the same "
        "file and seed hold out the same records in every run, on every rank and in `erniekit eval`. They are held out "
        "whether `do_eval` evaluates them or not. Records that tell of one another, such as cuts of one recording, are "
        "not kept together: write a file of them, and name it as `eval_dataset_path`.",
        minimum=0.0,
        below=1.0,
        verbs=("train", "eval"),
        excludes=("eval_dataset_path",),
        example=0.1,
    )
    per_device_eval_batch_size: int = parameter(
        Derived(
            "the value of `per_device_train_batch_size`",
            lambda builder: (builder["per_device_train_batch_size"], "as per_device_train_batch_size"),
            1,
        ),
        "The number of packs, or of samples without packing, in one forward pass of an evaluation. It changes speed "
        "and memory only: loss and perplexity are weighted by tokens.",
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
        "The number of optimizer steps between two evaluations. The last step is always followed by one.",
        minimum=1,
        unit="optimizer steps",
        needs=(when("do_eval"),),
        example=500,
    )
    max_evaluate_steps: int = parameter(
        Derived(
            "1; -1 with `do_train: false`, where the run only evaluates",
            lambda builder: (1, "") if builder["do_train"] else (-1, "with do_train false"),
            1,
        ),
        "Stop an evaluation after this many batches of `per_device_eval_batch_size`, so that evaluations during "
        'training take little time; the logged line says "n of N". -1 evaluates all data.',
        minimum=-1,
        unit="batches",
        needs=when("do_eval"),
        example=-1,
    )

    eval_answers: int = parameter(
        Derived(
            "0 in training; 100 for `erniekit eval`, in stage TTS where there is a `speech_judge`",
            _eval_answers,
            0,
        ),
        "The number of held-out dialogues of each file that the model answers with greedy decoding, spread evenly over "
        "the file; -1 takes all. The answers are scored by exact match, ROUGE and BLEU, those to recordings by "
        "word and character error rate, and written to `eval_samples.jsonl` in `output_dir`. In stage TTS so many "
        "held-out texts are spoken, see `speech_judge`. Answers take far longer than the loss.",
        minimum=-1,
        unit="dialogues",
        stages=ANSWERING_STAGES,
        needs=when("do_eval"),
        example=50,
    )
    text_normalizer: str = parameter(
        "none",
        "What expected and generated transcripts are compared after, for `wer` and `cer`: `none`, the texts as they "
        "are; `basic`, Whisper's for any language: lower case, no brackets, punctuation and symbols; `english`, "
        "Whisper's for English: also contractions and numbers in one form, American spelling; `chinese`, half-width "
        "characters, no punctuation, no spaces beside Chinese characters.",
        choices=("none", "basic", "english", "chinese"),
        stages=ANSWERING_STAGES,
        needs=when("do_eval"),
        example="basic",
    )
    speech_judge: str = parameter(
        "",
        "Who writes down what the model has said where `eval_answers` lets it speak, so that the words can be compared "
        "with the texts as `wer` and `cer`: `pocketsphinx`, which is installed with `pip install pocketsphinx` and "
        "listens for the words of the evaluation texts only, in English; or the folder of a model that `erniekit "
        "transcribe` takes. Without one no words are compared. `speaker_similarity`, which compares the voice with "
        "that of the text's own recording, needs no judge, but the package Resemblyzer (`pip install resemblyzer`).",
        kind=PATH,
        stages=("TTS",),
        needs=when("do_eval"),
        example="pocketsphinx",
    )
    metric_for_best_model: str = parameter(
        Derived(
            "`eval_loss`; `eval_reward` for stage GRPO", lambda builder: (builder.stage.metrics[0], ""), "eval_loss"
        ),
        "The metric that `load_best_model_at_end` and early stopping compare. "
        f"{_by_stages(stages_by_metrics())}. With `eval_answers` also {_by_stages(stages_by_answer_metrics())}. "
        "`eval_` may be left out.",
        choices=METRICS,
        spellings={name.removeprefix("eval_").lower(): name for name in METRICS},
        needs=when("do_eval"),
        verbs=("train",),
        example="eval_token_accuracy",
    )
    greater_is_better: bool = parameter(
        Derived(
            "true for accuracies, margins, rewards, similarities and scores of answers, false for losses, perplexity "
            "and error rates",
            lambda builder: (
                _greater_is_better(builder["metric_for_best_model"]),
                f"for {builder['metric_for_best_model']}",
            ),
            False,
        ),
        "Whether a greater value of `metric_for_best_model` is a better one.",
        needs=when("do_eval"),
        verbs=("train",),
    )
    early_stopping_patience: int = parameter(
        0,
        "Stop when `metric_for_best_model` has not improved in this many evaluations in a row. 0 never does.",
        minimum=0,
        unit="evaluations",
        needs=when("do_eval"),
        verbs=("train",),
        example=3,
    )
    early_stopping_threshold: float = parameter(
        0.0,
        "How much better than the best so far an evaluation must be to count as progress for "
        "`early_stopping_patience`.",
        minimum=0.0,
        needs=when("do_eval"),
        verbs=("train",),
        example=0.001,
    )
    load_best_model_at_end: bool = parameter(
        False,
        "Leave the model of the best evaluation in `output_dir` instead of the last one. A checkpoint is then saved at "
        "every evaluation that is the best so far, and the best one is never removed.",
        needs=when("do_eval"),
        verbs=("train",),
    )


_GREATER = (
    "accuracy", "margin", "reward_chosen", "reward_desirable", "logps_chosen", "match", "rouge", "bleu", "similarity",
    "auc", "agreement",
)  # fmt: skip


def _greater_is_better(metric: str) -> bool:
    return metric == "eval_reward" or any(word in metric for word in _GREATER)


@rule("text_normalizer", "do_eval", "eval_answers")
def a_normaliser_needs_answers(builder: ConfigBuilder) -> None:
    """`text_normalizer` has no effect without `eval_answers`."""
    if builder["do_eval"] and builder.differs("text_normalizer") and not builder["eval_answers"]:
        builder.no_effect("text_normalizer", "because eval_answers is 0")


@rule("metric_for_best_model", "stage", "do_eval", "eval_answers")
def the_metric_is_of_the_stage(builder: ConfigBuilder) -> None:
    """`metric_for_best_model` is a metric that evaluations of the stage report."""
    metrics, answers = builder.stage.metrics, builder.stage.answer_metrics
    metric = builder["metric_for_best_model"]
    if not builder["do_eval"] or metric in metrics or (metric in answers and builder["eval_answers"]):
        return
    if metric in (answers or ANSWER_METRICS):
        what = f"needs {'spoken texts' if builder.stage.reads_codes else 'answers to held-out dialogues'}"
        builder.problem("metric_for_best_model", what, "write how many as `eval_answers`, such as 50")
    else:
        what = f"stage {builder['stage']} has no {metric}"
        builder.problem("metric_for_best_model", what, f"write one of {', '.join(metrics)}")


@rule("metric_for_best_model", "speech_judge", "eval_answers", "do_eval", stages=("TTS",))
def spoken_words_need_a_judge(builder: ConfigBuilder) -> None:
    """In stage TTS `wer` and `cer` need a `speech_judge`, which has no effect without `eval_answers`."""
    if not builder["do_eval"]:
        return
    if builder["metric_for_best_model"] in ("eval_wer", "eval_cer") and not builder["speech_judge"]:
        what = "needs somebody who writes down what the model says"
        builder.problem("metric_for_best_model", what, "write `speech_judge: pocketsphinx`, or a listener's folder")
    if builder.differs("speech_judge") and not builder["eval_answers"]:
        builder.no_effect("speech_judge", "because eval_answers is 0")


@rule("load_best_model_at_end", "early_stopping_patience", "save_strategy", "evaluation_strategy", "do_eval")
def the_best_model_is_kept(builder: ConfigBuilder) -> None:
    """`load_best_model_at_end` needs `save_strategy`; it and early stopping need evaluations during training."""
    if not builder["do_eval"]:
        return
    if builder["load_best_model_at_end"] and builder["save_strategy"] == "no":
        builder.problem(
            "load_best_model_at_end", "nothing is saved with save_strategy no", "write `save_strategy: steps`"
        )
    for name in ("load_best_model_at_end", "early_stopping_patience"):
        if builder[name] and builder["evaluation_strategy"] == "no":
            builder.problem(
                name, "nothing is evaluated with evaluation_strategy no", "write `evaluation_strategy: steps`"
            )


@rule("early_stopping_threshold", "early_stopping_patience", "do_eval")
def a_threshold_needs_patience(builder: ConfigBuilder) -> None:
    """`early_stopping_threshold` has no effect without `early_stopping_patience`."""
    if builder["do_eval"] and builder["early_stopping_threshold"] and not builder["early_stopping_patience"]:
        builder.no_effect("early_stopping_threshold", "because early_stopping_patience is 0")


@rule("do_eval", "eval_dataset_path", "eval_split", "evaluation_strategy", "do_train")
def evaluation_needs_data(builder: ConfigBuilder) -> None:
    """`do_eval: true` needs `eval_dataset_path` or `eval_split`, unless `evaluation_strategy` is `no`."""
    if not builder["do_eval"] or builder["eval_dataset_path"] or builder["eval_split"]:
        return
    if not builder["do_train"]:
        builder.problem("eval_dataset_path", "evaluation has no data", "name the held-out files here")
    elif builder["evaluation_strategy"] != "no":
        builder.problem(
            "do_eval", "evaluation has no data", "set `eval_dataset_path` or `eval_split`, or `do_eval: false`"
        )


@rule("eval_split", "train_dataset_path", "train_dataset_type", "do_eval", "do_train")
def a_split_needs_records(builder: ConfigBuilder) -> None:
    """`eval_split` holds out records of `train_dataset_path`, which are not packed."""
    if not builder["eval_split"]:
        return
    if "packed" in builder["train_dataset_type"]:
        what = "packed data has rows of several records, so that none can be held out"
        advice = "write `eval_split` where the data is packed, and name held-out files as `eval_dataset_path` here"
        builder.problem("eval_split", what, advice)
    if builder["do_eval"] and not builder["do_train"] and not builder["train_dataset_path"]:
        builder.problem("eval_split", "there is no `train_dataset_path` to hold records out of", "name it")
    for name in ("eval_dataset_type", "eval_dataset_prob"):
        if builder.is_set(name) and builder["do_eval"]:
            builder.no_effect(name, "because eval_split is set: the held-out records are those of the training files")


@rule("evaluation_strategy", "eval_steps", "do_eval")
def eval_steps_need_their_strategy(builder: ConfigBuilder) -> None:
    """`eval_steps` has no effect unless `evaluation_strategy` is `steps`."""
    if builder.differs("eval_steps") and builder["do_eval"] and builder["evaluation_strategy"] != "steps":
        builder.no_effect("eval_steps", f"because evaluation_strategy is {builder['evaluation_strategy']}")


@rule("max_evaluate_steps")
def max_evaluate_steps_not_zero(builder: ConfigBuilder) -> None:
    """`max_evaluate_steps` is positive, or -1 for no limit."""
    if builder["max_evaluate_steps"] == 0:
        builder.problem("max_evaluate_steps", "0 would evaluate nothing", "write -1 for no limit, or `do_eval: false`")


@rule("eval_dataset_prob", "do_eval", verbs=("train",))
def evaluation_reads_everything(builder: ConfigBuilder) -> None:
    """Weights in `eval_dataset_prob` other than 0 and 1 have no effect: a file is read whole, or left out."""
    weights = builder["eval_dataset_prob"]
    if builder["do_eval"] and builder.is_set("eval_dataset_prob") and set(weights) - {0.0, 1.0}:
        why = "beyond leaving out files of 0: an evaluation reads every record of the others once, and samples none"
        builder.no_effect("eval_dataset_prob", why)


@rule(
    "load_best_model_at_end",
    "max_evaluate_steps",
    "metric_for_best_model",
    "do_eval",
    "save_total_limit",
    verbs=("train",),
)
def the_best_model_is_chosen_on_enough(builder: ConfigBuilder) -> None:
    """`load_best_model_at_end` with `max_evaluate_steps: 1` chooses by one batch; with `save_total_limit: 1` the
    newest checkpoint and the best one both stay."""
    if not (builder["do_eval"] and builder["load_best_model_at_end"]):
        return
    batches, of_answers = builder["max_evaluate_steps"], builder["metric_for_best_model"] in ANSWER_METRICS
    if batches == 1 and not of_answers:
        builder.messages.append(
            f"load_best_model_at_end: the best model is chosen on {batches} batch of the held-out data, since "
            f"max_evaluate_steps is {batches}; write max_evaluate_steps: -1 for all of it"
        )
    if builder["save_total_limit"] == 1:
        builder.messages.append(
            "save_total_limit is 1 with load_best_model_at_end: the newest checkpoint and the best one stay, so up to 2"
        )


@rule("eval_dataset_path", "eval_dataset_type", "eval_dataset_prob", "stage")
def evaluation_sources_agree(builder: ConfigBuilder) -> None:
    """Evaluation files, formats and probabilities agree in number (one value applies to all); formats fit the stage."""
    agree_on_sources(builder, "eval")


SECTION = section(
    EvaluationParameters,
    key="evaluation",
    title="1.2 Evaluation",
    verbs=("train", "eval"),
    aliases=(renamed("load_best", "load_best_model_at_end", "Another name of `load_best_model_at_end`."),),
    rules=(
        evaluation_needs_data,
        a_split_needs_records,
        eval_steps_need_their_strategy,
        max_evaluate_steps_not_zero,
        evaluation_sources_agree,
        the_metric_is_of_the_stage,
        spoken_words_need_a_judge,
        the_best_model_is_kept,
        the_best_model_is_chosen_on_enough,
        evaluation_reads_everything,
        a_threshold_needs_patience,
        a_normaliser_needs_answers,
    ),
)
