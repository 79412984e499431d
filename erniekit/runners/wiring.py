"""From parameters to the parts of a run: what several runners need, each part made in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erniekit.data.dataset import Dataset, open_dataset, open_packed_dataset
from erniekit.data.evaluation_plan import EvaluationPlan
from erniekit.data.packed import Maker
from erniekit.data.plan import StepPlan
from erniekit.data.preference_records import preference_kind
from erniekit.data.sources import Source
from erniekit.data.template import Template, chat_template
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.errors import ModelFileError
from erniekit.model.adapters.folder import base_model_of, is_adapter_folder
from erniekit.parameters import Config
from erniekit.parameters.sft import SftParameters
from erniekit.runners.adapters import AdapterPlan, starts_from_adapters
from erniekit.runners.checks import (
    check_dense_mask,
    check_positions,
    check_vocabulary,
    what_the_model_lacks,
    with_predictions,
)
from erniekit.runners.hub_cache import chosen_hub
from erniekit.runners.hubs import find_model_folder
from erniekit.runners.known_steps import cache_folder, remember_steps

if TYPE_CHECKING:
    from erniekit.model.configuration import ModelConfig
    from erniekit.model.decoder import Decoder
    from erniekit.model.moe.balance import BalanceSettings
    from erniekit.model.recompute import Recompute
    from erniekit.training.objectives import Objective
    from erniekit.training.preference_losses import PreferenceSettings

Say = Callable[[str], None]


def select_device(config: Config, say: Say = print) -> str:
    """Make Paddle compute on the device the configuration asks for, and say what that device cannot do.

    Returns:
        "cpu" or "gpu:<n>".

    Raises:
        ConfigurationError: no such device, or GPU machinery that is not available yet.
    """
    from erniekit.model.device import use_device

    device = use_device(config.basic.device)
    if device == "cpu":
        for line in config.without_effect_on_cpu():
            say(line)
    else:
        config.refuse_unavailable_on_gpu()
    return device


def begin_training(config: Config, say: Say = print) -> tuple[ModelConfig, Tokenizer, Template | None]:
    """Say what there is to say of the configuration, choose the device, and open the model's small files.

    Raises:
        UserError: no such device or model, or its tokenizer belongs to another one.
    """
    for line in config.messages:
        say(line)
    select_device(config, say)
    model_config = read_model_config(config)
    tokenizer, template = open_tokenizer(config)
    check_vocabulary(model_config, tokenizer)
    for line in what_the_model_lacks(config, model_config, model_folder(config)):
        say(line)
    return model_config, tokenizer, template


def open_tokenizer(config: Config) -> tuple[Tokenizer, Template | None]:
    """The tokenizer of `model_name_or_path`, with its chat template where dialogues are read."""
    folder = model_folder(config)
    tokenizer = load_tokenizer(folder)
    return tokenizer, None if config.basic.stage == "PT" else chat_template(tokenizer)


def model_folder(config: Config, *, weights: bool = False) -> Path:
    """The local folder of `model_name_or_path`; where a hub is chosen, the model is fetched.

    Args:
        weights: whether the weights are wanted, too; otherwise a hub is asked for the small files only.

    Raises:
        ModelFileError: there is no such folder or model.
    """
    return find_model_folder(config.basic.model_name_or_path, chosen_hub(config), weights=weights)


def training_sources(config: Config) -> list[Source]:
    """The training files."""
    section = config.training
    return _sources(config, section.train_dataset_path, section.train_dataset_type, section.train_dataset_prob)


def evaluation_sources(config: Config) -> list[Source]:
    """The held-out files."""
    section = config.evaluation
    return _sources(config, section.eval_dataset_path, section.eval_dataset_type, section.eval_dataset_prob)


def _sources(
    config: Config, paths: tuple[str, ...], kinds: tuple[str, ...], probabilities: tuple[float, ...]
) -> list[Source]:
    if not paths:  # formats and probabilities then have their one default each
        return []
    if config.basic.stage == "DPO":
        kinds = tuple(preference_kind(kind) for kind in kinds)
    return [
        Source(Path(path).expanduser(), kind, probability)
        for path, kind, probability in zip(paths, kinds, probabilities, strict=True)
    ]


def training_dataset(config: Config, tokenizer: Tokenizer, template: Template | None) -> Dataset:
    """The tokenised training data."""
    if "packed" in config.training.train_dataset_type:
        return open_packed_dataset(
            Path(config.training.train_dataset_path[0]).expanduser(),
            packed_maker(config, tokenizer, template),
            max_seq_len=config.training.max_seq_len,
            pad_id=tokenizer.pad_id,
        )
    return _dataset(config, tokenizer, template, training_sources(config))


def packed_maker(config: Config, tokenizer: Tokenizer, template: Template | None) -> Maker:
    """What a pre-packed folder must have been made with, or is made with."""
    return Maker(tokenizer.fingerprint, template.fingerprint if template else None, config.basic.stage == "DPO")


def evaluation_dataset(config: Config, tokenizer: Tokenizer, template: Template | None) -> Dataset:
    """The tokenised evaluation data."""
    return _dataset(config, tokenizer, template, evaluation_sources(config))


def _dataset(config: Config, tokenizer: Tokenizer, template: Template | None, sources: list[Source]) -> Dataset:
    return open_dataset(
        sources,
        tokenizer,
        template,
        cache_dir=cache_folder(config),
        **sample_limits(config),
    )


def sample_limits(config: Config) -> dict[str, Any]:
    """What a record must keep to so as to become a sample; see `open_dataset`."""
    return {
        "max_seq_len": config.training.max_seq_len,
        "over_length": config.sft.over_length_policy,
        "max_prompt_len": config.dpo.max_prompt_len,
        "needs_scores": config.dpo.offset_alpha > 0,
    }


def training_plan(config: Config, dataset: Dataset) -> StepPlan:
    """Which samples make which optimizer step."""
    if dataset.packed is not None:
        return StepPlan(
            dataset,
            max_seq_len=config.training.max_seq_len,
            packing=False,
            greedy=False,
            window=1,
            batch_size=config.training.per_device_train_batch_size,
            accumulation=config.training.gradient_accumulation_steps,
            shuffle=False,
            packs=dataset.packed.packs,
            batch_tokens=dataset.packed.batch_tokens,
        )
    return StepPlan(
        dataset,
        max_seq_len=config.training.max_seq_len,
        packing=config.acceleration.packing,
        greedy=config.acceleration.greedy_intokens,
        window=config.acceleration.buffer_size,
        batch_size=config.training.per_device_train_batch_size,
        accumulation=config.training.gradient_accumulation_steps,
        seed=config.training.seed,
        shuffle=config.training.random_shuffle,
        strategy=config.sft.mix_strategy,
        num_samples_each_epoch=config.sft.num_samples_each_epoch,
        repeat_samples=config.sft.num_samples_each_epoch != SftParameters.num_samples_each_epoch,
        sorted_first=config.sft.curriculum == "length",
        **_length_groups(config),
    )


def _length_groups(config: Config) -> dict[str, Any]:
    """How samples of similar length share a micro-batch, where they do."""
    section = config.acceleration
    if not section.batch_tokens:
        return {}
    return {
        "batch_tokens": section.batch_tokens,
        "max_batch_samples": section.max_batch_samples,
        "shortest": section.min_sample_len,
        "longest": section.max_sample_len,
    }


def evaluation_plan(config: Config, dataset: Dataset) -> EvaluationPlan:
    """Every evaluation sample once, in the order of the files; sources of probability 0 are left out."""
    return EvaluationPlan(
        dataset,
        max_seq_len=config.training.max_seq_len,
        packing=config.acceleration.packing,
        greedy=config.acceleration.greedy_intokens,
        window=config.acceleration.buffer_size,
        batch_size=config.evaluation.per_device_eval_batch_size,
        **_length_groups(config),
    )


def count_steps(config: Config, plan: StepPlan) -> int:
    """The exact number of steps of the run; noted for `erniekit validate`."""
    steps = plan.total_steps(config.training.max_steps, config.training.num_train_epochs)
    remember_steps(config, steps)
    return steps


def announce_dense_mask(config: Config, datasets: Iterable[tuple[Dataset, int]], say: Say) -> None:
    """Where FlashMask is switched off, say how large the dense mask will be, before anything allocates it.

    Args:
        datasets: each with the rows of its micro-batches.

    Raises:
        ConfigurationError: it exceeds the memory that is available.
    """
    if not config.uses_dense_mask:
        return
    from erniekit.model.attention import dense_mask_bytes

    def longest_row(dataset: Dataset) -> int:
        longest = dataset.lengths.sum() if config.acceleration.packing else dataset.lengths.max()
        return min(config.training.max_seq_len, int(longest))

    budget = config.acceleration.batch_tokens  # rows x length <= budget, so the longest rows make the largest mask

    def most_rows(rows: int, length: int) -> int:
        return max(1, budget // length) if budget else rows

    lengths = [(rows, longest_row(dataset)) for dataset, rows in datasets]
    size = max(dense_mask_bytes(most_rows(rows, length), length) for rows, length in lengths)
    say(f"FlashMask is switched off: attention uses a dense mask of up to {size / 2**20:,.1f} MiB for each micro-batch")
    check_dense_mask(size, config.training.max_seq_len)


def objective_from(config: Config) -> Objective:
    """The supervised loss with the head and the attention that the configuration asks for."""
    from erniekit.training.objectives import supervised

    return supervised(**head_settings(config), multi_token_pred_lambda=config.moe.multi_token_pred_lambda)


def head_settings(config: Config) -> dict[str, bool]:
    """How an objective computes head and attention."""
    return {
        "fused_head": config.memory.use_fused_head_and_loss_fn,
        "sparse_head": config.memory.use_sparse_head_and_loss_fn,
        "dense_mask": config.uses_dense_mask,
    }


def preference_settings(config: Config) -> PreferenceSettings:
    """The preference loss of section 2.3."""
    from erniekit.training.preference_losses import PreferenceSettings

    names = [item.name for item in fields(PreferenceSettings)]
    return PreferenceSettings(**{name: config[name] for name in names})


def first_weights(config: Config) -> Path | None:
    """Where a fresh run takes its weights from; None for random ones.

    Raises:
        ModelFileError: the model's folder holds no weights.
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
    config: Config, weights: Path | None, say: Say = print, *, adapters: AdapterPlan | None = None
) -> Decoder:
    """Build the model of `model_name_or_path` for training, with the weights of a folder or random ones.

    Args:
        adapters: what is trained beside frozen weights; None: all weights are trained.
    """
    from erniekit.model.builder import build_model

    return build_model(
        read_model_config(config),
        weights,
        seed=config.training.seed,
        hidden_dropout=config.basic.hidden_dropout_prob,
        attention_dropout=config.basic.attention_probs_dropout_prob,
        lora=adapters.settings if adapters else None,
        adapters=adapters.folder if adapters else None,
        balance=_balance(config),
        recompute=_recompute(config),
        log=say,
    )


def _balance(config: Config) -> BalanceSettings:
    from erniekit.model.moe.balance import BalanceSettings

    section = config.moe
    return BalanceSettings(
        aux_loss_lambda=section.moe_aux_loss_lambda,
        z_loss_lambda=section.moe_z_loss_lambda,
        orthogonal_loss_lambda=section.moe_orthogonal_loss_lambda,
        router_bias_update_rate=section.moe_router_bias_update_rate,
    )


def _recompute(config: Config) -> Recompute | None:
    from erniekit.model.recompute import Recompute

    section = config.memory
    if not section.recompute:
        return None
    return Recompute(section.recompute_use_reentrant, section.no_recompute_layers)


def read_model_config(config: Config) -> ModelConfig:
    """`config.json` of `model_name_or_path`.

    Raises:
        ModelFileError: it cannot be used.
        ConfigurationError: `max_seq_len` exceeds the model's positions.
    """
    from erniekit.model.configuration import ModelConfig

    folder = model_folder(config)
    if is_adapter_folder(folder):
        raise ModelFileError(
            f"model_name_or_path: {folder} holds adapters; write their base model, {base_model_of(folder)}, as "
            f"model_name_or_path, and lora: true with lora_path: {folder}"
        )
    model_config = ModelConfig.from_folder(folder)
    check_positions(config, model_config)
    return with_predictions(model_config, config)
