"""From parameters to the parts of a run: what several runners need, each part made in one place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from erniekit.data.dataset import Dataset, open_dataset
from erniekit.data.plan import StepPlan
from erniekit.data.sources import Source
from erniekit.data.template import Template, chat_template
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.errors import ModelFileError
from erniekit.parameters import Config
from erniekit.parameters.sft import SftParameters
from erniekit.runners.known_steps import cache_folder, remember_steps

if TYPE_CHECKING:
    from erniekit.model.configuration import ModelConfig
    from erniekit.model.decoder import Decoder

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


def open_tokenizer(config: Config) -> tuple[Tokenizer, Template | None]:
    """The tokenizer of `model_name_or_path`, with its chat template where dialogues are read."""
    folder = model_folder(config)
    tokenizer = load_tokenizer(folder)
    return tokenizer, None if config.basic.stage == "PT" else chat_template(tokenizer)


def model_folder(config: Config) -> Path:
    """The local folder of `model_name_or_path`.

    Raises:
        ModelFileError: there is no such folder.
    """
    folder = Path(config.basic.model_name_or_path).expanduser()
    if not folder.is_dir():
        raise ModelFileError(
            f"model_name_or_path: {folder} is not a folder here ({folder.absolute()}).\n"
            "  Write the path of a folder that holds config.json, tokenizer.json and *.safetensors."
        )
    return folder


def training_dataset(config: Config, tokenizer: Tokenizer, template: Template | None) -> Dataset:
    """The tokenised training data."""
    section = config.training
    return _dataset(
        config, tokenizer, template, section.train_dataset_path, section.train_dataset_type, section.train_dataset_prob
    )


def evaluation_dataset(config: Config, tokenizer: Tokenizer, template: Template | None) -> Dataset:
    """The tokenised evaluation data."""
    section = config.evaluation
    return _dataset(
        config, tokenizer, template, section.eval_dataset_path, section.eval_dataset_type, section.eval_dataset_prob
    )


def _dataset(
    config: Config,
    tokenizer: Tokenizer,
    template: Template | None,
    paths: tuple[str, ...],
    kinds: tuple[str, ...],
    probabilities: tuple[float, ...],
) -> Dataset:
    sources = [
        Source(Path(path).expanduser(), kind, probability)
        for path, kind, probability in zip(paths, kinds, probabilities, strict=True)
    ]
    return open_dataset(
        sources,
        tokenizer,
        template,
        max_seq_len=config.training.max_seq_len,
        over_length=config.sft.over_length_policy,
        cache_dir=cache_folder(config),
    )


def training_plan(config: Config, dataset: Dataset) -> StepPlan:
    """Which samples make which optimizer step."""
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
    )


def evaluation_plan(config: Config, dataset: Dataset) -> StepPlan:
    """Every evaluation sample once, in the order of the files; sources of probability 0 are left out."""
    return StepPlan(
        dataset,
        max_seq_len=config.training.max_seq_len,
        packing=config.acceleration.packing,
        greedy=config.acceleration.greedy_intokens,
        window=config.acceleration.buffer_size,
        batch_size=config.evaluation.per_device_eval_batch_size,
        accumulation=1,
        seed=config.training.seed,
        shuffle=False,
        strategy="concat",
    )


def count_steps(config: Config, plan: StepPlan) -> int:
    """The exact number of steps of the run; noted for `erniekit validate`."""
    steps = plan.total_steps(config.training.max_steps, config.training.num_train_epochs)
    remember_steps(config, steps)
    return steps


def uses_dense_mask(config: Config) -> bool:
    """Whether the user has switched FlashMask off; attention then runs with a dense mask made from the same indices."""
    return not (
        config.acceleration.use_flash_attention
        and config.acceleration.use_sparse_flash_attn
        and config.memory.use_attn_mask_startend_row_indices
    )


def open_model(config: Config, weights: Path | None, say: Say = print) -> Decoder:
    """Build the model of `model_name_or_path` for training, with the weights of a folder or random ones."""
    from erniekit.model.builder import build_model

    return build_model(
        read_model_config(config),
        weights,
        seed=config.training.seed,
        hidden_dropout=config.basic.hidden_dropout_prob,
        attention_dropout=config.basic.attention_probs_dropout_prob,
        log=say,
    )


def read_model_config(config: Config) -> ModelConfig:
    """`config.json` of `model_name_or_path`."""
    from erniekit.model.configuration import ModelConfig

    return ModelConfig.from_folder(model_folder(config))


def check_vocabulary(model_config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise ModelFileError where the tokenizer has ids for which the model has no embedding."""
    if tokenizer.vocab_size > model_config.vocab_size:
        raise ModelFileError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens but config.json says vocab_size "
            f"{model_config.vocab_size:,}: they do not belong together"
        )
