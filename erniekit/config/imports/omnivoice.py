"""Convert the two JSON files with which OmniVoice is trained (k2-fsa/OmniVoice, commit 468e927).

The defaults are those of its `TrainingConfig`. Keys that it does not know it leaves out without a word; here they are
errors, since a slip of the pen would train something else.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from erniekit.config.imports.conversion import Conversion, Row, combined, idle, taken
from erniekit.config.imports.settings import Setting, read_settings
from erniekit.config.parse import SourceLocation

CODEC = "eustlb/higgs-audio-v2-tokenizer"
_DEEPSPEED = "its memory and communication are managed without it here"

TABLE: dict[str, Row] = {
    "output_dir": combined(None),
    "data_config": idle(None, "the second file of the command line is read"),
    "llm_name_or_path": combined("Qwen/Qwen3-0.6B"),
    "init_from_checkpoint": combined(None),
    "resume_from_checkpoint": combined(None),
    "audio_vocab_size": combined(1025),
    "audio_mask_id": combined(1024),
    "num_audio_codebook": taken(8, "codec_levels"),
    "audio_codebook_weights": taken([8, 8, 6, 6, 4, 4, 2, 2], "audio_codebook_weights"),
    "drop_cond_ratio": taken(0.1, "condition_dropout"),
    "prompt_ratio_range": taken([0.0, 0.3], "code_prompt_ratio"),
    "mask_ratio_range": taken([0.0, 1.0], "code_mask_ratio"),
    "language_ratio": taken(0.8, "language_probability"),
    "use_pinyin_ratio": taken(0.3, "pinyin_probability"),
    "instruct_ratio": taken(1.0, "instruct_probability"),
    "only_instruct_ratio": taken(0.5, "only_instruct_probability"),
    "learning_rate": taken(1e-4, "learning_rate"),
    "weight_decay": taken(0.01, "weight_decay", "there of norms, too, here of matrices only"),
    "max_grad_norm": taken(1.0, "max_grad_norm"),
    "steps": taken(300_000, "max_steps"),
    "seed": taken(42, "seed"),
    "lr_scheduler_type": combined("cosine"),
    "warmup_type": combined("ratio"),
    "warmup_ratio": combined(0.03),
    "warmup_steps": combined(2000),
    "batch_tokens": combined(8192),
    "gradient_accumulation_steps": taken(1, "gradient_accumulation_steps"),
    "num_workers": taken(8, "dataloader_num_workers"),
    "mixed_precision": combined("bf16"),
    "allow_tf32": combined(True),
    "use_deepspeed": combined(False),
    "deepspeed_config": combined(None),
    "attn_implementation": combined("flex_attention"),
    "max_sample_tokens": combined(2000),
    "min_sample_tokens": combined(50),
    "max_batch_size": combined(64),
    "logging_steps": taken(100, "logging_steps"),
    "eval_steps": combined(1000),
    "save_steps": taken(10_000, "save_steps"),
    "keep_last_n_checkpoints": combined(-1),
}
SPLITS = ("train", "dev")
DATA_KEYS = tuple(f"{split}[].{key}" for split in SPLITS for key in ("manifest_path", "repeat", "language_id"))


def convert(training: Path, data: Path, overrides: Iterable[str] = ()) -> Conversion:
    """Convert the files of `--train_config` and `--data_config`.

    Args:
        overrides: `KEY=VALUE` for keys of the first file.

    Raises:
        ConfigurationError: a file cannot be read, has an unknown key, or asks for what is not built; all is told.
    """
    settings = read_settings(training, TABLE, overrides)
    result = Conversion(settings, TABLE, str(training))
    result.write("stage", "TTS")
    result.write("tts_objective", "masked")
    result.follow_table()
    _model(result)
    _schedule(result)
    _batches(result)
    _system(result, training)
    _checkpoints(result)
    _data(result, data)
    result.raise_if_any()
    return result


def _model(result: Conversion) -> None:
    name = "init_from_checkpoint" if result["init_from_checkpoint"] else "llm_name_or_path"
    model = result[name]
    result.write("model_name_or_path", model, name)
    if result["init_from_checkpoint"] and result.is_set("llm_name_or_path"):
        result.tell("llm_name_or_path", "init_from_checkpoint has the weights and the tokenizer, there as well")
    if isinstance(model, str) and model.count("/") == 1 and not Path(model).expanduser().exists():
        result.write("from_hf_hub", True)
    result.write("output_dir", result["output_dir"] or "output/omnivoice", "output_dir")
    if result["resume_from_checkpoint"]:
        what = "the checkpoints of its trainer hold states of torch's optimizer, which are not read here"
        result.refuse(
            "resume_from_checkpoint", f"{what}; write the folder as init_from_checkpoint to begin with its weights"
        )
    if result["init_from_checkpoint"]:
        weights = "audio_codebook_weights"
        result.write(weights, result[weights], weights, "its trainer takes those of the checkpoint instead")
    codes = int(result.number("audio_vocab_size", 3)) - 1
    if result["audio_mask_id"] != codes:
        what = f"expected {codes}, audio_vocab_size - 1: the mask is the last row of each level's table here"
        result.refuse("audio_mask_id", what)
    result.write("codebook_size", codes, "audio_vocab_size", "less the mask")
    if not result["init_from_checkpoint"]:  # a trained model has its codec beside it
        result.write("codec", CODEC, remark="whose codes its tools write")


def _schedule(result: Conversion) -> None:
    scheduler = result["lr_scheduler_type"]
    result.write(
        "lr_scheduler_type", "constant_with_warmup" if scheduler == "constant" else "cosine", "lr_scheduler_type"
    )
    if scheduler not in ("constant", "cosine"):
        result.tell("lr_scheduler_type", "its trainer takes cosine for every word but constant")
    by_ratio = result["warmup_type"] == "ratio"
    name, other = ("warmup_ratio", "warmup_steps") if by_ratio else ("warmup_steps", "warmup_ratio")
    result.write(name, result[name], name)
    if result.is_set(other) and result[other]:
        result.tell(other, f"warmup_type is {result['warmup_type']}, so that its trainer takes {name}")


def _batches(result: Conversion) -> None:
    result.write("max_seq_len", result["batch_tokens"], "batch_tokens")
    packs = result["attn_implementation"] == "flex_attention"
    result.write("packing", packs, "attn_implementation")
    if packs:
        result.write("per_device_train_batch_size", 1)
        for key in ("max_sample_tokens", "min_sample_tokens", "max_batch_size"):
            if result.is_set(key):
                result.tell(key, "it belongs to batches of similar length, and flex_attention packs, there as well")
        return
    result.write("batch_tokens", result["batch_tokens"])
    result.write("max_sample_len", result["max_sample_tokens"], "max_sample_tokens")
    result.write("min_sample_len", result["min_sample_tokens"], "min_sample_tokens")
    result.write("max_batch_samples", result["max_batch_size"], "max_batch_size")


def _system(result: Conversion, training: Path) -> None:
    precision = {"bf16": "bf16", "fp16": "fp16", "no": ""}.get(str(result["mixed_precision"]))
    if result["mixed_precision"] is False:  # as YAML reads an unquoted no
        precision = ""
    if precision is None:
        result.refuse("mixed_precision", "expected no, fp16 or bf16")
    elif precision:
        result.write(precision, True, "mixed_precision")
    if result["allow_tf32"] and result.is_set("allow_tf32"):
        why = "beside bf16 no product is in float32; without it NVIDIA_TF32_OVERRIDE=1 has the effect on a GPU"
        result.tell("allow_tf32", why)
    result.write("report_to", "tensorboard", remark="as its trainer reports")
    file = result["deepspeed_config"]
    if not result["use_deepspeed"] or not file:
        if file:
            result.tell("deepspeed_config", "use_deepspeed is false")
        elif result["use_deepspeed"]:
            result.tell("use_deepspeed", "without deepspeed_config its trainer runs without DeepSpeed")
        return
    _deepspeed(result, training, Path(str(file)))


def _deepspeed(result: Conversion, training: Path, file: Path) -> None:
    """Read the stage of ZeRO from DeepSpeed's file, which its trainer looks for in the current folder."""
    found = next((path for path in (file, training.parent / file) if path.is_file()), None)
    if found is None:
        result.refuse("deepspeed_config", f"{file} does not exist")
        return
    for setting in read_settings(found, ()):
        if setting.key == "zero_optimization.stage":
            if setting.value not in (0, 1, 2, 3):
                result.problems.append(
                    f"{setting.location}: `{setting.key}`: expected 0, 1, 2 or 3, got {setting.value}"
                )
            elif setting.value:
                result.write("sharding", f"stage{setting.value}", "deepspeed_config", setting.key)
        elif setting.key.startswith(("zero_optimization.offload", "zero_quantized")) and setting.value:
            what = "states stay in the device's memory where offload_optim is not written; remove it, and write that"
            result.problems.append(f"{setting.location}: `{setting.key}`: {what}")
        elif setting.value != "auto":
            result.told.append(f"{found.name}, {setting.key}: {setting.value}: {_DEEPSPEED}")


def _checkpoints(result: Conversion) -> None:
    result.write("save_strategy", "steps")
    if (limit := result["keep_last_n_checkpoints"]) != -1:
        result.write("save_total_limit", limit, "keep_last_n_checkpoints")


def _data(result: Conversion, data: Path) -> None:
    settings = read_settings(data, {*DATA_KEYS})
    unknown = [setting for setting in settings if setting.key not in DATA_KEYS]
    for setting in unknown:
        if setting.key in SPLITS and not setting.value:  # an empty list
            continue
        result.problems.append(f"{setting.location}: `{setting.key}`: unknown key")
    found = {split: _paths(result, settings, split, data) for split in SPLITS}
    if not found["train"]:
        result.problems.append(f"{data}: `train`: names no manifest_path")
    result.write("train_dataset_path", found["train"])
    result.write("train_dataset_type", "codes")
    result.write("do_eval", bool(found["dev"]))
    if found["dev"]:
        result.write("eval_dataset_path", found["dev"])
        result.write("eval_dataset_type", "codes")
        result.write("eval_steps", result["eval_steps"], "eval_steps")
        result.write("max_evaluate_steps", -1)
    elif result.is_set("eval_steps"):
        result.tell("eval_steps", "the data has no dev")
    if any(setting.key.endswith("language_id") for setting in settings):
        result.told.append("language_id of the data: it is not used there either; each record names its language")


def _paths(result: Conversion, settings: list[Setting], split: str, file: Path) -> list[str]:
    """Return the manifests of a split, each as often as `repeat` says."""
    items: dict[int, dict[str, tuple[Any, SourceLocation]]] = {}
    for setting in settings:
        if setting.item and setting.key.startswith(f"{split}[]."):
            items.setdefault(setting.item[0], {})[setting.key.rpartition(".")[2]] = setting.value, setting.location
    paths: list[str] = []
    for item in items.values():
        named, where = item.get("manifest_path", ([], next(iter(item.values()))[1]))
        repeat, repeat_where = item.get("repeat", (1, where))
        if not isinstance(named, list) or not named or not all(isinstance(path, str) for path in named):
            result.problems.append(f"{where}: `manifest_path`: expected a list of files")
        elif isinstance(repeat, bool) or not isinstance(repeat, int) or not 1 <= repeat <= 1000:
            result.problems.append(f"{repeat_where}: `repeat`: expected how often, from 1 to 1,000, got {repeat}")
        else:
            paths += [path for path in named for _ in range(repeat)]
    return paths


def head(words: list[str]) -> list[str]:
    """Return the first lines of the file that is written."""
    return [
        f"Written by `erniekit import {' '.join(words)}`.",
        "Behind a value stands the key that it comes from, where the key has another name.",
    ]
