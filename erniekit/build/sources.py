"""Which files a run reads, as sources: their formats, weights and parts."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from pathlib import Path

from erniekit.config import Config
from erniekit.data.conversation import Source
from erniekit.data.formats.preference import preference_kind
from erniekit.data.formats.registry import FORMATS, looks_like_ids, recognise
from erniekit.data.formats.token_ids import TOKEN_IDS
from erniekit.data.formats.verdicts import verdict_kind
from erniekit.data.split import Split

logger = logging.getLogger(__name__)


def training_sources(config: Config) -> list[Source]:
    """Return the training files as sources, without the records that `eval_split` holds out."""
    return _training_files(config, held_out=False)


def _training_files(config: Config, *, held_out: bool) -> list[Source]:
    section, fraction = config.training, config.evaluation.eval_split
    sources = _sources(
        config, "train_dataset_type", section.train_dataset_path, section.train_dataset_type, section.train_dataset_prob
    )
    split = Split(fraction, section.seed, held_out) if fraction else None
    return [replace(source, split=split) for source in sources]


def evaluation_sources(config: Config) -> list[Source]:
    """Return the held-out files as sources, or what `eval_split` holds out of the training files."""
    section = config.evaluation
    if section.eval_split:
        return _training_files(config, held_out=True)
    return _sources(
        config, "eval_dataset_type", section.eval_dataset_path, section.eval_dataset_type, section.eval_dataset_prob
    )


def _sources(
    config: Config,
    type_parameter: str,
    paths: tuple[str, ...],
    kinds: tuple[str, ...],
    probabilities: tuple[float, ...],
) -> list[Source]:
    """Return files as sources. Where the user has not set `type_parameter`, their formats are recognised."""
    if not paths:  # formats and probabilities then have their default of one item
        return []
    if config.stage.reads_pairs:
        kinds = tuple(preference_kind(kind) for kind in kinds)
    if config.stage.reads_verdicts:
        kinds = tuple(verdict_kind(kind) for kind in kinds)
    sources = [
        Source(Path(path).expanduser(), kind, probability, type_parameter, config.training.media_dir)
        for path, kind, probability in zip(paths, kinds, probabilities, strict=True)
    ]
    return sources if config.is_set(type_parameter) else [_recognised(source) for source in sources]


def _recognised(source: Source) -> Source:
    """Return a source with the format that its records have, if that is certain; what else they are, reading tells."""
    found = recognise(source.path, source.kind)
    if not isinstance(found, str) or found == source.kind:
        if source.kind == "text" and looks_like_ids(source.path):
            _tell_of_ids(source.path, source.type_parameter)
        return source
    _tell_format(source.path, found, source.type_parameter)
    return replace(source, kind=found)


@cache
def _tell_of_ids(path: Path, type_parameter: str) -> None:
    logger.warning(f"{path}: read as a text of numbers; if they are token ids, write {type_parameter}: {TOKEN_IDS}")


@cache  # the sources of a run are asked for several times
def _tell_format(path: Path, kind: str, type_parameter: str) -> None:
    form = FORMATS[kind]
    logger.info(f"{path}: read as {form.title}, which its records look like; to say so, {type_parameter}: {form.name}")
