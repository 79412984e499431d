"""Build the device, the tokenizer and the model of a run from its configuration."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from erniekit.build.adapters import AdapterPlan, starts_from_adapters
from erniekit.build.checks import (
    as_weights_have_it,
    check_dense_mask,
    dense_mask_size,
    open_tokenizer_of,
    read_local_model,
    warn_of_unused_variables,
    with_mtp_layers,
)
from erniekit.build.parts import frozen_parts
from erniekit.build.precision import apply_mixed_precision, choose_kernels
from erniekit.build.quantization import quantization_from
from erniekit.build.tokenizer import renders_dialogues, speech_of, transcription_request, warn_of_unused_request
from erniekit.build.vocabulary import run_tokenizer_folder, tell_added_tokens, with_added_tokens
from erniekit.config import Config
from erniekit.config.sections.basic import template_variables
from erniekit.data.dataset import Dataset
from erniekit.data.templates.ernie import Template
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.environment import cpu_settings
from erniekit.hub.cache import is_fetched
from erniekit.hub.download import model_folder

if TYPE_CHECKING:
    from erniekit.distributed.mesh import Mesh
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.decoder import Decoder
    from erniekit.model.recompute import Recompute

logger = logging.getLogger(__name__)


def select_device(config: Config) -> str:
    """Select the device that the configuration asks for, and log it and the parameters that have no effect on it.

    Returns:
        "cpu", "gpu:<n>" or "<other>:<n>".

    Raises:
        ConfigurationError: the device does not exist, or `cpu_kernels` names a path that cannot run.
    """
    from erniekit.model.device import use_device

    device = use_device(config.basic.device)
    logger.info(f"device: {device}{_on_cpu(config) if device == 'cpu' else ''}")
    for line in config.ignored_on_gpu() if device.startswith("gpu") else config.ignored_on_cpu():
        logger.info(line)
    choose_kernels(config)
    return device


def _on_cpu(config: Config) -> str:
    """Choose the kernels of a CPU; return what follows its name at the start of a run."""
    from erniekit.model.native import use_kernels

    kernels = use_kernels(config.acceleration.cpu_kernels)
    threads = cpu_settings()["OMP_NUM_THREADS"]
    return f", {threads} thread{'s' if threads != '1' else ''}; kernels: {kernels.path} ({kernels.reason})"


def begin(config: Config, *, writes_output: bool = True) -> tuple[ModelConfig, Tokenizer, Template | None]:
    """Log the messages of the configuration, select the device, check all that can be checked before anything is
    built, and read the model's configuration and tokenizer.

    Args:
        writes_output: whether the command writes into `output_dir`.

    Raises:
        UserError: the run cannot begin, see `preflight`.
    """
    from erniekit.build.preflight import preflight

    for line in config.messages:
        logger.info(line)
    select_device(config)
    if is_fetched(config):
        model_folder(config)  # fetched first, so that there is something to check
    is_first, world_size = os.environ.get("PADDLE_TRAINER_ID", "0") == "0", os.environ.get("PADDLE_TRAINERS_NUM", "1")
    known = preflight(config, world_size=int(world_size), reads_files=is_first, writes_output=writes_output)
    for line in known.notes:
        logger.info(line)
    return read_model_config(config), *open_tokenizer(config)


def open_tokenizer(config: Config) -> tuple[Tokenizer, Template | None]:
    """Return the tokenizer of `model_name_or_path` with the tokens that the run adds, and with its chat template if the
    stage reads dialogues."""
    variables = template_variables(config.basic)
    request = transcription_request(config)
    folder = model_folder(config)
    tell_added_tokens(config, folder)
    tokenizer, template = open_tokenizer_of(
        run_tokenizer_folder(config, folder),
        with_template=renders_dialogues(config),
        variables=variables,
        request=request,
        speech=speech_of(config),
    )
    if template is not None:
        warn_of_unused_variables(template, variables)
        warn_of_unused_request(template, request)
    return tokenizer, template


def announce_dense_mask(config: Config, training: Dataset | None = None, evaluation: Dataset | None = None) -> None:
    """Log the size of the dense mask if FlashMask is switched off, before it is allocated.

    Raises:
        ConfigurationError: the mask exceeds the available memory.
    """
    if not config.uses_dense_mask:
        return
    size = dense_mask_size(config, training, evaluation)
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
    """Return the folder of the initial weights of a new run, which are fetched first; None for random weights."""
    if config.checkpoint.init_from_checkpoint and not starts_from_adapters(config):
        return Path(config.checkpoint.init_from_checkpoint).expanduser()
    if not config.basic.continue_training:
        return None
    return model_folder(config, weights=True)


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
    from erniekit.model.moe.router import clear_correction_bias

    model_config = read_model_config(config)
    model = build_model(
        as_weights_have_it(model_config, weights),
        weights,
        seed=config.training.seed,
        hidden_dropout=config.basic.hidden_dropout_prob,
        attention_dropout=config.basic.attention_probs_dropout_prob,
        lora=adapters.settings if adapters else None,
        adapters=adapters.folder if adapters else None,
        balance=config.moe,
        frozen=frozen_parts(config, model_config) if adapters is None else (),
        recompute=_recompute(config),
        quantization=quantization_from(config),
        **model_shard_arguments(config, model_config, mesh or SINGLE_PROCESS_MESH),
        log_level=log_level,
    )
    if not config.moe.moe_use_aux_free:
        clear_correction_bias(model)
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
    """Read `config.json` of `model_name_or_path`, with the multi-token prediction layers that the run uses and rows for
    the tokens that it adds.

    Raises:
        UserError: it is missing or not valid, or a token cannot be added.
    """
    folder = model_folder(config)
    return with_added_tokens(config, with_mtp_layers(read_local_model(config, folder), config), folder)
