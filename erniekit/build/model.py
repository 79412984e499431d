"""Build the device, the tokenizer and the model of a run from its configuration."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from erniekit.build.adapters import AdapterPlan, starts_from_adapters
from erniekit.build.checks import (
    check_dense_mask,
    check_positions,
    check_vocabulary,
    model_warnings,
    with_mtp_layers,
)
from erniekit.build.precision import apply_mixed_precision, choose_kernels
from erniekit.build.quantization import quantization_from
from erniekit.config import Config
from erniekit.data.dataset import Dataset
from erniekit.data.templates.ernie import Template, chat_template
from erniekit.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from erniekit.errors import ModelFileError
from erniekit.hub.download import model_folder
from erniekit.model.lora.folder import base_model_of, is_adapter_folder

if TYPE_CHECKING:
    from erniekit.distributed.mesh import Mesh
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.decoder import Decoder
    from erniekit.model.recompute import Recompute

logger = logging.getLogger(__name__)


def select_device(config: Config) -> str:
    """Select the device that the configuration asks for, and log the parameters that have no effect on it.

    Returns:
        "cpu" or "gpu:<n>".

    Raises:
        ConfigurationError: the device does not exist.
    """
    from erniekit.model.device import use_device

    device = use_device(config.basic.device)
    if device == "cpu":
        for line in config.ignored_on_cpu():
            logger.info(line)
    choose_kernels(config)
    return device


def begin_training(config: Config) -> tuple[ModelConfig, Tokenizer, Template | None]:
    """Log the messages of the configuration, select the device, and read the model's configuration and tokenizer.

    Raises:
        UserError: the device or the model does not exist, or the tokenizer belongs to another model.
    """
    for line in config.messages:
        logger.info(line)
    select_device(config)
    model_config = read_model_config(config)
    tokenizer, template = open_tokenizer(config)
    check_vocabulary(model_config, tokenizer)
    for line in model_warnings(config, model_config, model_folder(config)):
        logger.info(line)
    return model_config, tokenizer, template


def open_tokenizer(config: Config) -> tuple[Tokenizer, Template | None]:
    """Return the tokenizer of `model_name_or_path`, with its chat template if the stage reads dialogues."""
    folder = model_folder(config)
    tokenizer = load_tokenizer(folder)
    return tokenizer, None if config.stage.reads_text else chat_template(tokenizer)


def announce_dense_mask(config: Config, training: Dataset | None = None, evaluation: Dataset | None = None) -> None:
    """Log the size of the dense mask if FlashMask is switched off, before it is allocated.

    Raises:
        ConfigurationError: the mask exceeds the available memory.
    """
    if not config.uses_dense_mask:
        return
    from erniekit.model.attention import dense_mask_bytes

    budget = config.acceleration.batch_tokens  # rows x length <= budget, so the longest rows make the largest mask

    def mask_bytes(dataset: Dataset, rows: int) -> int:
        longest = dataset.lengths.sum() if config.acceleration.packing else dataset.lengths.max()
        length = min(config.training.max_seq_len, int(longest))
        return dense_mask_bytes(max(1, budget // length) if budget else rows, length)

    sizes = [mask_bytes(training, config.training.per_device_train_batch_size)] if training is not None else []
    sizes += [mask_bytes(evaluation, config.evaluation.per_device_eval_batch_size)] if evaluation is not None else []
    size = max(sizes)
    logger.info(
        f"FlashMask is switched off: attention uses a dense mask of up to {size / 2**20:,.1f} MiB for each micro-batch"
    )
    check_dense_mask(size, config.training.max_seq_len)


def head_settings(config: Config) -> dict[str, bool]:
    """Return the arguments of an objective for head and attention."""
    return {
        "fused_head": config.memory.use_fused_head_and_loss_fn,
        "sparse_head": config.memory.use_sparse_head_and_loss_fn,
        "dense_mask": config.uses_dense_mask,
    }


def initial_weights(config: Config) -> Path | None:
    """Return the folder of the initial weights of a new run; None for random weights.

    Raises:
        ModelFileError: the model's folder has no weights.
    """
    if config.checkpoint.init_from_checkpoint and not starts_from_adapters(config):
        return Path(config.checkpoint.init_from_checkpoint).expanduser()
    if not config.basic.continue_training:
        return None
    folder = model_folder(config, weights=True)
    if not any(folder.glob("*.safetensors")):
        raise ModelFileError(
            f"model_name_or_path: {folder} holds no *.safetensors weights to continue from.\n"
            "  Put them there, or write continue_training: false to start from random weights."
        )
    return folder


def open_model(
    config: Config,
    weights: Path | None,
    *,
    adapters: AdapterPlan | None = None,
    mesh: Mesh | None = None,
    log_level: int = logging.INFO,
) -> Decoder:
    """Build the model of `model_name_or_path` for training, with the weights of a folder or random ones.

    Args:
        adapters: the adapters to train on frozen weights; None if all weights are trained.
        mesh: the mesh of the ranks that shard the model; None for a single process.
        log_level: the level of the log lines that describe the model; DEBUG for a second, equal model.
    """
    from erniekit.build.distributed import model_shard_arguments
    from erniekit.distributed.mesh import SINGLE_PROCESS_MESH
    from erniekit.model.builder import build_model

    model_config = read_model_config(config)
    model = build_model(
        model_config,
        weights,
        seed=config.training.seed,
        hidden_dropout=config.basic.hidden_dropout_prob,
        attention_dropout=config.basic.attention_probs_dropout_prob,
        lora=adapters.settings if adapters else None,
        adapters=adapters.folder if adapters else None,
        balance=config.moe,
        recompute=_recompute(config),
        quantization=quantization_from(config),
        **model_shard_arguments(config, model_config, mesh or SINGLE_PROCESS_MESH),
        log_level=log_level,
    )
    apply_mixed_precision(config, model, log_level)
    if model.pipeline_stage.last:
        model.head.parallel_output = config.distributed.tensor_parallel_output
    return model


def _recompute(config: Config) -> Recompute | None:
    from erniekit.model.recompute import Recompute

    section = config.memory
    if not section.recompute:
        return None
    return Recompute(section.recompute_use_reentrant, section.no_recompute_layers, section.recompute_granularity)


def read_model_config(config: Config) -> ModelConfig:
    """Read and check `config.json` of `model_name_or_path`.

    Raises:
        ModelFileError: it is missing or not valid.
        ConfigurationError: `max_seq_len` exceeds the model's positions.
    """
    from erniekit.model.architectures.model_config import ModelConfig

    folder = model_folder(config)
    if is_adapter_folder(folder):
        raise ModelFileError(
            f"model_name_or_path: {folder} holds adapters; write their base model, {base_model_of(folder)}, as "
            f"model_name_or_path, and lora: true with lora_path: {folder}"
        )
    model_config = ModelConfig.from_folder(folder, config.basic.ignore_config_keys)
    check_positions(config, model_config)
    return with_mtp_layers(model_config, config)
