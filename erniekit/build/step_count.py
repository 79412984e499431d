"""Cache the number of steps of a run, so that `validate` can name it without reading the same data again.

The exact number needs the tokenised data. A run that has read the data writes it into the cache folder, keyed by the
files (path, size, modification time) and every parameter of the plan. Reading it needs neither Paddle nor NumPy.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from erniekit import environment
from erniekit.config import Config
from erniekit.config.registry import PARAMETERS
from erniekit.data import PLAN_VERSION
from erniekit.data.tokenizers.files import TOKENIZER_FILES
from erniekit.hub.cache import local_model_folder

PLAN_PARAMETERS = (
    "stage", "model_name_or_path", "train_dataset_path", "train_dataset_type", "train_dataset_prob", "mix_strategy",
    "num_samples_each_epoch", "over_length_policy", "max_seq_len", "packing", "greedy_intokens", "buffer_size",
    "on_bad_record", "random_shuffle", "seed", "max_prompt_len",
    "per_device_train_batch_size", "gradient_accumulation_steps",
    "max_steps", "num_train_epochs", "batch_tokens", "max_batch_samples", "min_sample_len", "max_sample_len",
    "curriculum", "split_multi_turn", "enable_thinking", "chat_template_kwargs", "asr_prompt",
    "asr_language",
)  # fmt: skip
LATER_PARAMETERS = (
    "added_tokens", "added_token_ranges", "unit_token", "correspond_token", "dialogue_template",
    "ref_model_name_or_path",
)  # fmt: skip


def cache_folder(config: Config) -> Path:
    """Return the cache folder of tokenised data: `data_cache_dir`, else $ERNIEKIT_CACHE, else ~/.cache/erniekit."""
    return environment.cache_folder(config.training.data_cache_dir)


def cache_step_count(config: Config, total_steps: int, *, dp_world_size: int = 1) -> None:
    """Cache the exact number of steps of a run with `dp_world_size` data-parallel ranks, if it can be written."""
    if config.stage.reads_codes:  # a folder of codes has no file whose time tells that it has changed
        return
    path = _path(config, dp_world_size)
    if cached_step_count(config, dp_world_size=dp_world_size) == total_steps:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"total_steps": total_steps}), encoding="utf-8")
    except OSError:
        return


def cached_step_count(config: Config, *, dp_world_size: int = 1) -> int | None:
    """Return the exact number of steps if a run has cached it for the same data and settings, else None."""
    if config.stage.reads_codes:
        return None
    try:
        return int(json.loads(_path(config, dp_world_size).read_text(encoding="utf-8"))["total_steps"])
    except (OSError, ValueError, KeyError):
        return None


def _path(config: Config, dp_world_size: int) -> Path:
    files = [Path(path).expanduser() for path in config.training.train_dataset_path]
    files = [path / "manifest.json" if path.is_dir() else path for path in files]  # of a packed folder
    model = local_model_folder(config)
    files += [model / name for name in TOKENIZER_FILES] if model is not None else []
    if model is not None and (config.stage.reads_pairs or config.stage.reads_verdicts):
        files.append(model / "config.json")  # whose windows of attention tell how long pairs are
    stamps = [(str(path.resolve()), *_stamp(path)) for path in files]
    held_out = [config.evaluation.eval_split] if config.evaluation.eval_split else []
    # Whatever came later counts where it is not its default, so that known counts stay known.
    later = [(name, config[name]) for name in LATER_PARAMETERS if config[name] != PARAMETERS[name].default]
    values = [*(config[name] for name in PLAN_PARAMETERS), *([dp_world_size] if dp_world_size > 1 else [])]
    values += [*held_out, *later]
    key = hashlib.blake2b(repr((PLAN_VERSION, stamps, values)).encode(), digest_size=16).hexdigest()
    return cache_folder(config) / "steps" / f"{key}.json"


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (-1, -1)
    return status.st_size, status.st_mtime_ns
