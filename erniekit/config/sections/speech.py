"""2.8 Speech: what a model that speaks learns to predict, and how its samples are drawn."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, Derived, parameter, rule, section, when
from erniekit.config.values import NUMBERS, OPTIONAL_NUMBERS, REPEATABLE_WORDS, format_value, read_number

DATA_VERBS = ("train", "eval", "preview")
MASKED, AR_NAR = when("tts_objective", "masked"), when("tts_objective", "ar_nar")
SAMPLING_WORDS = ("auto", "equal")  # words of `codebook_sampling`; anything else is weights


def _condition_dropout(builder: ConfigBuilder) -> tuple[float, str]:
    masked = builder["tts_objective"] == "masked"
    return (0.1, "with tts_objective masked") if masked else (0.0, "with tts_objective ar_nar")


@dataclass(frozen=True)
class SpeechParameters:
    """Text to speech: a model reads a text and predicts the codes of a recording in which it is said."""

    tts_objective: str = parameter(
        "masked",
        "What the model predicts. `masked` hides a drawn share of the codes of a recording and predicts these, all "
        "levels at once, so that speaking unmasks them in a few steps (OmniVoice). `ar_nar` draws a level for each "
        "sample: the first one frame after frame, a later one for all frames at once from those above it, after a "
        "prompt of the same speaker (VALL-E). A model that speaks already fits one of the two.",
        choices=("masked", "ar_nar"),
        verbs=DATA_VERBS,
    )
    audio_codebook_weights: tuple[float, ...] = parameter(
        (),
        "One number for each level. `masked`: its weight in the loss, divided by the sum of all; empty takes those of "
        "the model's `config.json`, and for a new model 8,8,6,6,4,4,2,2 with 8 levels, else equal ones. `ar_nar`: the "
        "factor of the losses of that level; empty stands for 1.",
        kind=OPTIONAL_NUMBERS,
        minimum=0.0,
        verbs=("train", "eval"),
        example="8,8,6,6,4,4,2,2",
    )
    code_mask_ratio: tuple[float, ...] = parameter(
        (0.0, 1.0),
        "The smallest and the largest share of the codes that are hidden; each sample draws its own between them.",
        kind=NUMBERS,
        minimum=0.0,
        maximum=1.0,
        needs=MASKED,
        verbs=DATA_VERBS,
        example="0.1,1.0",
    )
    code_prompt_ratio: tuple[float, ...] = parameter(
        (0.0, 0.3),
        "The smallest and the largest share of a recording's frames at its beginning that is never hidden and has no "
        "loss: the model learns to go on in a voice. Each sample draws its own between them.",
        kind=NUMBERS,
        minimum=0.0,
        maximum=1.0,
        needs=MASKED,
        verbs=DATA_VERBS,
        example="0.0,0.5",
    )
    condition_dropout: float = parameter(
        Derived("0.1 with `tts_objective: masked`, 0 with `ar_nar`", _condition_dropout, 0.1),
        "The probability with which a sample has neither text nor prompt, so that `guidance_scale` can compare the "
        "model with itself without them.",
        minimum=0.0,
        maximum=1.0,
        verbs=DATA_VERBS,
        example=0.2,
    )
    prompt_dropout: float = parameter(
        0.0,
        "The probability with which a sample has no prompt of its speaker.",
        minimum=0.0,
        maximum=1.0,
        needs=AR_NAR,
        verbs=DATA_VERBS,
        example=0.1,
    )
    language_probability: float = parameter(
        0.8,
        "The probability with which the language of the record (`language` or `language_id`) is told before the text.",
        minimum=0.0,
        maximum=1.0,
        verbs=DATA_VERBS,
        example=1.0,
    )
    instruct_probability: float = parameter(
        1.0,
        "The probability with which the `instruct` of the record, a description of the voice, is told before the text.",
        minimum=0.0,
        maximum=1.0,
        needs=MASKED,
        verbs=DATA_VERBS,
        example=0.5,
    )
    only_instruct_probability: float = parameter(
        0.5,
        "The probability with which a sample whose `instruct` is told has no clean beginning, so that the words alone "
        "decide the voice.",
        minimum=0.0,
        maximum=1.0,
        needs=MASKED,
        verbs=DATA_VERBS,
        example=0.8,
    )
    pinyin_probability: float = parameter(
        0.3,
        "The probability with which `text_pinyin` stands in the place of `text`, where a record has it.",
        minimum=0.0,
        maximum=1.0,
        needs=MASKED,
        verbs=DATA_VERBS,
        example=0.5,
    )
    text_frontend: str = parameter(
        "tokenizer",
        "How a text becomes ids. `tokenizer` takes those of the model's tokenizer; `characters` takes one token for "
        "each character; `phonemes` takes one for each character of the text's pronunciation as espeak-ng writes it, "
        "by the language of the record (`pip install 'erniekit[speech-data]'`). The model folder remembers it.",
        choices=("tokenizer", "characters", "phonemes"),
        verbs=DATA_VERBS,
    )
    tts_tasks: tuple[str, ...] = parameter(
        ("tts",),
        "What the samples ask for; each draws one of these words, and a word that is written twice is drawn twice as "
        "often. `tts` says a text in the voice of a prompt, `continuation` goes on behind the whole recording of "
        "another text, `stt` writes down a recording.",
        kind=REPEATABLE_WORDS,
        choices=("tts", "continuation", "stt"),
        needs=AR_NAR,
        verbs=DATA_VERBS,
        example="tts tts continuation",
    )
    prompt_seconds: tuple[float, ...] = parameter(
        (3.0, 6.0),
        "The smallest and the largest length of the prompt, a stretch of a recording of the same speaker. Each sample "
        "draws its own between them; a shorter recording is taken as a whole.",
        kind=NUMBERS,
        minimum=0.0,
        unit="seconds",
        needs=AR_NAR,
        verbs=DATA_VERBS,
        example="0.6,1.2",
    )
    prompt_sources: tuple[float, ...] = parameter(
        (1.0, 0.0, 0.0),
        "Where prompts come from, as three weights: another recording of the speaker, the most similar one of that "
        "speaker (`similar` of the record, else by the codes), the recording itself.",
        kind=NUMBERS,
        minimum=0.0,
        needs=AR_NAR,
        verbs=DATA_VERBS,
        example="0.7,0.2,0.1",
    )
    prompt_utterances: int = parameter(
        1,
        "The most recordings that are joined where one is shorter than the prompt's length.",
        minimum=1,
        maximum=4,
        unit="recordings",
        needs=AR_NAR,
        verbs=DATA_VERBS,
        example=3,
    )
    codebook_sampling: str = parameter(
        "auto",
        "How often a sample trains which level. `auto` draws each level half as often as the one before it, `equal` "
        "draws all alike. Otherwise it has a weight for each level, such as 8,7,6,5,4,3,2,1; a level of weight 0 is "
        "not trained.",
        needs=AR_NAR,
        verbs=DATA_VERBS,
        example="4,2,1,1",
    )
    loss_factors: tuple[float, ...] = parameter(
        (0.0, 0.0, 1.0),
        "The factors of three losses: of the text, of the prompt and of the response. Text and prompt are predicted "
        "in samples of the first level only, because those of the others see what they would predict.",
        kind=NUMBERS,
        minimum=0.0,
        needs=AR_NAR,
        verbs=DATA_VERBS,
        example="0.1,0,1",
    )
    sample_order: str = parameter(
        "data",
        "Which samples make an epoch. `data` takes each once. `speaker` takes equally many of every speaker, in turn: "
        "as many as the mean, rounded up. Who has more is heard in later epochs, who has less is repeated.",
        choices=("data", "speaker"),
        verbs=("train", "preview"),
    )
    batch_seconds: float = parameter(
        0.0,
        "With a value above 0, recordings of similar length are batched instead of packed: a micro-batch takes as many "
        "as fit into this many seconds, counted as rows x longest row. It replaces `packing`, "
        "`per_device_train_batch_size` and `per_device_eval_batch_size`. 0 is off.",
        minimum=0.0,
        unit="seconds",
        verbs=DATA_VERBS,
        example=100.0,
    )


def level_weights(section: SpeechParameters, levels: int) -> tuple[float, ...]:
    """Return how often a sample trains each of `levels` levels, as weights that sum to 1, by `codebook_sampling`.

    Raises:
        ValueError: the weights that the user wrote are not as many as there are levels.
    """
    word = section.codebook_sampling
    if word == "auto":
        weights = [0.5**level for level in range(levels)]
    elif word == "equal":
        weights = [1.0] * levels
    else:
        weights = _weights(word) or []
    if len(weights) != levels:
        raise ValueError(f"{len(weights)} weights for {levels} levels")
    return tuple(weight / sum(weights) for weight in weights)


def _weights(text: str) -> list[float] | None:
    """Return the weights that a user has written; None if they are none."""
    numbers = [read_number(part) for part in text.split(",")]
    sound = all(isinstance(number, float) and number >= 0 for number in numbers) and sum(numbers) > 0
    return numbers if sound else None


RANGES = {"code_mask_ratio": "0,1", "code_prompt_ratio": "0,0.3", "prompt_seconds": "3,6"}


@rule(*RANGES, stages=("TTS",))
def ranges_are_two_numbers(builder: ConfigBuilder) -> None:
    """`code_mask_ratio`, `code_prompt_ratio` and `prompt_seconds` are two numbers, the smaller one first;
    `code_mask_ratio` hides something."""
    for name, example in RANGES.items():
        bounds = builder[name]
        if len(bounds) != 2 or bounds[0] > bounds[1]:
            builder.problem(name, "is not a smallest and a largest value", f"write for example `{example}`")
    if builder["code_mask_ratio"] == (0.0, 0.0):
        builder.problem("code_mask_ratio", "nothing would be hidden, so nothing predicted", "write for example `0,1`")


@rule("prompt_sources", "loss_factors", stages=("TTS",))
def factors_are_three(builder: ConfigBuilder) -> None:
    """`prompt_sources` and `loss_factors` are three numbers, of which one is above 0."""
    for name, example in (("prompt_sources", "1,0,0"), ("loss_factors", "0,0,1")):
        values = builder[name]
        if len(values) != 3 or not any(values):
            builder.problem(name, "expected three numbers, one of them above 0", f"write for example `{example}`")


@rule("codebook_sampling", "codec_levels", "audio_codebook_weights", stages=("TTS",))
def levels_have_weights(builder: ConfigBuilder) -> None:
    """`codebook_sampling` is `auto`, `equal` or weights; these and `audio_codebook_weights` are as many as the levels,
    and not all 0."""
    word, levels = builder["codebook_sampling"], builder["codec_levels"]
    weights = None if word in SAMPLING_WORDS else _weights(word)
    if word not in SAMPLING_WORDS and weights is None:
        what = f"expected auto, equal or a weight for each level, got {format_value(word)}"
        builder.problem("codebook_sampling", what, "write for example `4,2,1,1`")
    for name, given in (("codebook_sampling", weights), ("audio_codebook_weights", builder["audio_codebook_weights"])):
        if given and levels is not None and len(given) != levels:
            builder.problem(name, f"{len(given)} weights for {levels} levels (`codec_levels`)", "write one for each")
    if builder["audio_codebook_weights"] and not any(builder["audio_codebook_weights"]):
        builder.problem("audio_codebook_weights", "all levels have weight 0", "give at least one a positive weight")


@rule("batch_seconds", "packing", "batch_tokens", stages=("TTS",))
def seconds_or_tokens(builder: ConfigBuilder) -> None:
    """`batch_seconds` replaces `packing` and `batch_tokens`, and holds the longest recording of `duration_range`."""
    seconds = builder["batch_seconds"]
    if not seconds:
        return
    for name in ("packing", "batch_tokens"):
        if builder[name]:
            what = f"samples are batched by their seconds, and `{name}` is {format_value(builder[name])}"
            builder.problem("batch_seconds", what, f"remove `{name}`, or leave out `batch_seconds`")
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        if builder.differs(name):
            builder.no_effect(name, f"because batch_seconds is {format_value(seconds)}")
    longest = builder["duration_range"][-1:]
    if builder.is_set("duration_range") and longest and longest[0] > seconds:
        what = f"a recording of {longest[0]:g} seconds (`duration_range`) would exceed {seconds:g}"
        builder.problem("batch_seconds", what, f"write at least {longest[0]:g}, or a shorter `duration_range`")


SECTION = section(
    SpeechParameters,
    key="speech",
    title="2.8 Speech",
    verbs=("train",),
    stages=("TTS",),
    rules=(ranges_are_two_numbers, factors_are_three, levels_have_weights, seconds_or_tokens),
)
