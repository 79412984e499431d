"""Check that a configuration, its model and this machine agree, without Paddle and NumPy.

`erniekit.build.preflight` says which command needs which of these checks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erniekit.build.adapters import base_folder, starts_from_adapters
from erniekit.build.scores import holds_score, with_score
from erniekit.build.speech import holds_codes, with_codes
from erniekit.build.tokenizer import check_vocabulary, unit_tokens_of
from erniekit.build.vocabulary import with_added_tokens
from erniekit.config import Config
from erniekit.config.object_urls import is_url
from erniekit.config.registry import PARAMETERS
from erniekit.data import PLAN_VERSION
from erniekit.data.templates.ernie import Template, chat_template
from erniekit.data.templates.transcription import DEFAULT_REQUEST, DEFAULT_SPEECH, Request, Speech
from erniekit.data.tokenizers.extend import declared_ids
from erniekit.data.tokenizers.files import TOKENIZER_FILES, needs_paddlenlp
from erniekit.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from erniekit.data.units import ALIGNED_UNITS
from erniekit.environment import available_memory, is_importable
from erniekit.errors import ConfigurationError, ModelFileError
from erniekit.hub.cache import chosen_hub, find_local_folder, missing_files
from erniekit.json_files import read_json_object
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.lora.folder import ADAPTER_CONFIG_FILE, base_model_of, is_adapter_folder
from erniekit.model.storage.layouts import locate_weights
from erniekit.model.storage.model_folder import RANKS_FILE, refuse_sharded_checkpoint
from erniekit.model.vocabulary import already_grown
from erniekit.training.callbacks.trackers import refuse_missing_trackers
from erniekit.training.checkpoint.resume import IDENTITY_FILE, RunIdentity, check_identity

if TYPE_CHECKING:
    from erniekit.data.dataset import Dataset

logger = logging.getLogger(__name__)

GENERATION_CONFIG_FILE = "generation_config.json"


def read_local_model(config: Config, folder: Path) -> ModelConfig:
    """Return the shape of the model in `folder`, with all its multi-token prediction layers; in stage TTS that of a
    model which writes codes, see `with_codes`.

    Raises:
        ModelFileError: the folder is a file, holds adapters instead of a model, or its `config.json` cannot be used.
    """
    if not folder.is_dir():
        raise ModelFileError(
            f"{config.origin('model_name_or_path')}: `model_name_or_path`: {folder} is a file\n"
            "  Write the path of a folder that holds config.json, the tokenizer's files and *.safetensors."
        )
    if is_adapter_folder(folder):
        raise ModelFileError(
            f"model_name_or_path: {folder} holds adapters; write their base model, {base_model_of(folder)}, as "
            f"model_name_or_path, and lora: true with lora_path: {folder}"
        )
    found = ModelConfig.from_folder(folder, config.basic.ignore_config_keys)
    return with_score(config, with_codes(config, found, folder), folder)


def read_generation_config(folder: Path) -> Mapping[str, Any]:
    """Read `generation_config.json` of a model's folder; return an empty mapping if it is missing."""
    path = folder / GENERATION_CONFIG_FILE
    return read_json_object(path) if path.is_file() else {}


def open_tokenizer_of(
    folder: Path,
    *,
    with_template: bool,
    variables: Mapping[str, Any] | None = None,
    request: Request = DEFAULT_REQUEST,
    speech: Speech = DEFAULT_SPEECH,
) -> tuple[Tokenizer, Template | None]:
    """Return the tokenizer of a folder, with its chat template if dialogues are read.

    Args:
        variables: variables of the chat template, such as `enable_thinking`.
        request: how transcripts are asked for.
        speech: how units of speech stand in dialogues.

    Raises:
        UserError: a file is missing or damaged, or the template cannot be used.
    """
    tokenizer = load_tokenizer(folder)
    return tokenizer, chat_template(tokenizer, variables, request, speech) if with_template else None


def warn_of_unused_variables(template: Template, variables: Mapping[str, Any]) -> None:
    """Warn of variables that the user gives to a template that does not use them."""
    unused = sorted(set(variables) - template.variable_names)
    if unused:
        logger.warning(f"no effect: {', '.join(unused)}, because the model's chat template does not use it")


def check_tokenizer(
    folder: Path,
    model_config: ModelConfig | None,
    *,
    with_template: bool,
    variables: Mapping[str, Any] | None = None,
    request: Request = DEFAULT_REQUEST,
    speech: Speech = DEFAULT_SPEECH,
) -> None:
    """Raise UserError if the tokenizer of a folder cannot be used, or does not belong to the model.

    A vocabulary that only paddlenlp reads is not opened, because that imports Paddle.
    """
    if needs_paddlenlp(folder):
        return
    tokenizer, _ = open_tokenizer_of(
        folder, with_template=with_template, variables=variables, request=request, speech=speech
    )
    if model_config is not None:
        check_vocabulary(model_config, tokenizer)


def check_unit_tokens(config: Config, folder: Path) -> None:
    """Raise ConfigurationError if records of aligned units are to be read and the tokenizer of a folder has no units.

    A vocabulary that only paddlenlp reads is not opened, because that imports Paddle.
    """
    kinds = {*config.training.train_dataset_type, *config.evaluation.eval_dataset_type}
    if ALIGNED_UNITS in kinds and not needs_paddlenlp(folder):
        unit_tokens_of(config, load_tokenizer(folder))


def tokenizer_folder(folder: Path, adapters: Path | None) -> Path:
    """Return where the tokenizer lies that belongs to a model and its adapters: these may have brought their own."""
    return adapters if adapters is not None and has_tokenizer(adapters) else folder


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds any file of a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def answering_folders(folder: Path, adapters: Path | None) -> tuple[Path, Path | None]:
    """Return the folders of the base model and of the adapters with which a command answers.

    Args:
        folder: a model, or adapters that name their base model.
        adapters: for the model in `folder`.

    Raises:
        ModelFileError: a folder is missing, or is not one of a model or of adapters.
    """
    if folder.is_file():
        raise ModelFileError(
            f"{folder}: is a file; name a model folder instead, such as the output_dir of a run.\n"
            "  For example: erniekit chat output/quickstart/sft"
        )
    if not folder.is_dir():
        raise ModelFileError(
            f"{folder}: there is no such folder; name a model folder, an output_dir, a checkpoint, or a model of "
            "a hub with --from-hf-hub, --from-aistudio or --from-modelscope"
        )
    if adapters is None and is_adapter_folder(folder):
        folder, adapters = base_folder(folder), folder
    refuse_sharded_checkpoint(folder)
    if not (folder / "config.json").is_file():
        checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
        hint = f" Its newest checkpoint is {checkpoints[-1]}." if checkpoints else ""
        raise ModelFileError(f"{folder}: there is no config.json, so this is not a model folder.{hint}")
    if adapters is not None and not is_adapter_folder(adapters):
        raise ModelFileError(f"{adapters}: contains no adapters (no {ADAPTER_CONFIG_FILE})")
    return folder, adapters


def local_weights(config: Config, folder: Path | None) -> Path | None:
    """Return the folder of the initial weights of a run; None for random ones, or for those that are not here yet.

    Args:
        folder: of the model; None: it is not here yet.
    """
    if config.checkpoint.init_from_checkpoint and not starts_from_adapters(config):
        return Path(config.checkpoint.init_from_checkpoint).expanduser()
    if not config.basic.continue_training or folder is None:
        return None
    is_fetched = chosen_hub(config) is not None or is_url(config.basic.model_name_or_path)
    return None if is_fetched and missing_files(folder, weights=True) else folder


def check_weights(model_config: ModelConfig, folder: Path) -> None:
    """Raise ModelFileError if a folder lacks weights, or their headers do not fit the model; values are not read."""
    if not folder.is_dir():  # a missing folder is told by `check_paths`
        return
    pickled = any(folder.glob("*.pdparams")) or any(folder.glob("pytorch_model*.bin"))
    if not any(folder.glob("*.safetensors")) and not (folder / RANKS_FILE).exists() and not pickled:
        raise ModelFileError(
            f"model_name_or_path: {folder} holds no *.safetensors weights to continue from.\n"
            "  Put them there, or write continue_training: false to start from random weights."
        )
    locate_weights(as_weights_have_it(model_config, folder), folder)


def as_weights_have_it(model_config: ModelConfig, weights: Path | None) -> ModelConfig:
    """Return the shape with which the weights of a run are read.

    Those of a folder whose tokenizer has the new tokens, such as a checkpoint, hold rows for them; those of any other,
    such as a model to which an earlier run has added other tokens, get them now. So it is with tables and heads of
    codes, and with a score.
    """
    if weights is not None and model_config.wrapped is not None and (holds_codes(weights) or holds_score(weights)):
        model_config = replace(model_config, wrapped=None)
    if weights is None or model_config.vocabulary is None:
        return model_config
    has_rows = {*model_config.vocabulary.ids} <= {*declared_ids(weights).values()}
    return already_grown(model_config) if has_rows else model_config


def reference_config(config: Config, model_config: ModelConfig) -> ModelConfig | None:
    """Return `compared_config` of the model of `ref_model_name_or_path`."""
    name = config.dpo.ref_model_name_or_path
    return compared_config(config, model_config, "ref_model_name_or_path", name, "reference")


def compared_config(
    config: Config, model_config: ModelConfig, parameter: str, name: str, role: str, *, same_rows: bool = True
) -> ModelConfig | None:
    """Return the shape of the model that the trained one is compared with; None if it is not named or not here yet.

    A model without the tokens that the run adds gets rows for them, which begin as those of the trained model do and
    stay so.

    Args:
        parameter, name: the parameter that names the model, and its value.
        role: what the model is, for messages.
        same_rows: whether it must have as many rows of logits.

    Raises:
        ModelFileError: the folder is not one of a model that predicts tokens, or its vocabulary is not that of the
            trained model.
    """
    folder = find_local_folder(name, chosen_hub(config)) if name else None
    if folder is None or not folder.is_dir():
        return None
    if is_adapter_folder(folder):
        raise ModelFileError(
            f"{parameter}: {folder} is a folder of adapters.\n"
            f"  Merge them into their base first: erniekit export {folder} --output DIR"
        )
    other = ModelConfig.from_folder(folder, config.basic.ignore_config_keys)
    if other.scored:
        raise ModelFileError(
            f"{parameter}: {folder} is a reward model, which gives a text a score and predicts no tokens\n"
            f"  Write a {role} that predicts tokens."
        )
    if has_tokenizer(folder) and not needs_paddlenlp(folder):
        other = with_added_tokens(config, other, folder)
    if same_rows and model_config.vocab_size != other.vocab_size:
        raise ModelFileError(
            f"{parameter}: {folder} has a vocabulary of {other.vocab_size:,}, the trained model one of "
            f"{model_config.vocab_size:,}: their tokenizers differ\n"
            f"  Write a {role} with the trained model's tokenizer."
        )
    if chosen_hub(config) is None or not missing_files(folder, weights=True):
        locate_weights(other, folder)
    return other


# The parameters that decide which samples a step has; a resumed run must have the same values.
BATCH_PARAMETERS = (
    "max_seq_len", "per_device_train_batch_size", "gradient_accumulation_steps", "packing", "greedy_intokens",
    "buffer_size", "random_shuffle", "mix_strategy", "num_samples_each_epoch",
)  # fmt: skip
# Later additions to them, recorded only if they differ from their defaults, so that older checkpoints can resume.
LATER_BATCH_PARAMETERS = (
    "batch_tokens", "max_batch_samples", "min_sample_len", "max_sample_len", "curriculum", "batch_seconds",
    "sample_order",
)  # fmt: skip


def batch_settings(config: Config, dp_world_size: int) -> dict[str, Any]:
    """Return what decides which samples a step has; data-parallel ranks and accumulation count by their product."""
    later = [name for name in LATER_BATCH_PARAMETERS if config[name] != PARAMETERS[name].default]
    accumulation = dp_world_size * config.training.gradient_accumulation_steps
    batches = {name: config[name] for name in (*BATCH_PARAMETERS, *later)} | {"plan_version": PLAN_VERSION}
    return batches | {"gradient_accumulation_steps": accumulation}


def refuse_other_batches(config: Config, dp_world_size: int | None, checkpoint: Path) -> None:
    """Raise CheckpointError if the seed or the batches differ from those of the run that wrote a checkpoint.

    Whether data and base weights are the same is seen once they have been read.

    Args:
        dp_world_size: the number of data-parallel ranks; None: as many as make the steps of the checkpoint.
    """
    path = checkpoint / IDENTITY_FILE
    if path.is_file():
        stored = RunIdentity.from_json(read_json_object(path), path)
        batches = batch_settings(config, dp_world_size or 1)
        if dp_world_size is None:
            batches["gradient_accumulation_steps"] = stored.batches.get("gradient_accumulation_steps")
        check_identity(stored, replace(stored, seed=config.training.seed, batches=batches), checkpoint)


def check_groups(config: Config, dp_world_size: int) -> None:
    """Raise ConfigurationError unless the answers of a rollout are whole groups."""
    section, training = config.grpo, config.training
    factors = {
        "per_device_train_batch_size": training.per_device_train_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "steps_per_generation": section.steps_per_generation,
        "data-parallel ranks": dp_world_size,
    }
    answers = math.prod(factors.values())
    if answers % section.num_generations:
        product = " x ".join(f"{value} ({name})" for name, value in factors.items() if value > 1)
        raise ConfigurationError(
            f"{config.origin('num_generations')}: `num_generations: {section.num_generations}`: a rollout has "
            f"{answers} answers{f', {product}' if product else ''}, which are no whole groups\n"
            f"  Change one of them, so that the answers are a multiple of {section.num_generations}."
        )


def check_rollout_workers(config: Config, dp_world_size: int) -> None:
    """Raise ConfigurationError if answers are to be sampled by workers and Ray is missing, or some have no prompt."""
    section, training = config.grpo, config.training
    if not section.rollout_workers:
        return
    given = f"{config.origin('rollout_workers')}: `rollout_workers: {section.rollout_workers}`"
    if not is_importable("ray"):
        raise ConfigurationError(
            f"{given}: the workers are processes of Ray, which is not installed\n"
            "  Install it: pip install 'erniekit[ray]'   (or write rollout_workers: 0)"
        )
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps * dp_world_size
    prompts = rows * section.steps_per_generation // section.num_generations
    if section.rollout_workers > prompts:
        raise ConfigurationError(
            f"{given}: a rollout has {prompts} prompts, and a worker answers at least one of them\n"
            f"  Write at most {prompts}, or enlarge the rollout (steps_per_generation, gradient_accumulation_steps)."
        )


def refuse_sampled_data(config: Config, what: str) -> None:
    """Raise ConfigurationError if the samples of the stage are answers that nobody has given yet.

    Args:
        what: is impossible then, and what to do.
    """
    if config.stage.reads_prompts:
        raise ConfigurationError(f"stage {config.stage.name}: its samples are answers of the model: {what}")


def refuse_packed_data(config: Config) -> None:
    """Raise ConfigurationError if the data that is to be packed is packed already, or is drawn anew in each epoch."""
    refuse_sampled_data(config, "there is nothing to pack before it trains\n  Train on the records themselves.")
    if config.stage.reads_codes:
        raise ConfigurationError(
            "stage TTS: its samples differ from epoch to epoch, so there is nothing to pack once and for all\n"
            "  Train on the records themselves; what is slow to read is in the token cache after the first run."
        )
    if "packed" in config.training.train_dataset_type:
        raise ConfigurationError("train_dataset_type: the data is packed already; give the files it was made from")


def check_trackers(config: Config) -> None:
    """Raise ConfigurationError if a tracker that the user named is not installed."""
    if config.basic.do_train and config.is_set("report_to"):
        refuse_missing_trackers(config.basic.report_to)


def check_scoring_libraries(config: Config) -> None:
    """Raise ConfigurationError if answers are to be scored and a library for that is not installed."""
    section = config.evaluation
    if not (config.basic.do_eval and section.eval_answers and config.stage.answer_metrics):
        return
    if config.stage.reads_codes:  # `check_judge`
        return
    kinds = set(config.training.train_dataset_type if section.eval_split else section.eval_dataset_type)
    if kinds != {TRANSCRIPTS} and (absent := absent_libraries(SCORING_LIBRARIES)):
        raise ConfigurationError(scoring_libraries_missing(", ".join(absent)))
    if TRANSCRIPTS in kinds and (absent := absent_libraries(TRANSCRIPT_LIBRARIES)):
        raise ConfigurationError(transcript_libraries_missing(", ".join(absent)))


def absent_libraries(libraries: Sequence[str]) -> list[str]:
    """Return which of some packages cannot be imported."""
    return [name for name in libraries if not is_importable(name)]


SCORING_LIBRARIES, TRANSCRIPT_LIBRARIES = ("rouge_score", "sacrebleu"), ("jiwer",)
TRANSCRIPTS = "asr"  # the format of records whose answers are transcripts


def scoring_libraries_missing(what: str) -> str:
    """Return the message about libraries that score answers and are not installed."""
    return (
        f"scoring generated answers needs the libraries rouge-score and sacrebleu ({what})\n"
        "  Install them: pip install 'erniekit[eval]'   (or write eval_answers: 0)"
    )


def transcript_libraries_missing(what: str) -> str:
    """Return the message about the library that counts the errors of transcripts and is not installed."""
    return (
        f"word and character error rates need the library jiwer ({what})\n"
        "  Install it: pip install 'erniekit[audio]'   (or write eval_answers: 0)"
    )


def check_positions(config: Config, model_config: ModelConfig) -> None:
    """Raise ConfigurationError if `max_seq_len` exceeds the positions of the model."""
    wanted, limit = config.training.max_seq_len, model_config.max_position_embeddings
    if wanted > limit:
        raise ConfigurationError(
            f"max_seq_len {wanted:,} ({config.origin('max_seq_len')}) exceeds the model's max_position_embeddings "
            f"{limit:,}: it was not trained on such positions.\n  Write max_seq_len: {limit} or less."
        )


def with_mtp_layers(model_config: ModelConfig, config: Config) -> ModelConfig:
    """Return the model's configuration with `num_nextn_predict_layers` multi-token prediction layers.

    Raises:
        ConfigurationError: the model has fewer, or, with random weights, its architecture has none.
    """
    wanted, stored = config.basic.num_nextn_predict_layers, model_config.num_nextn_predict_layers
    limit = stored
    if not config.basic.continue_training and "num_nextn_predict_layers" in model_config.architecture.own_fields:
        limit = wanted
    if wanted > limit:
        raise ConfigurationError(
            f"num_nextn_predict_layers {wanted} ({config.origin('num_nextn_predict_layers')}): the model has {stored} "
            f"multi-token prediction layers.\n  Write num_nextn_predict_layers: {stored}."
        )
    return replace(model_config, num_nextn_predict_layers=wanted)


def dense_mask_size(config: Config, training: Dataset | None = None, evaluation: Dataset | None = None) -> int:
    """Return the bytes of the largest dense mask of the run, float32 [rows, 1, length, length]; see `AttentionPlan`."""
    budget = config.acceleration.batch_tokens  # rows x length <= budget, so the longest rows make the largest mask

    def mask_bytes(dataset: Dataset, rows: int) -> int:
        longest = dataset.longest.sum() if config.acceleration.packing else dataset.longest.max()
        length = min(config.training.max_seq_len, int(longest))
        return 4 * (max(1, budget // length) if budget else rows) * length**2

    sizes = [mask_bytes(training, config.training.per_device_train_batch_size)] if training is not None else []
    sizes += [mask_bytes(evaluation, config.evaluation.per_device_eval_batch_size)] if evaluation is not None else []
    return max(sizes)


def check_dense_mask(size: int, max_seq_len: int) -> None:
    """Raise ConfigurationError if a dense mask of `size` bytes exceeds the available memory."""
    available = available_memory()
    if available is not None and size > available:
        raise ConfigurationError(
            f"FlashMask is switched off, and the dense mask of max_seq_len {max_seq_len:,} takes {_gib(size)}, "
            f"but only {_gib(available)} of memory is available.\n"
            "  Remove use_flash_attention, use_sparse_flash_attn and use_attn_mask_startend_row_indices, or write a "
            "smaller max_seq_len or batch size."
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"
