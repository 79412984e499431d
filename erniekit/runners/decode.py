"""Turn codes back into sound: a wav file for each recording, named by its id."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from erniekit.build.codec import codec_opener
from erniekit.codecs.codec import Codec
from erniekit.data.formats.files import read_values
from erniekit.data.formats.problems import RecordProblem
from erniekit.data.media.code_shard_reader import read_shards
from erniekit.data.media.code_shards import CodedRecording, shard_key
from erniekit.data.media.codes_folder import FACTS, UNITS, CodesFacts, codec_folder, read_facts
from erniekit.data.media.errors import INSTALL
from erniekit.data.recording_facts import duration
from erniekit.errors import ConfigurationError, DataError, UserError

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0  # between two lines of progress


def decode_codes(source: Path, output: Path, codec: Path | None = None, *, device: str = "auto") -> int:
    """Write the sound of codes into `output`; wav files that are there already stay as they are.

    Args:
        source: a folder that `erniekit codes` wrote, or its parts; `data.lst`, a tar shard or `units.jsonl` of one.
        codec: the folder of the codec; None: the one that `codes.json` names.

    Returns:
        The number of recordings that cannot be decoded, each of which is told.

    Raises:
        UserError: there are no codes, or the codec is not the one that they were made with or has no decoder.
    """
    if not source.exists():
        raise DataError(f"--decode: {source} does not exist")
    home, facts = _facts_of(source)
    opened = _open(home, facts, codec, device)
    output.mkdir(parents=True, exist_ok=True)
    began = told = time.perf_counter()
    written, present, failed, seconds = 0, 0, 0, 0.0
    for item in _coded(source, facts):
        target = output / f"{item.key.replace('/', '%2F')}.wav" if isinstance(item, CodedRecording) else None
        if target is not None and target.exists():
            present += 1
            continue
        reason = str(item) if target is None else ""
        if isinstance(item, CodedRecording) and target is not None:
            try:
                sound = opened.decode(item.codes)
                _write_wav(target, sound, opened.sampling_rate)
                written, seconds = written + 1, seconds + len(sound) / opened.sampling_rate
            except DataError as error:
                reason = f"{item.key}: {error}"
        if reason:
            failed += 1
            logger.error(f"error: {reason}")
        if (now := time.perf_counter()) - told > LINE_SECONDS:
            told = now
            logger.info(f"{written:,} recordings, {seconds / (now - began):,.1f} x real time")
    took = time.perf_counter() - began
    there = f"; {present:,} are there already and stay as they are" if present else ""
    speed = f" in {duration(took)}, {seconds / took:,.1f} x real time" if written else ""
    logger.info(f"decoded {written:,} recordings, {duration(seconds)} of sound{speed} -> {output}{there}")
    return failed


def _facts_of(source: Path) -> tuple[Path, CodesFacts]:
    """Return the folder with `codes.json`, and what it says; parts of several machines have to agree."""
    here = source if source.is_dir() else source.parent
    found = [(folder, read_facts(folder)) for folder in (here, here.parent, *sorted(here.glob("part-*")))]
    known = [(folder, facts) for folder, facts in found if facts is not None]
    if not known:
        raise DataError(f"--decode: there is no {FACTS} in {here}, which says of which codec the codes are")
    prints = {facts.fingerprint for _, facts in known}
    if len(prints) > 1:
        folders = ", ".join(str(folder) for folder, _ in known)
        raise DataError(f"--decode: the codes are of different codecs: {folders}; decode one folder at a time")
    return known[0]


def _open(home: Path, facts: CodesFacts, codec: Path | None, device: str) -> Codec:
    folder = codec or codec_folder(home, facts)
    if not folder.is_dir():
        raise DataError(f"{home / FACTS}: the codec {folder} does not exist; name its folder with --codec DIR")
    opened = codec_opener(folder, facts.levels, device)()
    if opened.fingerprint != facts.fingerprint:
        raise ConfigurationError(
            f"{folder}: this is not the codec of the codes in {home}: its fingerprint is {opened.fingerprint[:16]}, "
            f"and theirs {facts.fingerprint[:16]}. Name the folder of the right one with --codec DIR"
        )
    if not opened.can_decode:
        raise ConfigurationError(f"{folder}: this codec gives units only: it has no decoder, so they become no sound")
    return opened


def _coded(source: Path, facts: CodesFacts) -> Iterator[CodedRecording | object]:
    """Yield the codes of a source, and the problems of what cannot be read."""
    units = source / UNITS if source.is_dir() and facts.request.get("codes_format") == "jsonl" else source
    if units.suffix != ".jsonl":
        yield from read_shards(source, levels=facts.levels, codebook_size=facts.codebook_size)
        return
    if not units.exists():
        raise UserError(f"--decode: {units} does not exist: run `erniekit codes` again, it continues")
    for item in read_values(units):
        if isinstance(item, RecordProblem):
            yield item
            continue
        line, record = item
        held = record.get("units") if isinstance(record, dict) else None
        integers = isinstance(held, list) and held and all(type(unit) is int for unit in held)
        if not isinstance(record, dict) or not isinstance(record.get("id"), str) or not integers:
            expected = "a record with an id and a list of integers"
            yield RecordProblem(str(units), line, "units", expected, "something else")
            continue
        yield CodedRecording(shard_key(record["id"]), np.array([held], np.int64), record)


def _write_wav(target: Path, sound: np.ndarray, sampling_rate: int) -> None:
    """Write 16-bit samples, complete or not at all."""
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise DataError(f"to write wav files, install soundfile ({INSTALL}): {error}") from None
    temp_path = target.with_name(f".{target.name}.partial")
    soundfile.write(temp_path, sound, sampling_rate, subtype="PCM_16", format="WAV")
    os.replace(temp_path, target)
