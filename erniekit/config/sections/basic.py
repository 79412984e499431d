"""1.1 Basic configuration: the model, the job, the output folder, and what is shown during the run."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, Derived, parameter, rule, section, when
from erniekit.config.stages import ALL_STAGES
from erniekit.config.values import DEVICE, WORDS

TRACKERS = ("visualdl", "tensorboard")  # each is opened by `erniekit.training.callbacks.trackers`
ALL_VERBS = ("train", "eval", "preview", "chat", "generate", "export", "server")


@dataclass(frozen=True)
class BasicParameters:
    """The stage, the model, the output folder, and what is shown during the run."""

    stage: str = parameter(
        "SFT",
        "The kind of training. PT continues next-token training on plain text; SFT trains on the assistant's "
        "turns of conversations; DPO trains on pairs of a preferred and a rejected answer. The stage decides which "
        "data formats are read, which loss is used and which default learning rate applies.",
        choices=ALL_STAGES,
        verbs=("train", "eval", "preview"),
    )
    model_name_or_path: str = parameter(
        "",
        "The folder of the model: `config.json`, the weights in safetensors files (not needed when "
        "`continue_training` is false) and the tokenizer's files. The same folder supplies model and tokenizer. With "
        "`from_hf_hub`, `from_aistudio` or `from_modelscope`, a model's name on that hub: `organisation/name`, or "
        "`organisation/name@revision` for a branch, a tag or a commit. A folder that exists is taken first.",
        required_for=("train", "eval", "preview"),
        verbs=ALL_VERBS,
        example="models/ERNIE-4.5-0.3B",
    )
    output_dir: str = parameter(
        "",
        "The folder that receives everything a run leaves behind: checkpoints, the final model with its tokenizer, the "
        "resolved configuration, results and logs. A folder that already holds a run is protected, see "
        "`overwrite_output_dir`.",
        required_for=("train",),
        verbs=("train", "eval", "export"),
        example="output/sft",
    )
    overwrite_output_dir: bool = parameter(
        False,
        "Allow a new run to write into an `output_dir` that is not empty. When false such a run is refused, so "
        "that an earlier result cannot be lost by repeating a command; resuming with `resume_from_checkpoint` is "
        "always allowed. `erniekit export` and `split` need it on the command line if their folder is not empty: "
        "they replace files of the same name and keep the others.",
        verbs=("train", "export", "split"),
    )
    continue_training: bool = parameter(
        True,
        "Start from the weights in the model folder. When false only `config.json` and the tokenizer are used and the "
        "weights are drawn at random from `seed`, as for training from scratch.",
        verbs=("train",),
    )
    do_train: bool = parameter(
        Derived(
            "false; `erniekit train` makes it true",
            lambda builder: (builder.verb == "train", "for erniekit train" if builder.verb == "train" else ""),
            False,
        ),
        "Train the model. `erniekit train` implies it, so it need not be written; an explicit false turns the "
        "command into an evaluation of the model as it is, which then needs `do_eval`.",
        verbs=("train",),
        example=True,
    )
    do_eval: bool = parameter(
        False,
        "Evaluate on `eval_dataset_path` while training, as `evaluation_strategy` says. `erniekit eval` implies it.",
        verbs=("train",),
        example=True,
    )
    hidden_dropout_prob: float = parameter(
        0.0,
        "Probability with which an element of each layer's attention output and feed-forward output is zeroed in "
        "training, before it is added to the residual stream. The others are scaled up so that the expectation "
        "stays the same.",
        minimum=0.0,
        below=1.0,
        verbs=("train",),
        example=0.1,
    )
    attention_probs_dropout_prob: float = parameter(
        0.0,
        "Probability with which an attention weight is zeroed in training, after the softmax.",
        minimum=0.0,
        below=1.0,
        verbs=("train",),
        example=0.1,
    )
    dropout_warmup_steps: int = parameter(
        0,
        "Let the probabilities of dropout, `lora_dropout` too, grow linearly from 0 to their value over this many "
        "optimizer steps and stay there: p x min(1, finished steps / dropout_warmup_steps), so that the first step "
        "drops nothing. 0 applies the full probability from the first step.",
        minimum=0,
        unit="optimizer steps",
        verbs=("train",),
        example=100,
    )
    weight_quantize_algo: str = parameter(
        "none",
        "`weight_only_int8`, `weight_only_int4` and `nf4` (4-bit normal floats) store the frozen weights of all "
        "linear layers in that many bits while adapters are trained; `weight_only_mix` stores those of experts in "
        "int4 and the rest in int8. Each weight is dequantized where it is used, in forward and again in backward, "
        "and adapters are merged into the dequantized weights. `fp8_linear` rounds the operands of linear layers to "
        "8-bit floats, also when all weights are trained (see section 2.4). `erniekit export` writes weights in this "
        "form where the command line asks for it.",
        choices=("none", "fp8_linear", "weight_only_int8", "weight_only_int4", "weight_only_mix", "nf4"),
        spellings={"": "none", "null": "none", "fp8linear": "fp8_linear"},
        verbs=("train", "eval", "export"),
        example="fp8_linear",
    )
    num_nextn_predict_layers: int = parameter(
        0,
        "How many of the model's multi-token prediction layers are loaded, trained together with the main head, and "
        "saved with it. Each predicts one token further ahead. 0 leaves them out, of the saved model too: they would "
        "no longer fit what was trained.",
        minimum=0,
        unit="layers",
        verbs=("train",),
        example=1,
    )
    ignore_config_keys: tuple[str, ...] = parameter(
        (),
        "Keys of the model's `config.json` to leave out. A key that ERNIEKit does not understand may change what the "
        "model computes, so it is refused by its name; name it here where you know that it changes nothing. The run "
        "says that it is left out, and the model that is saved has no such key. Keys that are understood cannot be "
        "left out. For `generate` and `chat` it is the option `--ignore-config-keys`.",
        kind=WORDS,
        verbs=("train", "eval", "chat", "generate", "export"),
        example="note_of_the_author",
    )
    device: str = parameter(
        "auto",
        "Where to compute. `auto` takes a GPU when PaddlePaddle was built for one and finds it, and the CPU otherwise; "
        "`gpu:1` names one of several GPUs.",
        kind=DEVICE,
        verbs=("train", "eval", "chat", "generate", "export"),
        example="cpu",
    )
    logging_steps: int = parameter(
        1,
        "Report loss, learning rate and speed after this many optimizer steps, and after the last one. The reported "
        "loss is the mean over all target tokens since the last report.",
        minimum=1,
        unit="optimizer steps",
        needs=when("logging_strategy", "steps"),
        verbs=("train",),
        example=10,
    )
    logging_strategy: str = parameter(
        "steps",
        "When to report metrics: every `logging_steps` (`steps`), once an epoch (`epoch`), or never (`no`).",
        choices=("steps", "epoch", "no"),
        verbs=("train",),
    )
    logging_dir: str = parameter(
        Derived(
            "`logs` inside `output_dir`",
            lambda builder: (_inside(builder["output_dir"], "logs"), "inside output_dir"),
            "",
        ),
        "The folder of the event files that VisualDL and TensorBoard read. Nothing else is written there.",
        verbs=("train",),
        example="output/sft/logs",
    )
    report_to: tuple[str, ...] = parameter(
        ("visualdl",),
        "The loggers that write event files into `logging_dir`. `none` writes no event files, `all` selects "
        "every logger.",
        kind=WORDS,
        choices=TRACKERS,
        spellings={"none": [], "no": [], "all": list(TRACKERS)},
        verbs=("train",),
        example="visualdl tensorboard",
    )
    disable_tqdm: bool = parameter(
        False,
        "Print plain lines instead of the live progress display. Output that does not go to a terminal is always "
        "plain.",
        verbs=("train",),
    )
    from_hf_hub: bool = parameter(
        False,
        "Fetch `model_name_or_path` from the Hugging Face Hub when it is not a local folder: configuration, "
        "tokenizer and safetensors, never code or pickles. Its library keeps files where `HF_HOME` or "
        "`HF_HUB_CACHE` says; a model that is there needs no network (`HF_HUB_OFFLINE=1` asks for none). Private "
        "models need `HF_TOKEN`.",
        excludes=("from_aistudio", "from_modelscope"),
        verbs=ALL_VERBS,
    )
    from_aistudio: bool = parameter(
        False,
        "Fetch `model_name_or_path` from Baidu AI Studio when it is not a local folder: configuration, tokenizer "
        "and safetensors, never code or pickles. Its library keeps files where `AISTUDIO_CACHE_HOME` says; private "
        "models need `AISTUDIO_ACCESS_TOKEN`.",
        excludes=("from_hf_hub", "from_modelscope"),
        verbs=ALL_VERBS,
    )
    from_modelscope: bool = parameter(
        False,
        "Fetch `model_name_or_path` from ModelScope when it is not a local folder: configuration, tokenizer and "
        "safetensors, never code or pickles. Its library is an extra, `pip install 'erniekit[modelscope]'`, and "
        "keeps files where `MODELSCOPE_CACHE` says; private models need `MODELSCOPE_API_TOKEN`.",
        excludes=("from_hf_hub", "from_aistudio"),
        verbs=ALL_VERBS,
    )


def _inside(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if folder else ""


@rule("do_train", "do_eval")
def something_to_do(builder: ConfigBuilder) -> None:
    """With `do_train: false`, `erniekit train` only evaluates and needs `do_eval: true`."""
    if builder.verb == "train" and not builder["do_train"] and not builder["do_eval"]:
        builder.problem(
            "do_train", "nothing to do: `do_train` and `do_eval` are both false", "set `do_eval: true` to evaluate only"
        )


@rule("dropout_warmup_steps", "hidden_dropout_prob", "attention_probs_dropout_prob", "lora_dropout", "lora")
def dropout_warmup_needs_dropout(builder: ConfigBuilder) -> None:
    """`dropout_warmup_steps` has no effect while all probabilities of dropout are 0."""
    of_adapters = builder["lora"] and builder["lora_dropout"]
    if builder.differs("dropout_warmup_steps") and not (
        builder["hidden_dropout_prob"] or builder["attention_probs_dropout_prob"] or of_adapters
    ):
        builder.no_effect("dropout_warmup_steps", "because all probabilities of dropout are 0")


SECTION = section(
    BasicParameters,
    key="basic",
    title="1.1 Basic configuration",
    verbs=ALL_VERBS,
    rules=(something_to_do, dropout_warmup_needs_dropout),
)
