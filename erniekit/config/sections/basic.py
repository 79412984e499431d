"""1.1 Basic configuration: the model, the job, the output folder, and what is shown during the run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from erniekit.config.object_urls import is_url, joined
from erniekit.config.parameter import ConfigBuilder, Derived, parameter, rule, section, when
from erniekit.config.stages import ALL_STAGES, DIALOGUE_STAGES
from erniekit.config.values import DEVICE, PATH_OR_URL, TEXTS, WORDS, other_device

TRACKERS = (
    "visualdl",
    "tensorboard",
    "wandb",
    "mlflow",
    "swanlab",
    "trackio",
)  # each is opened by `erniekit.training.callbacks.trackers`
ALL_VERBS = ("train", "eval", "preview", "chat", "generate", "speak", "export", "server")
HUB_VERBS = (*ALL_VERBS, "codes")
TEMPLATE_VERBS = ("train", "eval", "preview", "chat", "generate", "server")


@dataclass(frozen=True)
class BasicParameters:
    """The stage, the model, the output folder, and what is shown during the run."""

    stage: str = parameter(
        "SFT",
        "The kind of training. PT continues next-token training on plain text; SFT trains on the assistant's "
        "turns of conversations; DPO trains on pairs of a preferred and a rejected answer; KTO on single answers with "
        "a verdict; RM trains a model that scores answers; DISTILL trains on conversations towards the distributions "
        "of a teacher, see section 2.11; GRPO lets the model answer prompts and learns from the rewards of its "
        "answers, see section 2.14; TTS (text to speech) trains a model that predicts the codes of recordings, see "
        "section 2.8. The stage decides which data formats are "
        "read, which loss is used and which default learning rate applies.",
        choices=ALL_STAGES,
        verbs=("train", "eval", "preview"),
    )
    model_name_or_path: str = parameter(
        "",
        "The folder of the model: `config.json`, the weights in safetensors files (not needed when "
        "`continue_training` is false) and the tokenizer's files. The same folder supplies model and tokenizer. With "
        "`from_hf_hub`, `from_aistudio` or `from_modelscope`, a model's name on that hub: `organisation/name`, or "
        "`organisation/name@revision` for a branch, a tag or a commit. A folder that exists is taken first. A "
        "folder of an object store is named by its URL (`s3://bucket/model`).",
        kind=PATH_OR_URL,
        required_for=("train", "eval", "preview"),
        verbs=ALL_VERBS,
        example="models/ERNIE-4.5-0.3B",
    )
    output_dir: str = parameter(
        "",
        "The folder that receives everything a run leaves behind: checkpoints, the final model with its tokenizer, the "
        "resolved configuration, results and logs. A folder that already holds a run is protected, see "
        "`overwrite_output_dir`. With a URL of an object store (`s3://bucket/run`) the run works in a folder of the "
        "cache, and checkpoints are uploaded while it trains; one counts there only once all of it has arrived.",
        kind=PATH_OR_URL,
        spellings={"none": ""},
        required_for=("train", "codes"),
        verbs=("train", "eval", "export", "codes"),
        example="output/sft",
    )
    overwrite_output_dir: bool = parameter(
        False,
        "Allow a new run to write into an `output_dir` that is not empty. When false such a run is refused, so "
        "that an earlier result cannot be lost by repeating a command; resuming with `resume_from_checkpoint` is "
        "always allowed. `erniekit export` and `split` need it on the command line if their folder is not empty: "
        "they replace files of the same name and keep the others. `erniekit codes` removes the codes in the folder.",
        verbs=("train", "export", "split", "codes"),
    )
    enable_thinking: bool | None = parameter(
        None,
        "Whether the model thinks before it answers, for chat templates that have this switch, such as Qwen3's. "
        "Training and answering should agree: with false an empty thought belongs to the question, so that "
        "only the answer is trained. null leaves the choice to the template.",
        verbs=TEMPLATE_VERBS,
        stages=DIALOGUE_STAGES,
        example=False,
    )
    chat_template_kwargs: tuple[str, ...] = parameter(
        (),
        "Further variables of the model's chat template, as `name=value`; true, false, null and numbers are read as "
        "such, everything else as text. The template's author says which there are, for example `date_string` for "
        "Llama 3.",
        kind=TEXTS,
        verbs=TEMPLATE_VERBS,
        stages=DIALOGUE_STAGES,
        example="date_string=22 Nov 2026",
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
        "Probability with which an attention weight is zeroed in training, after the softmax. 0 is usual for large "
        "models; 0.1 may help where a small data set is repeated for many epochs and the held-out loss rises. It "
        "raises the training loss, and costs the time and memory of a mask for each block of scores on a CPU.",
        minimum=0.0,
        below=1.0,
        verbs=("train",),
        example=0.1,
    )
    dropout_warmup_steps: int = parameter(
        0,
        "Let the probabilities of dropout, `lora_dropout` too, grow linearly from 0 to their value over this many "
        "optimizer steps and stay there: p x min(1, finished steps / dropout_warmup_steps), so that the first step "
        "drops nothing. 0 applies the full probability from the first step. The upstream reference says that dropout "
        "ends after these steps, and that 0 disables it; a message at the start says what happens here.",
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
        "form where the command line asks for it; `chat`, `generate` and `server` keep them so in memory.",
        choices=("none", "fp8_linear", "weight_only_int8", "weight_only_int4", "weight_only_mix", "nf4"),
        spellings={"": "none", "null": "none", "fp8linear": "fp8_linear"},
        verbs=("train", "eval", "export", "chat", "generate", "server"),
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
        "left out. For `generate`, `chat` and `speak` it is the option `--ignore-config-keys`.",
        kind=WORDS,
        verbs=("train", "eval", "chat", "generate", "speak", "export", "server"),
        example="note_of_the_author",
    )
    device: str = parameter(
        "auto",
        "Where to compute. `auto` takes a GPU when PaddlePaddle was built for one and finds it, and the CPU otherwise; "
        "`gpu:1` names one of several GPUs. The names of Paddle's other devices, such as `xpu` and `npu`, are passed "
        "on to it; ERNIEKit has never been run on one, and computes there in float32 as on a CPU.",
        kind=DEVICE,
        verbs=("train", "eval", "chat", "generate", "speak", "export", "server", "codes"),
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
        "The folder of what trackers write: the event files that VisualDL and TensorBoard read, and a folder for each "
        "of the others. Upstream writes event files into `output_dir` itself.",
        kind=PATH_OR_URL,
        verbs=("train",),
        example="output/sft/logs",
    )
    report_to: tuple[str, ...] = parameter(
        ("visualdl",),
        "The trackers that a run is reported to, several at a time: parameters, environment, metrics, samples of "
        "evaluations, the loss curve and what a model card says. `visualdl` and `tensorboard` write event files into "
        "`logging_dir`. `wandb`, `mlflow`, `swanlab` and `trackio` are told through their own libraries, each an extra "
        "of the installation, which find keys, servers and offline modes in their own environment variables "
        "(docs/trackers.md). One that fails is told once, and the run goes on. `none` reports to nobody, `all` to "
        "both that write event files.",
        kind=WORDS,
        choices=TRACKERS,
        spellings={"none": [], "no": [], "all": ["visualdl", "tensorboard"]},
        verbs=("train",),
        example="visualdl wandb",
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
        verbs=HUB_VERBS,
    )
    from_aistudio: bool = parameter(
        False,
        "Fetch `model_name_or_path` from Baidu AI Studio when it is not a local folder: configuration, tokenizer "
        "and safetensors, never code or pickles. Its library keeps files where `AISTUDIO_CACHE_HOME` says; private "
        "models need `AISTUDIO_ACCESS_TOKEN`.",
        excludes=("from_hf_hub", "from_modelscope"),
        verbs=HUB_VERBS,
    )
    from_modelscope: bool = parameter(
        False,
        "Fetch `model_name_or_path` from ModelScope when it is not a local folder: configuration, tokenizer and "
        "safetensors, never code or pickles. Its library is an extra, `pip install 'erniekit[modelscope]'`, and "
        "keeps files where `MODELSCOPE_CACHE` says; private models need `MODELSCOPE_API_TOKEN`.",
        excludes=("from_hf_hub", "from_aistudio"),
        verbs=HUB_VERBS,
    )


def _inside(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if folder else ""


def template_variables(basic: BasicParameters) -> dict[str, Any]:
    """Return the variables that the user gives to the chat template."""
    chosen = {} if basic.enable_thinking is None else {"enable_thinking": basic.enable_thinking}
    for item in basic.chat_template_kwargs:
        name, _, text = item.partition("=")
        chosen[name.strip()] = _json_or_text(text.strip())
    return chosen


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@rule("chat_template_kwargs")
def template_variables_are_named(builder: ConfigBuilder) -> None:
    """Each item of `chat_template_kwargs` is `name=value`, and none is a variable that dialogues fill."""
    for item in builder["chat_template_kwargs"]:
        name, equals, _ = item.partition("=")
        if not equals or not name.strip().isidentifier():
            builder.problem("chat_template_kwargs", f"{item!r} is not name=value", "write for example `thinking=true`")
        elif name.strip() in _FILLED_BY_DIALOGUES:
            builder.problem("chat_template_kwargs", f"{name.strip()!r} is filled by each dialogue", "remove it")


_FILLED_BY_DIALOGUES = ("messages", "tools", "documents", "add_generation_prompt")


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
    elif builder.differs("dropout_warmup_steps"):
        builder.messages.append(
            f"dropout_warmup_steps: dropout grows over {builder['dropout_warmup_steps']:,} steps and then stays; the "
            "upstream reference says that it ends there"
        )


@rule("output_dir", "logging_dir")
def logs_are_beside_the_run(builder: ConfigBuilder) -> None:
    """A URL as `logging_dir` must lie inside `output_dir`, with which event files are uploaded; and `erniekit codes`
    writes into a folder of this machine."""
    folder, logs = builder["output_dir"], builder["logging_dir"]
    if is_url(folder) and builder.verb == "codes":
        builder.problem("output_dir", f"`erniekit codes` writes into a folder of this machine, not to {folder}")
    if is_url(logs) and not logs.startswith(joined(folder, "") + "/"):
        what = f"{logs} is not inside output_dir, so nothing would upload it"
        builder.problem("logging_dir", what, "remove it, or write a folder of this machine")


@rule("logging_dir", "report_to", verbs=("train",))
def a_folder_of_logs_needs_a_logger(builder: ConfigBuilder) -> None:
    """`logging_dir` has no effect with `report_to: none`."""
    if builder.differs("logging_dir") and not builder["report_to"]:
        builder.no_effect("logging_dir", "because report_to is none, and only its trackers write there")


@rule("device")
def other_devices_have_never_been_run(builder: ConfigBuilder) -> None:
    """A `device` that is neither a CPU nor a GPU is passed on to Paddle; a message says that it has never been run."""
    if kind := other_device(builder["device"]):
        builder.messages.append(
            f"`device: {builder['device']}` ({builder.origins['device']}) is passed on to Paddle; ERNIEKit has never "
            f"been run on {kind}, and computes there in float32 with Paddle's own kernels, as on a CPU"
        )


SECTION = section(
    BasicParameters,
    key="basic",
    title="1.1 Basic configuration",
    verbs=ALL_VERBS,
    rules=(
        something_to_do,
        dropout_warmup_needs_dropout,
        logs_are_beside_the_run,
        a_folder_of_logs_needs_a_logger,
        template_variables_are_named,
        other_devices_have_never_been_run,
    ),
)
