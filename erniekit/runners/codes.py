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
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.build.codec import codec_opener, fit_codec, fit_request, fitted_codec, is_fitted, named_codec
from erniekit.build.preflight import preflight
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
    codec_folder,
    read_facts,
    write_facts,
)
from erniekit.data.media.errors import RecordingError
from erniekit.data.record_list import RecordList, data_identity, open_list, write_list
from erniekit.data.recording_facts import duration
from erniekit.errors import ConfigurationError, DataError
from erniekit.runners.code_blocks import WORK, CodesSummary, encode_blocks, reading_of, remove_notes
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
        if fits_only:
            return _fit(folder, config, request, known)
        if known is None:
            _refuse_foreign(folder)
        facts = None if is_fitted(config) else _facts(config, named_codec(config), folder, request)
        if known is not None:
            known = _checked_before(folder, known, facts, request, config)
            if known is not None and known.complete:
                return _told_again(folder, known)
        records = _list(folder, config)
        if facts is None:
            facts = _facts(config, _fitted(config, records, request), folder, request)
            if known is not None and known.fingerprint != facts.fingerprint:
                _remove_codes(folder, config, "codec", known)
        write_facts(folder, facts)
        opener = codec_opener(codec_folder(folder, facts), config.codes.codec_levels, config.basic.device)
        return encode_blocks(folder, facts, records, opener, config)


def _fit(folder: Path, config: Config, request: Mapping[str, Any], known: CodesFacts | None) -> CodesSummary:
    """Fit the codec, and leave what an interrupted command needs to go on."""
    records = _list(folder, config)
    fitted = _fitted(config, records, request)
    records.close()
    if known is None or known.complete:
        shutil.rmtree(folder / WORK)
    logger.info(f"the codec is in {fitted}; write codec: {fitted} to use it")
    return CodesSummary(0, 0)


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


def _checked_before(
    folder: Path, known: CodesFacts, facts: CodesFacts | None, request: Mapping[str, Any], config: Config
) -> CodesFacts | None:
    """Return what is known of a folder with codes; None where overwrite_output_dir has removed them.

    Args:
        facts: those that the codes would have now; None where the codec is still to be fitted.
    """
    differing = [name for name in {**request, **known.request} if request.get(name) != known.request.get(name)]
    if facts is not None and facts.fingerprint != known.fingerprint and not differing:
        differing = ["codec"]
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
    write_facts(folder, replace(known, complete=False))  # if this is killed, the next command removes the rest
    remove_notes(folder)
    for name in (INDEX, UNITS, ERRORS, SKIPPED):
        (folder / name).unlink(missing_ok=True)
    for name in (TARS, RECORDS):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / FACTS).unlink()


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder whose files would be replaced, and that no command of ours has written."""
    found = [name for name in (INDEX, UNITS, ERRORS, SKIPPED, TARS, RECORDS) if (folder / name).exists()]
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


def _fitted(config: Config, records: RecordList, request: Mapping[str, Any]) -> Path:
    """Return the folder of the codec that is fitted on the records, now or before."""
    folder = config.output_dir / CODEC
    asked = fit_request(config) | {"train_dataset_path": request["train_dataset_path"]}
    if fitted_codec(folder, asked, overwrite=config.basic.overwrite_output_dir):
        logger.info(f"codec: {folder}, which is fitted already")
        return folder.absolute()
    began = time.perf_counter()
    if config.codes.codec == "kmeans" and config.codes.codec_centroids:
        fit_codec(config, lambda rate: iter(()), folder, asked)
        logger.info(f"codec: {folder}, with the centroids of {config.codes.codec_centroids}")
        return folder.absolute()
    logger.info(f"fitting {config.codes.codec} on up to {duration(config.codes.codec_fit_seconds)} of sound ...")
    fit_codec(config, lambda rate: _sounds(records, config, rate), folder, asked)
    logger.info(f"codec: {folder}, fitted in {duration(time.perf_counter() - began)}")
    return folder.absolute()


def _sounds(records: RecordList, config: Config, sampling_rate: int) -> Iterator[np.ndarray]:
    """Yield the sound of all recordings in an order that the seed draws; encoding tells which cannot be read.

    Raises:
        DataError: none of them can, or all are shorter or longer than `duration_range`.
    """
    reading, heard, unfit = reading_of(config), False, ""
    for number in np.random.default_rng(config.training.seed).permutation(len(records)):
        record = records[int(number)]
        try:
            sound = read_sound(record.clip, sampling_rate, reading)
        except RecordingError as error:
            unfit = unfit or str(error)
            continue
        if isinstance(sound, Skipped):
            unfit = unfit or f"{record.place}: {sound.seconds:.3f} seconds, outside of duration_range"
            continue
        heard = True
        yield sound
    if not heard:
        raise DataError(f"there is no recording to fit a codec on; one of {len(records):,}: {unfit}")


def _facts(config: Config, source: Path, folder: Path, request: dict[str, Any]) -> CodesFacts:
    """Open the codec, and return the facts of codes that it makes."""
    codec = codec_opener(source, config.codes.codec_levels, config.basic.device)()
    if config.codes.codes_format == "jsonl" and codec.levels > 1:
        raise ConfigurationError(
            f"codes_format: jsonl has room for one level, and the codec has {codec.levels}; write codec_levels: 1"
        )
    return CodesFacts(
        source.name if source.parent == folder.absolute() else str(source),
        codec.fingerprint,
        codec.sampling_rate,
        codec.frame_rate,
        codec.levels,
        codec.codebook_size,
        request,
    )
