"""Turn the recordings of some data into codes: look at the folder, list the records, find or fit the codec, encode."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.build.codec import codec_opener, fit_codec, fit_request, fitted_codec, is_fitted, named_codec
from erniekit.build.preflight import preflight
from erniekit.codecs.codec import Codec
from erniekit.codecs.workers import Skipped, read_sound
from erniekit.config import Config
from erniekit.config.sections.codes import part_of
from erniekit.data.media.code_shards import INDEX
from erniekit.data.media.codes_folder import (
    CODEC,
    ERRORS,
    FACTS,
    RECORDS,
    SKIPPED,
    TARS,
    UNITS,
    CodesFacts,
    read_facts,
    write_facts,
)
from erniekit.data.record_list import RecordList, data_identity, open_list, write_list
from erniekit.data.recording_facts import duration
from erniekit.errors import ConfigurationError, DataError, UserError
from erniekit.runners.code_blocks import WORK, CodesSummary, encode_blocks, reading_of
from erniekit.temp_folders import temp_folder

logger = logging.getLogger(__name__)

MOST_SHOWN = 20  # records that name no recording


def write_codes(config: Config, *, fits_only: bool = False) -> CodesSummary:
    """Write the codes of the recordings of a configuration into `output_dir`.

    Args:
        fits_only: only fit the codec, into `output_dir/codec`.

    Raises:
        UserError: the command cannot begin, or cannot go on; what is complete stays.
    """
    for line in (*config.messages, *preflight(config).notes):
        logger.info(line)
    if fits_only and not is_fitted(config):
        raise ConfigurationError(f"--fit: codec is {config.codes.codec}, and there is nothing to fit")
    part, parts = part_of(config.codes)
    folder = config.output_dir / f"part-{part}-of-{parts}" if parts > 1 else config.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    with _only_command_in(folder):
        known = read_facts(folder)
        request = _request(config)
        if known is not None and not fits_only:
            known = _checked_before(folder, known, request, config)
            if known is not None and known.complete:
                return _told_again(folder, known)
        elif known is None:
            _refuse_foreign(folder)
        records = _list(folder, config)
        codec_folder = _codec(config, records, request)
        if fits_only:
            records.close()
            if known is None:
                shutil.rmtree(folder / WORK)
            logger.info(f"the codec is in {codec_folder}; write codec: {codec_folder} to use it")
            return CodesSummary(0, 0)
        opener = codec_opener(codec_folder, config.codes.codec_levels, config.basic.device)
        facts = _facts(opener(), codec_folder, folder, request)
        if known is not None and known.fingerprint != facts.fingerprint:
            records.close()
            _remove_codes(folder, config, "codec", known)
            records = _list(folder, config)  # its files were among those
        _check_levels(config, facts)
        write_facts(folder, facts)
        return encode_blocks(folder, facts, records, opener, config)


@contextmanager
def _only_command_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, so that two commands do not write into it."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise DataError(f"{folder}: another `erniekit codes` is writing into this folder; wait for its end") from None
    try:
        yield
    finally:
        os.close(lock)


def _request(config: Config) -> dict[str, Any]:
    """Return what decides the content of the files, except the values of a codec that is there."""
    section = config.codes
    names = ["codes_format", "samples_per_shard", "codec_levels", "codes_part", "duration_range", "audio_peak"]
    names += ["min_num_shards"] if section.codes_format == "shards" else []
    values = {name: config[name] for name in names} | {"random_shuffle": config.training.random_shuffle}
    if config.training.random_shuffle:
        values["seed"] = config.training.seed
    values["train_dataset_path"] = data_identity(config.training.train_dataset_path, config.training.media_dir)
    if is_fitted(config):
        values |= fit_request(config)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _checked_before(folder: Path, known: CodesFacts, request: Mapping[str, Any], config: Config) -> CodesFacts | None:
    """Return what is known of a folder with codes; None where overwrite_output_dir has removed them."""
    differing = [name for name in {**request, **known.request} if request.get(name) != known.request.get(name)]
    if differing:
        _remove_codes(folder, config, ", ".join(sorted(differing)), known)
        return None
    if known.complete and config.basic.overwrite_output_dir:
        _remove_codes(folder, config, "", known)
        return None
    return known


def _remove_codes(folder: Path, config: Config, differing: str, known: CodesFacts) -> None:
    """Remove codes that overwrite_output_dir gives up; refuse where it does not."""
    if not config.basic.overwrite_output_dir:
        what = "" if known.complete else ", which are not complete,"
        raise ConfigurationError(
            f"output_dir: {folder} has codes{what} that were made with another {differing} (see {FACTS} there)\n"
            "  Set overwrite_output_dir: true to have them removed, or choose another output_dir."
        )
    logger.info(f"overwrite_output_dir: removing the codes in {folder}")
    for name in (FACTS, INDEX, UNITS, ERRORS, SKIPPED):
        (folder / name).unlink(missing_ok=True)
    for name in (TARS, RECORDS, WORK):
        shutil.rmtree(folder / name, ignore_errors=True)


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder whose files would be replaced, and that no command of ours has written."""
    found = [name for name in (INDEX, UNITS, ERRORS, TARS, RECORDS) if (folder / name).exists()]
    if found:
        raise ConfigurationError(
            f"output_dir: {folder} has {', '.join(found)} already, without {FACTS}; choose another output_dir"
        )


def _told_again(folder: Path, known: CodesFacts) -> CodesSummary:
    logger.info(
        f"{folder}: complete already, {known.recordings:,} recordings, {duration(known.seconds)} of sound; "
        "overwrite_output_dir: true encodes them again"
    )
    if known.errors:
        logger.error(f"error: recordings that could not be encoded: {known.errors:,}, see {folder / ERRORS}")
    return CodesSummary(known.recordings, known.errors)


# The records.


def _list(folder: Path, config: Config) -> RecordList:
    """Return the records of the data, listed now or before an interruption."""
    section = config.training
    identity = data_identity(section.train_dataset_path, section.media_dir)
    work = folder / WORK
    found = open_list(work, identity)
    if found is None:
        logger.info("listing the records ...")
        found = write_list(work, section.train_dataset_path, section.media_dir)
    for name in found.facts.left_out:
        logger.info(f"field {name!r} of records: left out, because JSON cannot hold its bytes")
    errors = f", {found.facts.errors:,} without one (see {ERRORS})" if found.facts.errors else ""
    logger.info(f"records: {len(found):,} with a recording{errors}")
    return found


def records_summary(config: Config) -> str:
    """List the records without encoding any; return their number, and the first of those that name no recording."""
    section = config.training
    with temp_folder("erniekit-records-") as folder:
        records = write_list(folder, section.train_dataset_path, section.media_dir)
        lines = [f"records: {len(records):,} with a recording"]
        if count := records.facts.errors:
            lines.append(f"{count:,} {'records name' if count > 1 else 'record names'} no recording:")
            with open(records.errors, encoding="utf-8") as file:
                shown = [json.loads(line) for line in islice(file, MOST_SHOWN)]
            lines += [f"  {error['place']}: {error['reason']}" for error in shown]
            lines += [f"  ... and {count - MOST_SHOWN:,} more"] * (count > MOST_SHOWN)
        records.close()
    return "\n".join(lines)


# The codec.


def _codec(config: Config, records: RecordList, request: Mapping[str, Any]) -> Path:
    """Return the folder of the codec, fitted now, before, or elsewhere."""
    if not is_fitted(config):
        return named_codec(config)
    folder = config.output_dir / CODEC
    asked = fit_request(config) | {"train_dataset_path": request["train_dataset_path"]}
    if fitted_codec(folder, asked, overwrite=config.basic.overwrite_output_dir):
        logger.info(f"codec: {folder}, which is fitted already")
        return folder.absolute()
    began = time.perf_counter()
    logger.info(f"fitting {config.codes.codec} on up to {duration(config.codes.codec_fit_seconds)} of sound ...")
    fit_codec(config, lambda rate: _sounds(records, config, rate), folder, asked)
    logger.info(f"codec: {folder}, fitted in {duration(time.perf_counter() - began)}")
    return folder.absolute()


def _sounds(records: RecordList, config: Config, sampling_rate: int) -> Iterator[np.ndarray]:
    """Yield the sound of all recordings in an order that the seed draws; encoding tells which cannot be read."""
    reading = reading_of(config)
    for number in np.random.default_rng(config.training.seed).permutation(len(records)):
        try:
            sound = read_sound(records[int(number)].clip, sampling_rate, reading)
        except UserError:
            continue
        if not isinstance(sound, Skipped):
            yield sound


def _facts(codec: Codec, codec_folder: Path, folder: Path, request: dict[str, Any]) -> CodesFacts:
    inside = codec_folder.parent == folder.absolute()
    return CodesFacts(
        codec_folder.name if inside else str(codec_folder),
        codec.fingerprint,
        codec.sampling_rate,
        codec.frame_rate,
        codec.levels,
        codec.codebook_size,
        request,
    )


def _check_levels(config: Config, facts: CodesFacts) -> None:
    if config.codes.codes_format == "jsonl" and facts.levels > 1:
        raise ConfigurationError(
            f"codes_format: jsonl has room for one level, and the codec has {facts.levels}; write codec_levels: 1"
        )
