"""Turn codes back into sound: a wav file for each recording, named by its id."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np

from erniekit.build.codec import codec_opener
from erniekit.codecs.codec import Codec
from erniekit.data.formats.files import read_values
from erniekit.data.formats.problems import RecordProblem, describe_value
from erniekit.data.media.code_shard_reader import read_shards
from erniekit.data.media.code_shards import LONGEST_KEY, CodedRecording, shard_key, write_whole
from erniekit.data.media.codes_folder import FACTS, UNITS, CodesFacts, codec_folder, read_facts
from erniekit.data.media.errors import INSTALL
from erniekit.data.recording_facts import duration
from erniekit.errors import ConfigurationError, DataError
from erniekit.progress import progress

logger = logging.getLogger(__name__)

_MOST = 2**31 - 1  # that an array of units takes; the codec tells which of them is none of its own


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
    began = time.perf_counter()
    written, present, failed, seconds = 0, 0, 0, 0.0
    names: set[str] = set()
    for item in progress(_coded(source, facts), "decoding", unit="recordings"):
        try:
            if not isinstance(item, CodedRecording):
                raise DataError(str(item))
            target = output / _wav_name(item.key, names)
            if target.exists():
                present += 1
                continue
            sound = opened.decode(item.codes)
            _write_wav(target, sound, opened.sampling_rate)
            written, seconds = written + 1, seconds + len(sound) / opened.sampling_rate
        except DataError as error:
            failed += 1
            place = f"{item.key[:LONGEST_KEY]}: " if isinstance(item, CodedRecording) else ""
            logger.error(f"error: {place}{error}")
    took = time.perf_counter() - began
    there = f"; {present:,} are there already and stay as they are" if present else ""
    speed = f" in {duration(took)}, {seconds / took:,.1f} x real time" if written else ""
    logger.info(f"decoded {written:,} recordings, {duration(seconds)} of sound{speed} -> {output}{there}")
    return failed


def _facts_of(source: Path) -> tuple[Path, CodesFacts]:
    """Return the folder with `codes.json`, and what it says; parts of several machines have to agree.

    It is the folder of the source, or that of its parts; the tar file of a shard lies in a folder below.
    """
    here = source if source.is_dir() else source.parent
    places = [[here], sorted(here.glob("part-*")), [here.parent] if source.suffix == ".tar" else []]
    holders = next((held for held in places if any((folder / FACTS).is_file() for folder in held)), [])
    found = [(folder, read_facts(folder)) for folder in holders]
    known = [(folder, facts) for folder, facts in found if facts is not None]
    if not known:
        raise DataError(f"--decode: there is no {FACTS} in {here}, which says of which codec the codes are")
    for folder, facts in known:
        if not facts.complete:
            logger.info(f"{folder}: these codes are not complete yet: `erniekit codes` has not ended")
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
    if source.is_dir() and facts.request.get("codes_format") == "jsonl":
        files = [source / UNITS] if (source / UNITS).exists() else sorted(source.glob(f"part-*/{UNITS}"))
        if not files:
            why = "no recording has been encoded" if facts.complete else "run `erniekit codes` again, it continues"
            raise DataError(f"--decode: {source / UNITS} does not exist: {why}")
        for file in files:
            yield from _units_of(file)
    elif source.suffix == ".jsonl":
        yield from _units_of(source)
    else:
        yield from read_shards(source, levels=facts.levels, codebook_size=facts.codebook_size)


def _units_of(path: Path) -> Iterator[CodedRecording | RecordProblem]:
    """Yield the codes of a file of units, and the problems of its lines."""
    for item in read_values(path):
        if isinstance(item, RecordProblem):
            yield item
            continue
        line, value = item
        record = value if isinstance(value, dict) else {}
        name, held = record.get("id"), record.get("units")
        if not isinstance(name, str) or not name:
            yield RecordProblem(str(path), line, "id", "a text", describe_value(name))
        elif not isinstance(held, list) or not held or any(type(unit) is not int or abs(unit) > _MOST for unit in held):
            yield RecordProblem(str(path), line, "units", "a list of integers", describe_value(held))
        else:
            yield CodedRecording(shard_key(name), np.array([held], np.int64), record)


def _wav_name(key: str, names: set[str]) -> str:
    """Return the name of the file of a recording, and add it to those that there are.

    Raises:
        DataError: another recording has it, or it is too long; those of others have keys of any kind.
    """
    name = f"{key.replace('/', '%2F')}.wav"
    if len(os.fsencode(name)) > LONGEST_KEY + len(".wav"):
        raise DataError(f"expected a key of at most {LONGEST_KEY} bytes, which names the wav file")
    if name in names:
        raise DataError(f"expected a key that no other recording has: another one is {name} already")
    names.add(name)
    return name


def _write_wav(target: Path, sound: np.ndarray, sampling_rate: int) -> None:
    """Write 16-bit samples, complete or not at all."""
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise DataError(f"to write wav files, install soundfile ({INSTALL}): {error}") from None
    content = BytesIO()
    soundfile.write(content, sound, sampling_rate, subtype="PCM_16", format="WAV")
    write_whole(target, content.getbuffer())
