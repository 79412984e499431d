"""3.2 Codes: how recordings become codes of a codec, and how these are written."""

from __future__ import annotations

import re
from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, Derived, parameter, rule, section, when
from erniekit.config.values import NUMBERS, PATH

FITTED = ("residual_kmeans", "kmeans")  # words of `codec`: fitted on the user's own recordings
DEFAULT_CODES = 256  # of a codebook that is fitted
SPEECH_VERBS = ("codes", "train", "eval", "preview")  # where codes are written, and read
LONGEST_SECONDS = 86_400.0  # of a recording; the reader of recordings takes no longer one
_PART = re.compile(r"([1-9]\d{0,5})/([1-9]\d{0,5})")


def _codec(builder: ConfigBuilder) -> tuple[str, str]:
    return ("residual_kmeans", "") if builder.verb == "codes" else ("", "")


def _codebook_size(builder: ConfigBuilder) -> tuple[int | None, str]:
    return (DEFAULT_CODES, "") if builder.verb == "codes" else (None, "")


@dataclass(frozen=True)
class CodesParameters:
    """How `erniekit codes` turns recordings into codes, and which of them stage TTS reads."""

    codec: str = parameter(
        Derived("`residual_kmeans` for `erniekit codes`, else the codec that made the codes", _codec, ""),
        "The codec. `residual_kmeans` and `kmeans` are fitted on the recordings themselves before they are encoded, "
        "and are left in `output_dir/codec`: the first gives `codec_levels` codes for each frame of a log-mel "
        "spectrogram and can be decoded to sound, the second one unit. Anything else is the folder of a codec: one "
        "that was fitted before, or EnCodec, DAC, Mimi or the Higgs tokenizer with `config.json` and safetensors. With "
        "`from_hf_hub`, `from_aistudio` or `from_modelscope` it may be a name on that hub. In stage TTS it is the "
        "folder of the codec whose codes are read; where it is not written, the one that made the codes (`codes.json` "
        "beside them), else `audio_tokenizer` in the model folder.",
        kind=PATH,
        verbs=(*SPEECH_VERBS, "speak"),
        stages=("TTS",),
        example="models/encodec_24khz",
    )
    codec_levels: int | None = parameter(
        None,
        "The number of codes for each frame: the levels of the codec from the coarsest. null takes all that the codec "
        "has, and 4 where `residual_kmeans` is fitted. In stage TTS a number that is written is compared with codec, "
        "data and model.",
        verbs=SPEECH_VERBS,
        stages=("TTS",),
        minimum=1,
        maximum=64,
        unit="levels",
        example=8,
    )
    codec_features: str = parameter(
        "log_mel",
        "The features of which `kmeans` makes units: `log_mel`, or the folder of a HuBERT or wav2vec 2.0 model, whose "
        "hidden states are clustered.",
        kind=PATH,
        needs=when("codec", "kmeans"),
        example="models/hubert-base-ls960",
    )
    codec_layer: int | None = parameter(
        None,
        "The layer of the model in `codec_features` whose hidden states are clustered: 1 is the first, 0 its input. "
        "null takes the last.",
        minimum=0,
        maximum=1000,
        needs=when("codec", "kmeans"),
        example=9,
    )
    codec_centroids: str = parameter(
        "",
        "A file of centroids that others have fitted on these features, [codes, size of the features]: `.npy`, or "
        "`.safetensors` with one matrix. `kmeans` then fits nothing. The units of published speech models come so.",
        kind=PATH,
        needs=when("codec", "kmeans"),
        example="models/kmeans_10k.npy",
    )
    codebook_size: int | None = parameter(
        Derived(f"{DEFAULT_CODES} for `erniekit codes`, else that of the codec", _codebook_size, None),
        "The number of codes in a codebook that is fitted, that is of clusters of k-means. A codec that is there has "
        "its own; in stage TTS a number that is written is compared with it.",
        verbs=SPEECH_VERBS,
        stages=("TTS",),
        minimum=2,
        maximum=32_768,
        unit="codes",
        example=1024,
    )
    codec_fit_seconds: float = parameter(
        600.0,
        "The seconds of sound on which a codec is fitted: of recordings that `seed` draws, until they have so much.",
        above=0.0,
        unit="seconds",
        needs=when("codec", *FITTED),
        example=3600.0,
    )
    codes_format: str = parameter(
        "shards",
        "`shards` writes tar files of arrays (`KEY.npy`, int16 [levels, frames]) with a JSONL file of the records "
        "beside each and an index, `data.lst`, as OmniVoice's training reads them. `jsonl` writes one file, "
        "`units.jsonl`, in the order of the data: each record with its codes as `units`. It has room for one level.",
        choices=("shards", "jsonl"),
    )
    samples_per_shard: int = parameter(
        1000,
        "The largest number of recordings in a shard. An interrupted command continues behind the last complete "
        "shard, also where `codes_format` is `jsonl`.",
        minimum=1,
        maximum=1_000_000,
        unit="recordings",
        example=500,
    )
    min_num_shards: int = parameter(
        1,
        "The smallest number of shards: they hold fewer recordings than `samples_per_shard` where there would be "
        "fewer shards. Training wants at least as many as all its processes that read them.",
        minimum=1,
        maximum=1_000_000,
        unit="shards",
        needs=when("codes_format", "shards"),
        example=32,
    )
    codes_workers: int = parameter(
        0,
        "The number of processes that read and encode recordings, each with a codec of its own. 0 takes one for each "
        "core on a CPU, and one on a GPU. What is written does not depend on it.",
        minimum=0,
        maximum=1024,
        unit="processes",
        example=4,
    )
    codes_part: str = parameter(
        "1/1",
        "Which part of the recordings this command encodes, for several machines: `1/4` to `4/4` on four of them. Each "
        "writes its part into a folder of its own in `output_dir`. All need the same codec: `erniekit codes CONFIG "
        "--fit` fits one, and its folder is then `codec`.",
        example="2/4",
    )
    duration_range: tuple[float, ...] = parameter(
        (0.0, LONGEST_SECONDS),
        "The shortest and the longest recording that is encoded, or that stage TTS trains on. The others are counted; "
        "`erniekit codes` lists them in `skipped.jsonl`.",
        verbs=SPEECH_VERBS,
        stages=("TTS",),
        kind=NUMBERS,
        minimum=0.0,
        maximum=LONGEST_SECONDS,
        unit="seconds",
        example="1.0,30.0",
    )
    audio_peak: float = parameter(
        0.0,
        "Scale each recording so that the largest of its samples has this amplitude before it is encoded; 1 is full "
        "scale. OmniVoice's own tool does so with 0.9. 0 leaves recordings as loud as they are.",
        minimum=0.0,
        maximum=1.0,
        example=0.9,
    )


def part_of(section: CodesParameters) -> tuple[int, int]:
    """Return which part of the recordings is encoded, from 1, and of how many."""
    found = _PART.fullmatch(section.codes_part)
    assert found is not None  # a rule has checked it
    return int(found[1]), int(found[2])


@rule("train_dataset_path", verbs=("codes",))
def codes_need_recordings(builder: ConfigBuilder) -> None:
    """`erniekit codes` needs `train_dataset_path`, the files whose records name the recordings."""
    if not builder["train_dataset_path"]:
        builder.missing("train_dataset_path")


@rule("duration_range")
def durations_are_two_numbers(builder: ConfigBuilder) -> None:
    """`duration_range` is two numbers, the smaller one first."""
    bounds = builder["duration_range"]
    if len(bounds) != 2 or bounds[0] > bounds[1]:
        builder.problem("duration_range", "is not a shortest and a longest duration", "write for example `1.0,30.0`")


@rule("codes_part", "codec", "codec_centroids", verbs=("codes",))
def parts_share_a_codec(builder: ConfigBuilder) -> None:
    """`codes_part` is `K/N` with K from 1 to N; with more than one part the codec is one that is fitted already."""
    text, codec = builder["codes_part"], builder["codec"]
    found = _PART.fullmatch(text)
    if found is None or int(found[1]) > int(found[2]):
        builder.problem("codes_part", f"{text!r} is no part K/N with K from 1 to N", "write for example `1/4`")
    elif int(found[2]) > 1 and codec in FITTED and not builder["codec_centroids"]:
        what = f"every machine would fit a {codec} of its own, whose codes mean something else"
        builder.problem("codes_part", what, "fit one with `erniekit codes CONFIG --fit`, and write its folder as codec")


@rule("codec", "codec_levels", "codes_format", verbs=("codes",))
def units_have_one_level(builder: ConfigBuilder) -> None:
    """`codes_format: jsonl` holds codes of one level: `codec_levels` is 1, or the codec has one."""
    levels = builder["codec_levels"]
    if builder["codec"] == "kmeans" and (levels or 1) > 1:
        builder.problem("codec_levels", f"kmeans has one level, not {levels}", "remove it, or write residual_kmeans")
    elif builder["codes_format"] == "jsonl" and (levels or 1) > 1:
        builder.problem("codec_levels", f"codes_format jsonl has room for one level, not {levels}", "write 1")
    elif builder["codes_format"] == "jsonl" and builder["codec"] == "residual_kmeans" and levels is None:
        builder.derive("codec_levels", 1, "because codes_format is jsonl")


@rule("codec_layer", "codec_features", "codec", verbs=("codes",))
def layers_are_of_a_model(builder: ConfigBuilder) -> None:
    """`codec_layer` has no effect on `codec_features: log_mel`."""
    if builder["codec"] == "kmeans" and builder["codec_features"] == "log_mel" and builder.differs("codec_layer"):
        builder.no_effect("codec_layer", "because codec_features is log_mel")


@rule("codec_centroids", "codec", "codebook_size", "codec_fit_seconds", verbs=("codes",))
def centroids_are_not_fitted(builder: ConfigBuilder) -> None:
    """`codebook_size` and `codec_fit_seconds` have no effect beside `codec_centroids`."""
    for name in ("codebook_size", "codec_fit_seconds"):
        if builder["codec"] == "kmeans" and builder["codec_centroids"] and builder.differs(name):
            builder.no_effect(name, "because codec_centroids has the clusters")


@rule("codec", stages=("TTS",), verbs=("train", "eval", "preview"))
def codes_have_a_codec(builder: ConfigBuilder) -> None:
    """In stage TTS `codec` is the folder of a codec that is there."""
    if builder["codec"] in FITTED:
        what = f"{builder['codec']} is a way to fit a codec, and stage TTS reads codes of one that is there"
        builder.problem("codec", what, "write its folder, or leave it out")


@rule("codebook_size", "codec", verbs=("codes",))
def codebooks_are_fitted(builder: ConfigBuilder) -> None:
    """For `erniekit codes`, `codebook_size` has no effect on a codec that is there, and null is its default."""
    if not builder["codec"]:
        builder.missing("codec")
    if builder["codebook_size"] is None:
        builder.set_silently("codebook_size", DEFAULT_CODES)
    if builder.differs("codebook_size") and builder["codec"] not in FITTED:
        builder.no_effect(
            "codebook_size", f"because codec is {builder['codec']}; it needs `codec` {' or '.join(FITTED)}"
        )


@rule("codes_format", "random_shuffle", verbs=("codes",))
def units_keep_their_order(builder: ConfigBuilder) -> None:
    """`random_shuffle` mixes what is in shards; `codes_format: jsonl` keeps the order of the data."""
    if builder["codes_format"] == "jsonl":
        if builder.is_set("random_shuffle") and builder["random_shuffle"]:
            builder.no_effect("random_shuffle", "because codes_format is jsonl, which keeps the order of the data")
        builder.set_silently("random_shuffle", False)


SECTION = section(
    CodesParameters,
    key="codes",
    title="3.2 Codes",
    verbs=("codes",),
    rules=(
        codes_need_recordings,
        durations_are_two_numbers,
        parts_share_a_codec,
        units_have_one_level,
        layers_are_of_a_model,
        codebooks_are_fitted,
        codes_have_a_codec,
        centroids_are_not_fitted,
        units_keep_their_order,
    ),
)
