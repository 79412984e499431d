"""Convert the YAML file with which VALL-E is trained (e-c-k-e-r/vall-e, commit 73833ee): models of AR + NAR, version 5.

The table of its keys is in `vall_e_keys.py`; here are those that become several parameters, or depend on others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from erniekit.config.imports.conversion import Conversion
from erniekit.config.imports.settings import Setting, read_settings
from erniekit.config.imports.vall_e_keys import TABLE
from erniekit.config.values import format_value, read_number

CODECS = {"encodec": "facebook/encodec_24khz", "vocos": "facebook/encodec_24khz", "dac": "descript/dac_44khz"}
SIZES = {  # word of `size` -> width, heads, layers
    "quarter": (256, 4, 12),
    "half": (512, 8, 12),
    "full": (1024, 16, 12),
    "extended": (1024, 16, 16),
    "double": (1024, 16, 24),
}
SHAPE_KEYS = ("dim", "heads", "layers", "ffn", "resp_levels", "audio_tokens", "phoneme_tokens")
NO_MIXING = "it mixes the codes of several recordings, for which they are decoded and encoded again in the loader"
TASKS = {
    "tts": "tts",
    "tts-c": "continuation",
    "stt": "stt",
    "ns": NO_MIXING,
    "sr": NO_MIXING,
    "tse": NO_MIXING,
    "cse": NO_MIXING,
    "nse": NO_MIXING,
    "len": "`tts_objective: masked` is what speaks with a given length",
    "phn": "a tokenizer or espeak-ng finds the pronunciation",
    "un-phn": "a tokenizer or espeak-ng finds the pronunciation",
}
WHOLE = 86_400.0  # seconds; longer than any recording
LORA_TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SAMPLERS = (  # words of `evaluation.kwargs` that change nothing with these values
    ("beam_width", 0), ("mirostat_tau", 0), ("mirostat_eta", 0), ("dry_multiplier", 0), ("dry_base", 0),
    ("dry_allowed_length", 0), ("entropix_sampling", 0), ("length_penalty", 0), ("repetition_penalty_decay", 0),
    ("max_nar_levels", 0), ("min_ar_temperature", -1), ("min_ar_temp", -1), ("min_nar_temp", -1), ("top_no", 0),
    ("cfg_strength", 0),
)  # fmt: skip
OPTIONS_OF_SPEAK = {  # of `evaluation.kwargs` -> the option of `erniekit speak`
    "ar_temp": "--temperature", "ar_temperature": "--temperature", "top_p": "--top-p", "top_k": "--top-k",
    "min_p": "--min-p", "repetition_penalty": "--repetition-penalty",
    "max_steps": "--max-seconds, in seconds, not in steps", "max_ar_steps": "--max-seconds, in seconds, not in steps",
}  # fmt: skip


def convert(file: Path, overrides: Iterable[str] = (), *, folder: Path | None = None) -> Conversion:
    """Convert its file of `--yaml`.

    Args:
        overrides: `KEY=VALUE`, such as `hyperparameters.optimizer=Adamw`; keys of lists are written `models[].size`.
        folder: the folder of the model; by default `models/vall-e`.

    Raises:
        ConfigurationError: the file cannot be read, has an unknown key, or asks for what is not built; all is told.
    """
    settings = _of_the_trained(read_settings(file, TABLE, overrides))
    result = Conversion(settings, TABLE, str(file))
    _refuse_several(result, settings)
    result.write("stage", "TTS")
    result.write("tts_objective", "ar_nar")
    result.follow_table()
    _model(result, folder)
    _adapters(result)
    _levels(result)
    _losses(result)
    _optimizer(result)
    _precision(result)
    _batches(result)
    _prompts(result)
    _evaluation(result)
    _data(result)
    result.raise_if_any()
    return result


def model_shape(result: Conversion) -> dict[str, Any]:
    """Return the `config.json` of the model that is converted."""
    size, levels = result["models[].size"], _level_count(result)
    width, heads, layers = SIZES.get(size, SIZES["full"]) if isinstance(size, str) else SIZES["full"]
    shape = size if isinstance(size, dict) else {}
    width, heads, layers = shape.get("dim", width), shape.get("heads", heads), shape.get("layers", layers)
    return {
        "architectures": ["VALLE"],
        "model_type": "vall_e",
        "audio_vocab_size": shape.get("audio_tokens", 1024),
        "num_audio_codebook": levels,
        "noncausal_masks": bool(result["models[].experimental.noncausal_masks"]),
        "unified_position_ids": bool(result["models[].experimental.unified_position_ids"]),
        "classifiers_bias": bool(result["models[].experimental.classifiers_bias"]),
        "llm_config": {
            "model_type": "llama",
            "vocab_size": shape.get("phoneme_tokens", 256),
            "hidden_size": width,
            "intermediate_size": width * shape.get("ffn", 4),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "hidden_act": "gelu",
            "max_position_embeddings": result["models[].experimental.max_position_embeddings"],
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
    }


def head(words: list[str], result: Conversion, *, written: bool) -> list[str]:
    """Return the first lines of the file: its origin, and the model's shape unless it is `written` as a file."""
    lines = [
        f"Written by `erniekit import {' '.join(words)}`.",
        "Behind a value stands the key that it comes from, where the key has another name.",
    ]
    if not written:
        shape = json.dumps(model_shape(result), indent=2).splitlines()
        lines += [
            "config.json of the model folder, which needs a tokenizer's files, too:",
            *(f"  {line}" for line in shape),
        ]
    return lines


def _of_the_trained(settings: list[Setting]) -> list[Setting]:
    """Leave the settings of models and adapters that are not trained out, where another one is."""
    kept = settings
    for owner in ("models[].", "loras[]."):
        of_owner = [setting for setting in settings if setting.key.startswith(owner) and setting.item]
        said = {setting.item[0]: setting.value for setting in of_owner if setting.key == f"{owner}training"}
        default = TABLE[f"{owner}training"].default
        items = {setting.item[0] for setting in of_owner}
        trained = {item for item in items if said.get(item, default) is True}
        if len(trained) == 1 and len(items) > 1:
            kept = [setting for setting in kept if setting not in of_owner or setting.item[0] in trained]
    return kept


def _refuse_several(result: Conversion, settings: list[Setting]) -> None:
    """Refuse several models, or several adapters, of which not exactly one is trained: a run has one."""
    for owner, what in (("models[].", "models"), ("loras[].", "sets of adapters")):
        items = {setting.item[0]: setting for setting in settings if setting.key.startswith(owner) and setting.item}
        if len(items) > 1:
            key = f"{owner}training"
            advice = "leave one of them, or write `training: False` for the others, and convert once for each"
            result.refuse(key, f"the file has {len(items)} {what}, and a run trains one; {advice}")


def _level_count(result: Conversion) -> int:
    size = result["models[].size"]
    if isinstance(size, dict) and isinstance(size.get("resp_levels"), int):
        return int(size["resp_levels"])
    return 9 if result["audio_backend"] == "dac" else 8


def _model(result: Conversion, folder: Path | None) -> None:
    backend = str(result["audio_backend"]).casefold()
    if backend in CODECS:
        result.write("codec", CODECS[backend], "audio_backend", "its folder, or with from_hf_hub: true its name")
        if backend == "vocos":
            result.tell(
                "audio_backend", "its codes are EnCodec's, and EnCodec makes sound of them here, Vocos does not"
            )
        rate = 44_100 if backend == "dac" else 24_000
        if result.is_set("sample_rate") and result["sample_rate"] != rate:
            result.tell("sample_rate", f"the codec has its own, {rate:,} Hz, there as well")
    else:
        known = ", ".join(CODECS)
        result.refuse("audio_backend", f"expected {known}, got {backend}, whose codec is not built here")
    size = result["models[].size"]
    if isinstance(size, dict):
        wrong = [key for key in size if key not in (*SHAPE_KEYS, "label", "text_tokens", "embed_dim")]
        wrong += [key for key in SHAPE_KEYS if key in size and (not isinstance(size[key], int) or size[key] < 1)]
        if wrong:
            result.refuse("models[].size", f"{wrong[0]}: expected one of {', '.join(SHAPE_KEYS)}, as a whole number")
        if size.get("embed_dim", size.get("dim", 1024)) != size.get("dim", 1024):
            result.refuse("models[].size", "embed_dim: embeddings are as wide as the model here; make it equal to dim")
    elif not isinstance(size, str) or size not in SIZES:
        result.refuse("models[].size", f"expected {', '.join(SIZES)}, or a shape of {', '.join(SHAPE_KEYS)}")
    for name, what in (
        ("audio_embedding_sums", "a frame is the sum of the levels above it here"),
        ("split_classifiers", "each level has a head of its own here"),
    ):
        if result[f"models[].experimental.{name}"] is not True:
            result.refuse(f"models[].experimental.{name}", f"{what}; write True, or train anew so")
    if not result["models[].training"]:
        result.refuse("models[].training", "no model is trained; write `training: True` for the one that is")
    result.write("codec_levels", _level_count(result), "models[].size" if isinstance(size, dict) else "audio_backend")
    codes = size.get("audio_tokens", 1024) if isinstance(size, dict) else 1024
    result.write("codebook_size", codes)
    result.write("model_name_or_path", str(folder) if folder else "models/vall-e")
    result.write("output_dir", "output/vall-e")
    result.write("text_frontend", "phonemes", remark="its texts are pronunciations of espeak-ng")
    capabilities = result["models[].capabilities"]
    words = list(map(str, capabilities if isinstance(capabilities, list) else [capabilities]))
    if "len" in words:
        result.refuse("models[].capabilities", "len: `tts_objective: masked` is what speaks with a given length")
    elif not {"ar", "nar"} <= {*words} or {*words} - {"ar", "nar", "lang"}:
        result.refuse("models[].capabilities", f"expected ar and nar, perhaps lang, got {format_value(words)}")
    result.write("language_probability", 1.0, remark="its model is always told the language")


def _adapters(result: Conversion) -> None:
    adapted = any(result.is_set(key) for key in TABLE if key.startswith("loras[]."))
    if not adapted:
        result.write("continue_training", False, remark="begin with random weights")
        return
    result.write("lora", True, "loras[].training")
    result.write("lora_rank", result["loras[].rank"], "loras[].rank")
    result.write("lora_alpha", result["loras[].alpha"], "loras[].alpha")
    result.write("lora_target_modules", LORA_TARGETS, remark="its policy leaves k_proj out")
    if result["loras[].rvq_levels"]:
        result.write("lora_codebooks", result["loras[].rvq_levels"], "loras[].rvq_levels")


def _levels(result: Conversion) -> None:
    key = "models[].experimental.rvq_levels_p"
    older = "models[].experimental.p_rvq_levels"
    key = older if result.is_set(older) else key
    word, levels = result[key], _level_count(result)
    span = result["models[].experimental.rvq_level_range"] or [0, levels - 1]
    if not (isinstance(span, list) and len(span) == 2 and all(isinstance(level, int) for level in span)):
        result.refuse("models[].experimental.rvq_level_range", "expected the first and the last level")
        return
    inside = [level for level in range(levels) if span[0] <= level <= span[1]]
    if isinstance(word, list) and word:  # levels as often as they are to be drawn
        if not all(isinstance(level, int) and 0 <= level < levels for level in word):
            result.refuse(key, f"expected levels from 0 to {levels - 1}, each as often as it is to be drawn")
            return
        weights, why = [word.count(level) for level in range(levels)], "how often each level stands there"
    else:
        weights = [span[1] + 1 - level if level in inside else 0 for level in range(levels)]
        why = "its trainer draws so, whatever the word says; `auto` here halves from level to level"
    result.write("codebook_sampling", ",".join(map(str, weights)), key, why)


def _losses(result: Conversion) -> None:
    factors = result["models[].loss_factors"] or {}
    if not isinstance(factors, dict) or set(factors) - {"text", "prom", "resp", "lang", "tone", "len"}:
        result.refuse("models[].loss_factors", "expected text, prom and resp")
        return
    parts = [read_number(factors.get(name, 1.0)) for name in ("text", "prom", "resp")]
    if not all(isinstance(part, float) and part >= 0 for part in parts) or not parts[2]:
        result.refuse("models[].loss_factors", "expected numbers of at least 0, and one above 0 for resp")
        return
    if result["models[].experimental.ignore_inputs_for_loss"]:
        parts[:2] = [0.0, 0.0]
        if factors:
            why = "text and prom have no effect there while ignore_inputs_for_loss is true, and are 0 here"
            result.tell("models[].loss_factors", why)
    else:
        why = "its factor text finds no part of that name, and the prompt of summed embeddings no loss; here both act"
        result.tell("models[].loss_factors", why)
    result.write("loss_factors", parts, "models[].loss_factors")


def _optimizer(result: Conversion) -> None:
    optimizer = str(result["hyperparameters.optimizer"]).casefold()
    by_torch = result["trainer.backend"] == "local" or result["hyperparameters.torch_optimizer"]
    if optimizer != "adamw":
        what = f"{result['hyperparameters.optimizer']} is not built here"
        advice = "for AdamW add hyperparameters.optimizer=Adamw hyperparameters.learning_rate=1.0e-4 to the command"
        result.refuse("hyperparameters.optimizer", f"{what}; {advice}")
    given = result["hyperparameters.optimizer_params"] or {}
    known = {"lr", "betas", "eps", "weight_decay"}
    if not isinstance(given, dict) or set(given) - known:
        result.refuse("hyperparameters.optimizer_params", f"expected some of {', '.join(sorted(known))}")
        given = {}
    own = {"betas": [0.9, 0.96], "eps": 1e-7, "weight_decay": 0.01} if by_torch else {}
    own = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0} | own | given
    key = "hyperparameters.optimizer_params" if given else "hyperparameters.optimizer"
    betas = own["betas"] if isinstance(own["betas"], list) and len(own["betas"]) == 2 else [0.9, 0.999]
    result.write(
        "learning_rate", given.get("lr", result["hyperparameters.learning_rate"]), "hyperparameters.learning_rate"
    )
    for name, value in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
        result.write(name, value, key)
    result.write("adam_epsilon", own["eps"], key)
    result.write("weight_decay", own["weight_decay"], key)
    scheduler, warmup = str(result["hyperparameters.scheduler"] or ""), result["hyperparameters.warmup_steps"]
    if not scheduler:
        result.write("lr_scheduler_type", "constant", "hyperparameters.scheduler")
        if warmup:
            result.tell("hyperparameters.warmup_steps", "its trainer warms nothing up without a scheduler")
    elif scheduler.casefold() in ("warmup", "warmuplr"):
        result.write("lr_scheduler_type", "constant_with_warmup", "hyperparameters.scheduler")
        result.write("warmup_steps", warmup, "hyperparameters.warmup_steps")
    else:
        what = f"expected none or warmup, got {scheduler}"
        result.refuse("hyperparameters.scheduler", f"{what}; remove it, and write lr_scheduler_type into the result")


def _precision(result: Conversion) -> None:
    dtype, backend = str(result["trainer.weight_dtype"]).casefold(), result["trainer.backend"]
    if backend not in ("local", "deepspeed"):
        result.refuse("trainer.backend", f"expected local or deepspeed, got {format_value(backend)}")
    name = {"float16": "fp16", "bfloat16": "bf16", "float32": ""}.get(dtype)
    if name is None:
        result.refuse("trainer.weight_dtype", "expected float32, float16 or bfloat16")
    elif name:
        result.write(name, True, "trainer.weight_dtype")
        if backend == "deepspeed" or not result["trainer.amp"]:
            result.write("fp16_opt_level", "O2", "trainer.amp", "the weights are in 16 bits there")
    bounds = {
        "min_loss_scale": "trainer.deepspeed.min_loss_scale",
        "max_loss_scale": "trainer.deepspeed.max_loss_scale",
    }
    if name == "fp16":
        first = 2**16
        for parameter, key in bounds.items():
            bound = int(result.number(key, 0.0))
            if parameter == "min_loss_scale" and backend == "local":
                continue  # torch's scaler has none
            if bound:
                result.write(parameter, bound, key)
                first = max(first, bound) if parameter == "min_loss_scale" else min(first, bound)
        result.write("scale_loss", first, remark="where its loss scale begins")
    stage = result["trainer.deepspeed.zero_optimization_level"]
    if stage not in (0, 1, 2, 3):
        result.refuse("trainer.deepspeed.zero_optimization_level", "expected 0, 1, 2 or 3")
    elif stage and backend == "deepspeed":
        result.write("sharding", f"stage{stage}", "trainer.deepspeed.zero_optimization_level")
    recompute = result["trainer.activation_checkpointing"]
    key = "trainer.gradient_checkpointing" if recompute is None else "trainer.activation_checkpointing"
    result.write("recompute", result[key], key)
    if limit := result["trainer.keep_last_checkpoints"]:
        result.write("save_total_limit", limit, "trainer.keep_last_checkpoints")
    result.write("save_strategy", "steps")


def _batches(result: Conversion) -> None:
    order, kind = str(result["dataset.sample_order"]), str(result["dataset.sample_type"])
    seconds, shuffle = result.number("dataset.sample_max_duration_batch", 0.0), bool(result["dataset.sample_shuffle"])
    if kind == "speaker":
        result.write("sample_order", "speaker", "dataset.sample_type")
    elif kind != "path":
        result.refuse("dataset.sample_type", f"expected path or speaker, got {kind}")
    result.write("random_shuffle", shuffle or order != "duration", "dataset.sample_shuffle")
    if order == "duration" and not shuffle:
        result.write("curriculum", "duration", "dataset.sample_order", "in the first epoch")
    elif result.is_set("dataset.sample_order"):
        result.tell("dataset.sample_order", "samples are shuffled here, which mixes speakers as well")
    if seconds and order == "duration":
        result.write("batch_seconds", seconds, "dataset.sample_max_duration_batch")
        result.write("max_batch_samples", result["hyperparameters.batch_size"], "hyperparameters.batch_size")
        return
    if seconds:
        result.tell("dataset.sample_max_duration_batch", "it has no effect there unless sample_order is duration")
    result.write("packing", False)
    result.write("per_device_train_batch_size", result["hyperparameters.batch_size"], "hyperparameters.batch_size")


def _prompts(result: Conversion) -> None:
    span = result["dataset.prompt_duration_range"]
    if isinstance(span, list) and len(span) == 2 and read_number(span[1]) in (0.0, -1.0):
        result.write("prompt_seconds", [WHOLE, WHOLE], "dataset.prompt_duration_range", "whole recordings")
    else:
        result.write("prompt_seconds", span, "dataset.prompt_duration_range")
    similar = result.number("dataset.prompt_similar_p", 0.0)
    result.write("prompt_sources", [1.0 - similar, similar, 0.0], "dataset.prompt_similar_p")
    tasks = result["dataset.tasks_list"]
    words = tasks if isinstance(tasks, list) else [tasks]
    known = [TASKS.get(str(word), "it is no task of its trainer") for word in words]
    for word, meaning in zip(words, known, strict=True):
        if " " in meaning:
            result.refuse("dataset.tasks_list", f"{word}: {meaning}")
    result.write("tts_tasks", [meaning for meaning in known if " " not in meaning] or ["tts"], "dataset.tasks_list")
    if result["dataset.min_utterances"]:
        why = "speakers with one recording are trained without a prompt here"
        result.tell("dataset.min_utterances", why)


def _evaluation(result: Conversion) -> None:
    given = result["evaluation.kwargs"] or {}
    if not isinstance(given, dict):
        result.refuse("evaluation.kwargs", "expected a mapping")
        return
    neutral = dict(SAMPLERS)
    for name, value in given.items():
        if name in ("nar_temp", "nar_temperature"):
            result.write("class_temperature", value, "evaluation.kwargs", str(name))
        elif name in OPTIONS_OF_SPEAK:
            result.told.append(
                f"evaluation.kwargs, {name}: {value}: `erniekit speak` has it as {OPTIONS_OF_SPEAK[name]}"
            )
        elif name not in neutral:
            result.refuse("evaluation.kwargs", f"{name}: unknown")
        elif value not in (neutral[name], None, False):
            result.refuse("evaluation.kwargs", f"{name}: this way of sampling is not built; remove it")


def _data(result: Conversion) -> None:
    result.write("train_dataset_type", "codes")
    for split, name in (("training", "train_dataset_path"), ("validation", "eval_dataset_path")):
        paths = result[f"dataset.{split}"] or []
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            result.refuse(f"dataset.{split}", "expected a list of folders")
        elif paths:
            result.write(name, paths, f"dataset.{split}", "to be converted, see below")
    if "train_dataset_path" not in result.parameters:
        result.told.append("train_dataset_path: write it; dataset.training is empty")
    why = "its .enc and .dac files and HDF5 are not read here; docs/data.md has the lines that make JSON lines of them"
    result.told.append(f"the data: {why}")
    evaluates = "eval_dataset_path" in result.parameters
    result.write("do_eval", evaluates)
    if evaluates:
        result.write("eval_dataset_type", "codes")
        result.write("eval_steps", result["evaluation.frequency"], "evaluation.frequency")
        result.write("eval_answers", result["evaluation.size"], "evaluation.size")
        result.write("per_device_eval_batch_size", result["evaluation.batch_size"], "evaluation.batch_size")
        if "batch_seconds" in result.parameters:
            del result.parameters["per_device_eval_batch_size"]
    else:
        for key in ("evaluation.frequency", "evaluation.size", "evaluation.batch_size"):
            if result.is_set(key):
                result.tell(key, "dataset.validation is empty")
