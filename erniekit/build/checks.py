"""Check that a configuration, its model and this machine agree, without Paddle and NumPy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from erniekit.config import Config
from erniekit.data.formats.table import is_hub_dataset
from erniekit.environment import available_memory
from erniekit.errors import ConfigurationError, ModelFileError
from erniekit.hub.cache import chosen_hub, hub_hint, local_model_folder

if TYPE_CHECKING:
    from erniekit.data.tokenizers.tokenizer import Tokenizer
    from erniekit.distributed.topology import Topology
    from erniekit.model.architectures.model_config import ModelConfig


def check_paths(config: Config) -> None:
    """Raise ConfigurationError if the run would read a folder or a file that does not exist.

    A model of a hub may be missing, since it can be downloaded. Raise ModelFileError if its name is not valid on a hub.
    """
    training, evaluation, checkpoint = config.training, config.evaluation, config.checkpoint
    periodic = evaluation.evaluation_strategy != "no" or not config.basic.do_train
    read: dict[str, tuple[str, ...]] = {}
    if chosen_hub(config) is None:
        read["model_name_or_path"] = (config.basic.model_name_or_path,)
        if config.applies("ref_model_name_or_path"):
            read["ref_model_name_or_path"] = (config.dpo.ref_model_name_or_path,)
    else:
        local_model_folder(config)  # raises if the name is not valid on a hub; the model may be downloaded later
    if config.basic.do_train or config.verb == "preview":
        read["train_dataset_path"] = training.train_dataset_path
    if config.verb == "train" and config.basic.do_eval and periodic:
        read["eval_dataset_path"] = evaluation.eval_dataset_path
    if config.verb == "train":
        read["init_from_checkpoint"] = (checkpoint.init_from_checkpoint,)
        if isinstance(checkpoint.resume_from_checkpoint, str):
            read["resume_from_checkpoint"] = (checkpoint.resume_from_checkpoint,)
    lines = [
        f"{config.origin(name)}: `{name}`: {path} does not exist" + hub_hint(path) * (name == "model_name_or_path")
        for name, paths in read.items()
        for path in filter(None, paths)
        if not Path(path).expanduser().exists()
        and not (name in ("train_dataset_path", "eval_dataset_path") and is_hub_dataset(path))
    ]
    if lines:
        lines[-1] += f"\n  Paths are relative to the current folder: {Path.cwd()}"
        raise ConfigurationError("\n".join(lines))


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


def model_warnings(config: Config, model_config: ModelConfig, folder: Path) -> list[str]:
    """Return a line for each expert or router parameter without effect, and for prediction layers that are left out."""
    lines = []
    if not model_config.moe_num_experts:
        names = [name for name in config.moe.__dataclass_fields__ if name.startswith("moe_") and config.is_set(name)]
        lines += [f"`{name}: {config[name]}` has no effect: {model_config.model_type} has no experts" for name in names]
    elif config.lora.lora:
        names = [name for name in ("moe_orthogonal_loss_lambda", "moe_router_bias_update_rate") if config[name]]
        lines += [f"`{name}: {config[name]}` has no effect: adapters leave routers unchanged" for name in names]
    elif config.moe.moe_router_bias_update_rate and (
        model_config.architecture.routing(model_config).correction_bias is None
    ):
        lines.append(
            f"`moe_router_bias_update_rate: {config.moe.moe_router_bias_update_rate}` has no effect: the routers of "
            f"{model_config.model_type} have no correction bias"
        )
    if model_config.other_keys.get("num_nextn_predict_layers"):
        lines.append("the model's multi-token prediction layers are left out, of training and of the saved model")
    wanted = model_config.num_nextn_predict_layers
    left_out = type(model_config).from_folder(folder, config.basic.ignore_config_keys).num_nextn_predict_layers - wanted
    if left_out > 0:
        lines.append(
            f"num_nextn_predict_layers is {wanted}: {left_out} of the model's multi-token prediction layers "
            f"{'is' if left_out == 1 else 'are'} left out, of training and of the saved model"
        )
    return lines


def expert_parallel_warnings(config: Config, model_config: ModelConfig, topology: Topology) -> list[str]:
    """Return a line for each parameter of expert parallelism that has no effect in this layout."""
    group, way = config.distributed.moe_group, "moe_multimodal_dispatch_use_allgather"
    idle = {}
    if not model_config.moe_num_experts:
        idle = dict.fromkeys(("moe_group", way), f"{model_config.model_type} has no experts")
    elif topology.expert == 1:
        alone = {"mp": "tensor_parallel_degree is 1", "data": "no two ranks train on different data"}
        idle = {"moe_group": alone.get(group, ""), way: "every rank holds all experts"}
    elif group == "mp" and not topology.sequence_parallel:
        idle = {way: "without sequence_parallel every rank of `moe_group: mp` has all tokens already"}
    asked = [key for key in idle if config.is_set(key) and config[key] != "dummy"]
    return [f"`{key}: {config[key]}` has no effect: {idle[key]}" for key in asked]


def check_vocabulary(model_config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise ModelFileError if the tokenizer has ids without an embedding in the model."""
    if tokenizer.vocab_size > model_config.vocab_size:
        raise ModelFileError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens but config.json says vocab_size "
            f"{model_config.vocab_size:,}: they do not belong together"
        )


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
