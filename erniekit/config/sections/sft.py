"""2.1 SFT: how samples of several sources make an epoch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, Derived, parameter, rule, section, when

LANGUAGE_CODE = re.compile("[a-z]{2,3}(-[A-Za-z0-9]{2,8})*")  # as records write it, too


def _mix_strategy(builder: ConfigBuilder) -> tuple[str, str]:
    if builder.differs("num_samples_each_epoch"):
        return "random", "because num_samples_each_epoch is set"
    if _shares_differ(builder["train_dataset_prob"]):
        return "random", "because train_dataset_prob is set"
    return "concat", ""


def _shares_differ(probabilities: tuple[float, ...]) -> bool:
    return len({share for share in probabilities if share > 0}) > 1


@dataclass(frozen=True)
class SftParameters:
    """How the samples of one or several sources are mixed, and what happens to those that are too long."""

    mix_strategy: str = parameter(
        Derived(
            "`random` where `train_dataset_prob` or `num_samples_each_epoch` asks for it, else `concat`",
            _mix_strategy,
            "concat",
        ),
        "How several sources are combined to one epoch. `concat` uses every sample exactly once. `random` gives each "
        "source its share of the epoch by `train_dataset_prob`; a source with too few samples repeats some. "
        "`interleave_under` takes samples in these shares until the first source is used up, `interleave_over` until "
        "the last one is, and starts the others again. By default nothing is left out or repeated.",
        choices=("random", "concat", "interleave_under", "interleave_over"),
        verbs=("train", "preview"),
    )
    num_samples_each_epoch: int = parameter(
        6_000_000,
        "The number of samples in an epoch of `mix_strategy: random`; samples repeat if the data has fewer. The "
        "default is only an upper limit, also when you write it: an epoch then never has more samples than the data. "
        "It also sets the interval of everything that happens once per epoch: evaluation, checkpoints, a new order.",
        minimum=1,
        unit="samples",
        needs=when("mix_strategy", "random"),
        verbs=("train", "preview"),
        example=20_000,
    )
    curriculum: str = parameter(
        "none",
        "`length` orders the first epoch from the shortest sample to the longest (packs are filled in that order, "
        "whatever `greedy_intokens` says); `random_shuffle` determines later epochs. `duration` orders it by the "
        "seconds of the recordings instead, in stage TTS. `none` orders all epochs alike.",
        choices=("none", "length", "duration"),
        verbs=("train", "preview"),
        example="length",
    )
    over_length_policy: str = parameter(
        "truncate_turns",
        "The treatment of conversations of more than `max_seq_len` tokens. `truncate_turns` removes its oldest turns "
        "until it fits, and drops it when even the last turn does not; `drop` leaves it out; `error` stops with the "
        "file and line. Records of `aligned_units` lose their oldest segments, or are left out, in the epochs in which "
        "they come out too long; `error` stops for one that might. Stage TTS cuts no recording: it leaves out those "
        "that come out too long. For pairs of stage DPO only the prompt loses turns; answers are never truncated. The "
        "numbers of truncated and dropped samples are printed before the first step.",
        choices=("drop", "truncate_turns", "error"),
        verbs=("train", "eval", "preview"),
    )
    on_bad_record: str = parameter(
        "stop",
        "The treatment of a malformed record. `stop` ends the run before anything is trained and reports the bad "
        "records of all files; `skip` leaves them out. The report before the first step counts skipped records, shows "
        "the first ten of a file with line and reason, and names the text file that lists all of them. Records that "
        "train nothing (an empty answer, a pair of equal answers or scores, every label 0) are always skipped. A file "
        "that cannot be read, or has another format, always stops the run.",
        choices=("stop", "skip"),
        verbs=("train", "eval", "preview"),
        example="skip",
    )
    split_multi_turn: bool | None = parameter(
        None,
        "Whether each trained answer of a dialogue becomes a sample of its own, with everything before it as the chat "
        "template renders it for that turn. null does so only where one sample cannot hold several answers, because "
        "the template renders earlier turns in another way (those of thinking models drop earlier thoughts); false "
        "refuses such a dialogue. The number of split dialogues is printed before the first step.",
        verbs=("train", "eval", "preview"),
        stages=("SFT",),
        example=True,
    )
    asr_prompt: str = parameter(
        "Transcribe the audio.",
        "The words that ask for a transcript, after the recording of a record of type `asr`. `{language}` in them "
        "becomes the language of the record, such as en. Voxtral's request has no words: it names the language, where "
        "one is known, and ends with a token of its own.",
        verbs=("train", "eval", "preview"),
        stages=("SFT",),
        example="Transcribe the audio. Its language is {language}.",
    )
    asr_language: str = parameter(
        "",
        "The language of records of type `asr` that name none, as a code such as en. By default the request for the "
        "transcript names no language, and the model learns to detect it.",
        verbs=("train", "eval", "preview"),
        stages=("SFT",),
        example="en",
    )


@rule("asr_language")
def languages_are_codes(builder: ConfigBuilder) -> None:
    """`asr_language` is the code of a language, such as `en` or `zh-CN`; Voxtral takes codes of two letters only."""
    language = builder["asr_language"]
    if language and not LANGUAGE_CODE.fullmatch(language):
        builder.problem("asr_language", f"{language!r} is no code of a language", "write for example `en`")


@rule("asr_prompt", "asr_language", "train_dataset_type", "eval_dataset_type", "eval_dataset_path")
def requests_need_recordings(builder: ConfigBuilder) -> None:
    """`asr_prompt` and `asr_language` have no effect if the types of all data are written and none is `asr`."""
    written = [builder[name] for name in ("train_dataset_type", "eval_dataset_type") if builder.is_set(name)]
    evaluates_untold = builder["eval_dataset_path"] and not builder.is_set("eval_dataset_type")
    if not builder.is_set("train_dataset_type") or evaluates_untold:
        return  # the records tell the type
    if {"asr", "packed"} & {kind for kinds in written for kind in kinds}:
        return
    for name in ("asr_prompt", "asr_language"):
        if builder.differs(name):
            builder.no_effect(name, "because no data is of type asr")


@rule("mix_strategy", "train_dataset_prob")
def probabilities_need_mixing(builder: ConfigBuilder) -> None:
    """`train_dataset_prob` has no effect with `mix_strategy: concat`, except that a file of 0 is left out."""
    if builder["mix_strategy"] == "concat" and _shares_differ(builder["train_dataset_prob"]):
        builder.no_effect("train_dataset_prob", "because mix_strategy is concat")


@rule("curriculum", "stage")
def durations_are_of_recordings(builder: ConfigBuilder) -> None:
    """`curriculum: duration` needs stage TTS, whose samples are recordings."""
    if builder["curriculum"] == "duration" and not builder.stage.reads_codes:
        what = f"the samples of stage {builder['stage']} have tokens and no duration"
        builder.problem("curriculum", what, "write `length`")


@rule("over_length_policy", stages=("TTS",))
def recordings_are_not_cut(builder: ConfigBuilder) -> None:
    """In stage TTS `over_length_policy: truncate_turns` leaves recordings out that are too long, as `drop` does."""
    if builder["over_length_policy"] == "truncate_turns":
        builder.change("over_length_policy", "drop", "stage TTS cuts no recording")


SECTION = section(
    SftParameters,
    key="sft",
    title="2.1 SFT",
    verbs=("train",),
    rules=(
        probabilities_need_mixing,
        languages_are_codes,
        requests_need_recordings,
        durations_are_of_recordings,
        recordings_are_not_cut,
    ),
)
