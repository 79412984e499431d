"""Decide which parts of a model a run trains: the audio encoder, the projector, the decoder (`freeze_config`).

Needs neither Paddle nor NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from erniekit.config import Config
from erniekit.errors import ConfigurationError
from erniekit.model.architectures.parts import (
    ALIGNER,
    AUDIO,
    LLM,
    PART_NAMES,
    VISION,
    named_parts,
    part_name,
    part_of,
    part_sizes,
    parts_of,
    trainable_shapes,
)
from erniekit.model.lora.config import LoraSettings, adapter_shapes

if TYPE_CHECKING:
    from erniekit.model.architectures.architecture import Architecture
    from erniekit.model.architectures.model_config import ModelConfig

FROZEN_BY = {AUDIO: "freeze_audio", ALIGNER: "freeze_aligner", LLM: "freeze_llm", VISION: "freeze_vision"}


def frozen_parts(config: Config, model_config: ModelConfig) -> frozenset[str]:
    """Return the parts that `freeze_config` names; none for a command that does not train.

    Raises:
        ConfigurationError: the model has no such part, or nothing would be left to train.
    """
    if not config.basic.do_train:
        return frozenset()
    own, frozen = parts_of(model_config.architecture), _named(config)
    origin = config.origin("freeze_config")
    missing = [part for part in FROZEN_BY if part in frozen and part not in own]
    if missing:
        words, absent = (", ".join(of[part] for part in missing) for of in (FROZEN_BY, PART_NAMES))
        there = ", ".join(FROZEN_BY[part] for part in own)
        raise ConfigurationError(
            f"{origin}: `freeze_config`: {words}: {model_config.model_type} has no {absent}.\n"
            f"  Remove the word; of this model {there} can be frozen."
        )
    if frozen.issuperset(own):
        raise ConfigurationError(
            f"{origin}: `freeze_config`: {' '.join(FROZEN_BY[part] for part in own)} leaves nothing to train: these "
            f"are all parts of {model_config.model_type}.\n  Remove one of the words."
        )
    return frozen


def refuse_adapters_of_frozen_parts(
    config: Config, model_config: ModelConfig, paths: Iterable[str], *, named: bool, folder: object = None
) -> None:
    """Check that no adapter stands in a part that `freeze_config` names.

    Args:
        paths: of the linear layers with adapters.
        named: whether `lora_target_modules` names them; otherwise they are the default, all of the decoder.
        folder: the adapters that the run starts from; None: they are new.

    Raises:
        ConfigurationError: one does.
    """
    frozen = frozen_parts(config, model_config)
    wrong = {part for path in paths if (part := part_of(model_config.architecture, path)) in frozen}
    if not wrong:
        return
    words = " ".join(FROZEN_BY[part] for part in FROZEN_BY if part in wrong)
    origin = f"{config.origin('freeze_config')}: `freeze_config`: {words}"
    if folder is not None:
        raise ConfigurationError(f"{origin}: the adapters in {folder} stand in {named_parts(wrong)}.\n  Remove it.")
    if named:
        raise ConfigurationError(
            f"{origin} contradicts lora_target_modules, which puts adapters into {named_parts(wrong)}.\n"
            "  Remove one of the two."
        )
    towers = " ".join(tower.prefix.rstrip(".") for tower in model_config.architecture.towers)
    raise ConfigurationError(
        f"{origin} leaves no adapter: without lora_target_modules they stand in the decoder.\n  Remove it"
        + (f", or name the other layers, for example lora_target_modules: {towers}." if towers else ".")
    )


def part_notes(config: Config, model_config: ModelConfig, adapters: LoraSettings | None) -> list[str]:
    """Return lines that say which parts are trained, and which values have no effect on this model.

    Args:
        adapters: the settings of the adapters that the run trains; None: it trains weights.
    """
    if not config.basic.do_train:
        return []
    architecture, lines = model_config.architecture, []
    if AUDIO not in parts_of(architecture):
        if config.training.audio_lr_ratio != 1:
            why = f"{model_config.model_type} has no audio encoder"
            lines.append(f"`audio_lr_ratio: {config.training.audio_lr_ratio:g}` has no effect: {why}")
        return lines
    frozen = _named(config)
    sizes = part_sizes(architecture, model_config.weight_shapes())
    if adapters is None:
        trained = part_sizes(architecture, trainable_shapes(model_config, frozen))
        kept = {part: size for part, size in sizes.items() if part in frozen}
        lines.append(f"trained: {_sized(architecture, trained)}; frozen: {_sized(architecture, kept)}")
    else:
        trained = part_sizes(architecture, adapter_shapes(model_config, adapters))
        lines.append(f"trained: adapters of {_sized(architecture, trained)}; frozen: {_sized(architecture, sizes)}")
        if frozen:
            word = " ".join(config.training.freeze_config)
            lines.append(f"`freeze_config: {word}` changes nothing: `lora: true` freezes all weights")
    if AUDIO not in trained and config.training.audio_lr_ratio != 1:
        why = f"nothing of the {part_name(architecture, AUDIO)} is trained"
        lines.append(f"`audio_lr_ratio: {config.training.audio_lr_ratio:g}` has no effect: {why}")
    return lines


def relative_learning_rates(
    config: Config, model_config: ModelConfig, adapters: LoraSettings | None
) -> dict[str, float]:
    """Return the further learning rates that logs show, as multiples of `learning_rate`, by their name in a record."""
    architecture, ratio = model_config.architecture, config.training.audio_lr_ratio
    shapes = adapter_shapes(model_config, adapters) if adapters else trainable_shapes(model_config, _named(config))
    trained = part_sizes(architecture, shapes)
    return {"audio_learning_rate": ratio} if AUDIO in trained and ratio != 1 else {}


def _named(config: Config) -> frozenset[str]:
    return frozenset(part for part, word in FROZEN_BY.items() if word in config.training.freeze_config)


def _sized(architecture: Architecture, sizes: dict[str, int]) -> str:
    return (
        ", ".join(f"{part_name(architecture, part)} ({size:,} parameters)" for part, size in sizes.items()) or "nothing"
    )
