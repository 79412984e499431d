"""Recognise configuration files of other programs, and files for another verb than `train`, by the names in them."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from erniekit.config.foreign import FOREIGN_NAMES, instead
from erniekit.config.foreign_names import AXOLOTL, LLAMA_FACTORY, TRANSFORMERS
from erniekit.config.sections.codes import CodesParameters

OWN_NAMES = {"train_dataset_path", "train_dataset_type", "eval_dataset_path"}  # only files for ERNIEKit have them
WIDTH = 100


@dataclass(frozen=True)
class ForeignFile:
    """A kind of file that is no configuration of ERNIEKit.

    Attributes:
        what: one sentence that says what the file is, and what to do.
        marks: names that such files contain.
        least: how many of the marks must be there.
        suite: the suite whose names are listed with their words here; "" for a sentence alone.
    """

    what: str
    marks: frozenset[str]
    least: int = 2
    suite: str = ""


_PRE_TRAINING = (
    "this is a file of ERNIE's pre-training suite, which trains from indexed .bin/.idx data with a trainer of its own; "
    "ERNIEKit reads flat files: write stage: PT with train_dataset_path, model_name_or_path and output_dir "
    "(examples/configs)"
)
FILES = (
    ForeignFile(_PRE_TRAINING, frozenset({"env", "model_args", "trainer_args"})),
    ForeignFile(_PRE_TRAINING, frozenset({"ernie_model_config"}), 1),
    ForeignFile(
        "this is the configuration of ERNIE's web interface, which fills in other files; name one of those instead",
        frozenset({"basic", "train_sft", "train_dpo", "execute"}),
    ),
    ForeignFile(
        "this is the config.json of a model, not a configuration of a run; write its folder as model_name_or_path",
        frozenset({"architectures", "model_type", "hidden_size", "vocab_size"}),
        3,
    ),
    ForeignFile(
        "this is a configuration of adapters (PEFT), not of a run; write its folder as lora_path",
        frozenset({"peft_type", "base_model_name_or_path"}),
    ),
    ForeignFile(
        "this is a configuration of DeepSpeed; in ERNIEKit the file of a run says how it is sharded: sharding: stage1, "
        "stage2 or stage3",
        frozenset({"zero_optimization", "train_micro_batch_size_per_gpu"}),
        1,
    ),
    ForeignFile(
        "this is the training configuration of OmniVoice; `erniekit import omnivoice TRAIN.json DATA.json` writes one "
        "of ERNIEKit",
        frozenset({"audio_mask_id", "num_audio_codebook", "llm_name_or_path", "drop_cond_ratio", "mask_ratio_range"}),
    ),
    ForeignFile(
        "this is the configuration of a VALL-E trainer; `erniekit import vall-e CONFIG.yaml` writes one of ERNIEKit",
        frozenset({"audio_backend", "models", "hyperparameters", "evaluation", "trainer", "dataset"}),
        4,
    ),
    ForeignFile(
        "this is a file of verl, which trains by reinforcement learning; ERNIEKit's stages are PT, SFT, DPO, TTS and "
        "DISTILL",
        frozenset({"actor_rollout_ref", "algorithm", "critic", "reward_model"}),
    ),
    ForeignFile(
        "this is a file of torchtune; write model_name_or_path, train_dataset_path, output_dir, learning_rate and "
        "num_train_epochs, one line each (docs/migrating.md)",
        frozenset({"checkpointer", "tokenizer", "metric_logger", "profiler", "dataset"}),
    ),
    ForeignFile(
        "this is a file of NeMo; write model_name_or_path, train_dataset_path, output_dir, learning_rate and "
        "num_train_epochs, one line each (docs/migrating.md)",
        frozenset({"exp_manager", "trainer"}),
    ),
    ForeignFile(
        "this is a file of axolotl; its names and the words here (docs/migrating.md has them all):",
        frozenset({"base_model", "datasets", "micro_batch_size", "sequence_len", "adapter", "sample_packing"}),
        suite=AXOLOTL,
    ),
    ForeignFile(
        "this is a file of LLaMA-Factory; its names and the words here (docs/migrating.md has them all):",
        frozenset(
            {"finetuning_type", "cutoff_len", "dataset", "dataset_dir", "lora_target", "plot_loss", "overwrite_cache"}
        ),
        suite=LLAMA_FACTORY,
    ),
    ForeignFile(
        "this is a file of trl or Transformers; its names and the words here (docs/migrating.md has them all):",
        frozenset({"dataset_name", "max_length", "use_peft", "torch_dtype", "attn_implementation", "eval_strategy"}),
        3,
        suite=TRANSFORMERS,
    ),
)


def foreign_file(values: Mapping[str, Any], known: Collection[str]) -> str:
    """Return a sentence on what a file is if it is no configuration of ERNIEKit; "" otherwise.

    Args:
        values: the names of the file with their values; other objects stand for nested structures.
        known: the names of parameters and aliases.
    """
    if sentence := _vision(values) or _offline(values):
        return sentence
    if OWN_NAMES & set(values):
        return ""
    for kind in FILES:
        if len(kind.marks & set(values)) >= kind.least:
            return kind.what + (_table(values, known) if kind.suite else "")
    return ""


def _vision(values: Mapping[str, Any]) -> str:
    stage = values.get("stage")
    words = stage.upper().replace("_", "-").split("-") if isinstance(stage, str) else []
    if {"VL", "OCR"} & set(words) or values.get("enable_mm") is True or values.get("multimodal") is True:
        return (
            "this is a file for a vision-language model, and ERNIEKit trains and serves text models only; its stages "
            "are PT, SFT, DPO, TTS and DISTILL"
        )
    return ""


def _offline(values: Mapping[str, Any]) -> str:
    if values.get("dataset_type") == "pretrain" or ("input_dir" in values and "split" in values):
        return (
            "this file trains from indexed .bin/.idx data, which ERNIEKit does not read; write stage: PT, and name "
            "text files (JSONL, Parquet) as train_dataset_path"
        )
    return ""


def _table(values: Mapping[str, Any], known: Collection[str]) -> str:
    """Return a line for each name of a file: the word here, or why there is none."""
    width = max(map(len, values)) + 2
    return "".join(f"\n{_row(name, value, known, width)}" for name, value in values.items())


def _row(name: str, value: Any, known: Collection[str], width: int) -> str:
    if name in FOREIGN_NAMES:
        plain = isinstance(value, (str, int, float, bool, list)) or value is None
        words = instead(FOREIGN_NAMES[name], value if plain else "...").removeprefix("write ").replace("`", "")
    elif name in known:
        words = "the same"
    else:
        words = "no such parameter"
    first, then = f"  {name:<{width}}", " " * (width + 2)
    return "\n".join(textwrap.wrap(words, WIDTH, initial_indent=first, subsequent_indent=then))


NAMES_OF_CODES = {item.name for item in fields(CodesParameters)}
NAMES_OF_AN_EXPORT = {"model_name_or_path", "output_dir", "fine_tuning", "lora", "device", "copy_custom_file_list"}
VERB_OF_NAMES = {
    "chat": ("max_new_tokens", "max_model_len", "quantization", "port", "temperature", "top_p"),
    "export": ("max_shard_size", "hf_hub_id"),
}


def likely_verb(names: set[str]) -> str:
    """Return the verb that a file with these names is for: it says nothing of training but how to chat or to export."""
    if names & NAMES_OF_CODES and not names & {"model_name_or_path", "stage"}:
        return "codes"
    if "output_dir" in names and names <= NAMES_OF_AN_EXPORT:
        return "export"
    if names & (OWN_NAMES | {"stage", "do_train", "do_eval", "learning_rate", "max_steps", "num_train_epochs"}):
        return "train"
    return next((verb for verb, words in VERB_OF_NAMES.items() if names & set(words)), "train")
