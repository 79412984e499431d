"""1.3 Training: the data, the length of the run, the optimizer and the learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, Derived, parameter, renamed, rule, section, when
from erniekit.config.sections.schedule_rules import SCHEDULE_RULES
from erniekit.config.sections.sources import FORMATS, agree_on_sources, source_kinds
from erniekit.config.stages import WORD_STAGES, stages_by_learning_rate
from erniekit.config.values import EPOCHS, NUMBERS, PATH, PATHS_OR_URLS, WORDS

DATA_VERBS = ("train", "preview")
RECORD_VERBS = (*DATA_VERBS, "codes")
WARMS_UP = when(
    "lr_scheduler_type", "linear", "cosine", "polynomial", "constant_with_warmup", "inverse_sqrt", "wsd"
)  # fmt: skip
_DEFAULT_LEARNING_RATES = ", ".join(
    f"{value:.0e}".replace("e-0", "e-") + f" for {' and '.join(trainings)}"
    for value, trainings in stages_by_learning_rate().items()
)


def _learning_rate(builder: ConfigBuilder) -> tuple[float, str]:
    stage = builder.stage
    if builder["lora"]:
        return stage.lora_learning_rate, f"for {stage.name} with LoRA"
    return stage.learning_rate, f"for {stage.name}"


@dataclass(frozen=True)
class TrainingParameters:
    """The training data, the length of the run, batches, the optimizer and the learning-rate schedule."""

    train_dataset_path: tuple[str, ...] = parameter(
        (),
        "The file or files of training records (JSON lines, JSON, Parquet, CSV, TSV or plain text), or data sets of "
        "the Hugging Face hub (`org/name`, `org/name:split`, `org/name:config/split`); required for training, for "
        "`erniekit preview` and for `erniekit codes`. Several are separated by commas or written as a YAML list. A URL "
        "of an object store (`s3://`, `gs://`, `az://`, `oss://`) names a file or a folder that is downloaded once.",
        kind=PATHS_OR_URLS,
        verbs=RECORD_VERBS,
        example="data/sft-train.jsonl",
    )
    train_dataset_type: tuple[str, ...] = parameter(
        ("erniekit",),
        f"The format of each training file; one value applies to all files. {FORMATS} `packed` is a folder that "
        "`erniekit pack` wrote; it must be the only training data, and its rows keep their order.",
        **source_kinds("packed"),
        verbs=DATA_VERBS,
    )
    media_dir: tuple[str, ...] = parameter(
        (),
        "The folder or folders below which the recordings of training and evaluation records lie; their relative paths "
        "are relative to it, to the first in which the file is. A path that leaves these folders is refused. Empty "
        "means the folder of each data file. A folder of an object store, by its URL, is downloaded once, as a whole.",
        kind=PATHS_OR_URLS,
        stages=WORD_STAGES,
        verbs=("train", "eval", "preview", "generate", "codes"),
        example="/data/recordings",
    )
    train_dataset_prob: tuple[float, ...] = parameter(
        (1.0,),
        "The weight of each training file when sources are mixed by probability (see `mix_strategy`), in the order of "
        "`train_dataset_path`. Weights are divided by their sum; a file of weight 0 is left out.",
        kind=NUMBERS,
        minimum=0.0,
        verbs=DATA_VERBS,
        example="0.8,0.2",
    )
    data_cache_dir: str = parameter(
        "",
        "The cache folder of tokenised data, which is memory-mapped, so that a second run starts at once. Empty means "
        "the folder in the environment variable `ERNIEKIT_CACHE`, or else `~/.cache/erniekit`.",
        kind=PATH,
        verbs=("train", "eval", "preview"),
        example="/tmp/erniekit-cache",
    )
    max_seq_len: int = parameter(
        8192,
        "The longest sequence of tokens that the model sees at once: the capacity of a pack, and the limit that "
        "`over_length_policy` applies to a single sample. Memory grows in proportion to it.",
        minimum=2,
        unit="tokens",
        verbs=("train", "eval", "preview"),
        example=4096,
    )
    max_steps: int = parameter(
        -1,
        "Stop after this many optimizer steps, whatever `num_train_epochs` says. -1 sets no limit.",
        minimum=-1,
        maximum=1_000_000_000,
        unit="optimizer steps",
        example=800,
    )
    num_train_epochs: float = parameter(
        1,
        "The number of passes over the training data, each in a new order. A fraction ends the last pass early: 0.5 is "
        "half of the steps of an epoch, rounded up.",
        kind=EPOCHS,
        above=0,
        maximum=1_000_000,
        unit="epochs",
        needs=when("max_steps", -1),
        example=3,
    )
    per_device_train_batch_size: int = parameter(
        1,
        "The number of packs, or of samples without packing, in one forward and backward pass on each device. One "
        "optimizer step uses this x `gradient_accumulation_steps` x the number of data-parallel and sharding ranks.",
        minimum=1,
        unit="packs",
        needs=when("batch_tokens", 0),
        example=2,
    )
    gradient_accumulation_steps: int = parameter(
        1,
        "Accumulate the gradients of this many passes before each optimizer step. The loss is divided by the target "
        "tokens of the step, so 4 passes of 1 pack give the same gradients as 1 pass of 4 packs, with less memory.",
        minimum=1,
        unit="passes",
        example=8,
    )
    seed: int = parameter(
        42,
        "The seed of all random numbers: initial weights, order of samples, dropout, sampling of answers. Each draw is "
        "seeded from this seed and its position (step, micro-batch, layer), so a run can be repeated and resumed "
        "exactly.",
        minimum=0,
        maximum=2**32 - 1,
        verbs=("train", "eval", "preview", "chat", "generate", "codes", "speak"),
        example=7,
    )
    random_shuffle: bool = parameter(
        True,
        "Shuffle the samples in each epoch, in an order that depends on `seed` and the epoch only. When false "
        "samples keep the order of their files; several sources are still mixed. `erniekit codes` writes shards of "
        "recordings in such an order.",
        verbs=RECORD_VERBS,
    )
    learning_rate: float = parameter(
        Derived(_DEFAULT_LEARNING_RATES, _learning_rate, 3e-5),
        "The highest learning rate, reached when warm-up ends; `lr_scheduler_type` says how it changes after that.",
        minimum=0.0,
        maximum=100.0,
        example=1e-5,
    )
    lr_scheduler_type: str = parameter(
        "linear",
        "The learning-rate schedule after warm-up: `linear` decay to 0, `cosine` to `min_lr`, `polynomial` to "
        "`lr_end`, `constant` (no warm-up), `constant_with_warmup`, `inverse_sqrt`, which falls with the root of "
        "the steps and never ends (with a warm-up of W to half the peak after 4 W steps; W is 10,000 without warm-up), "
        "or `wsd`, which stays constant and decays in the last `decay_steps`. Formulas and rounding are those of "
        "transformers: update k of N uses the rate of k - 1 finished updates, so the last one is one step before the "
        "end of the curve.",
        choices=("linear", "cosine", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt", "wsd"),
        example="cosine",
    )
    warmup_steps: int = parameter(
        0,
        "Let the learning rate rise linearly from 0 (with `wsd` from `min_lr`) over this many optimizer "
        "steps. Between 1% and 10% of the run is usual.",
        minimum=0,
        unit="optimizer steps",
        needs=WARMS_UP,
        example=20,
    )
    warmup_ratio: float = parameter(
        0.0,
        "The same as a share of all steps of the run, rounded up, for runs whose length is not known beforehand: with "
        "0.03, 30 of 1,000 steps. `warmup_steps` above 0 takes precedence, as in transformers.",
        minimum=0.0,
        below=1.0,
        needs=WARMS_UP,
        example=0.03,
    )
    min_lr: float = parameter(
        0.0,
        "The learning rate at which a cosine or WSD decay ends. The last update is one step before the end of the "
        "curve, so it is a little above.",
        minimum=0.0,
        needs=when("lr_scheduler_type", "cosine", "wsd"),
        example=1e-6,
    )
    num_cycles: float = parameter(
        0.5,
        "The number of periods of the cosine schedule. The default of half a period decays once from the peak to "
        "`min_lr`. With 1.5 the rate returns to the peak once and ends at `min_lr`, which can leave a plateau; with a "
        "whole number a run ends at the peak, which is rarely wanted.",
        above=0.0,
        needs=when("lr_scheduler_type", "cosine"),
        example=1.5,
    )
    lr_end: float = parameter(
        1e-7,
        "The learning rate at which the polynomial schedule ends.",
        minimum=0.0,
        needs=when("lr_scheduler_type", "polynomial"),
        example=1e-6,
    )
    power: float = parameter(
        1.0,
        "The exponent of the polynomial schedule; 1 is a straight line, larger values fall faster at first.",
        above=0.0,
        needs=when("lr_scheduler_type", "polynomial"),
        example=2.0,
    )
    decay_steps: int = parameter(
        0,
        "The length of the decay at the end of a WSD (warm-up, stable, decay) schedule.",
        minimum=0,
        unit="optimizer steps",
        needs=when("lr_scheduler_type", "wsd"),
        example=200,
    )
    wsd_decay_type: str = parameter(
        "linear",
        "The shape of the decay of a WSD schedule: a straight line, half a cosine wave, or 1 - sqrt(progress), "
        "which falls steeply at first.",
        choices=("linear", "cosine", "1-sqrt"),
        needs=when("lr_scheduler_type", "wsd"),
        example="cosine",
    )
    layerwise_lr_decay_bound: float = parameter(
        1.0,
        "Give lower layers a smaller learning rate, which rises linearly from the embedding to the head: with bound b "
        "and L layers, depth d has b + (1 - b) x d / (L + 2) times the learning rate. The embedding has d = 0, layer i "
        "has d = i, the final norm and the head have d = L + 2. 1 treats all layers alike. An audio encoder and its "
        "projector stand before the first layer, so they have d = 0 like the embedding.",
        above=0.0,
        maximum=1.0,
        example=0.5,
    )
    freeze_config: tuple[str, ...] = parameter(
        (),
        "The parts of the model that are not trained: `freeze_audio` (the audio encoder; of a model that speaks the "
        "tables of codes), `freeze_aligner` (the projector between encoder and decoder), `freeze_llm` (the decoder "
        "with embedding and head), `freeze_vision` (an encoder of images). A frozen part has no gradient, no optimizer "
        "state and no weight decay, and its weights stay as they are to the bit. Words for parts that the model does "
        "not have are refused, and so are words that leave nothing to train. With `lora` all weights are frozen "
        "anyway; then no adapter may stand in a part that is named here.",
        kind=WORDS,
        choices=("freeze_audio", "freeze_aligner", "freeze_llm", "freeze_vision"),
        spellings={"freeze_lm": "freeze_llm"},
        example="freeze_audio freeze_aligner",
    )
    audio_lr_ratio: float = parameter(
        1.0,
        "The learning rate of the audio encoder, as a multiple of `learning_rate` at every step of the schedule; also "
        "of adapters that stand in the encoder. A pretrained encoder usually needs a tenth of the decoder's rate. The "
        "projector learns at `learning_rate`. All layers of the encoder have the same rate. Of a model that speaks it "
        "is the rate of the tables of codes. The log shows it as `audio_learning_rate`.",
        above=0.0,
        maximum=1000.0,
        example=0.1,
    )
    optim: str = parameter(
        "adamw",
        "The optimizer. `adamw` is Paddle's AdamW with decoupled weight decay; `adamw_custom` is the same algorithm "
        "with moments that can be stored in bfloat16 or offloaded. `use_lowprecision_moment`, `offload_optim` and "
        "`tensorwise_offload_optimizer` select it automatically; without them it gives the same losses as `adamw`.",
        choices=("adamw", "adamw_custom"),
        example="adamw_custom",
    )
    weight_decay: float = parameter(
        0.0,
        "AdamW's decoupled weight decay: each step shrinks the weights by learning rate x this. Biases and the weights "
        "of normalisation layers are not decayed. 0.1 is usual in pre-training; fine-tuning needs little or none, "
        "because the weights should stay near where they began. It costs nothing.",
        minimum=0.0,
        example=0.1,
    )
    adam_beta1: float = parameter(
        0.9, "AdamW's decay rate of the mean of gradients.", minimum=0.0, below=1.0, example=0.85
    )
    adam_beta2: float = parameter(
        0.999, "AdamW's decay rate of the mean of squared gradients.", minimum=0.0, below=1.0, example=0.95
    )
    adam_epsilon: float = parameter(
        1e-8,
        "The constant that AdamW adds to the denominator, against division by zero. It bounds the step of weights "
        "with tiny gradients: raise it to 1e-6 where such weights jump, as with 16-bit gradients that round to 0.",
        above=0.0,
        example=1e-6,
    )
    max_grad_norm: float = parameter(
        1.0,
        "Scale the gradients of a step down when their global 2-norm exceeds this. 0 does not clip.",
        minimum=0.0,
        example=0.5,
    )


@rule("train_dataset_path", "do_train")
def training_needs_data(builder: ConfigBuilder) -> None:
    """Training and `erniekit preview` need `train_dataset_path`."""
    wanted = (builder.verb == "train" and builder["do_train"]) or builder.verb == "preview"
    if wanted and not builder["train_dataset_path"]:
        builder.missing("train_dataset_path")


@rule("train_dataset_path", "train_dataset_type", "train_dataset_prob", "stage")
def training_sources_agree(builder: ConfigBuilder) -> None:
    """Training files, formats and probabilities agree in number (one value applies to all); formats fit the stage."""
    agree_on_sources(builder, "train")


_FIXED_BY_PACKING = ("mix_strategy", "num_samples_each_epoch", "curriculum")
_USED_FOR_EVAL_TOO = (
    "packing", "greedy_intokens", "buffer_size", "batch_tokens", "max_batch_samples", "min_sample_len",
    "max_sample_len", "over_length_policy", "max_prompt_len", "split_multi_turn",
)  # fmt: skip


@rule(
    "train_dataset_type",
    "train_dataset_path",
    "random_shuffle",
    "do_eval",
    *_FIXED_BY_PACKING,
    *_USED_FOR_EVAL_TOO,
)
def packed_data_is_replayed(builder: ConfigBuilder) -> None:
    """A folder of `train_dataset_type: packed` is the only training data, and is neither shuffled nor mixed."""
    if "packed" not in builder["train_dataset_type"]:
        return
    if len(builder["train_dataset_path"]) > 1:
        what = f"{len(builder['train_dataset_path'])} files, one of which is a packed folder"
        builder.problem(
            "train_dataset_path", what, "pack them together with `erniekit pack`, and give that folder alone"
        )
    if builder.is_set("random_shuffle") and builder["random_shuffle"]:
        what = "`train_dataset_type` is packed, and packed data keeps its order"
        builder.problem("random_shuffle", what, "remove it, or train on the files it was packed from")
    else:
        builder.set_silently("random_shuffle", False)
    for name in _FIXED_BY_PACKING if builder["do_eval"] else (*_FIXED_BY_PACKING, *_USED_FOR_EVAL_TOO):
        if builder.differs(name):
            builder.no_effect(name, "because train_dataset_type is packed: `erniekit pack` has already applied it")


@rule("max_steps")
def max_steps_not_zero(builder: ConfigBuilder) -> None:
    """`max_steps` is positive, or -1 for no limit."""
    if builder["max_steps"] == 0:
        builder.problem(
            "max_steps",
            "0 steps would train nothing",
            "write -1 for no limit; to evaluate only, `do_train: false` and `do_eval: true`",
        )


SECTION = section(
    TrainingParameters,
    key="training",
    title="1.3 Training",
    verbs=("train",),
    aliases=(
        renamed(
            "batch_size",
            "per_device_train_batch_size",
            "The name of `per_device_train_batch_size` in older configurations.",
        ),
    ),
    rules=(
        training_needs_data,
        training_sources_agree,
        packed_data_is_replayed,
        max_steps_not_zero,
        *SCHEDULE_RULES,
    ),
)
