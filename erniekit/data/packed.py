"""A pre-packed folder: the samples of an epoch in training order, their rows, and a fingerprint of the settings.

`erniekit pack` writes it once; training replays it in order. It is written to a temporary folder and renamed, so it is
complete or absent. It contains the arrays of the token cache, the rows, and the file of each sample.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from erniekit.data.packing import Packs
from erniekit.data.recording_facts import RecordingFacts
from erniekit.data.templates.ernie import IGNORE_INDEX
from erniekit.data.token_cache import MANIFEST, TokenArrays, TokenWriter, open_arrays
from erniekit.errors import DataError
from erniekit.progress import Progress

if TYPE_CHECKING:
    from erniekit.data.dataset import Dataset

PACKED_VERSION = 1
ROWS, FILES = "rows.bin", "files.bin"
BLOCK_SAMPLES = 1000


@dataclass(frozen=True)
class DataFingerprint:
    """The settings on which a folder's tokens depend, and which a run that replays it must share.

    Attributes:
        tokenizer, template: fingerprints; the template's is None for plain texts.
        pairs: whether the samples are pairs (stage DPO).
        audio: of the model's audio encoder; "" where it has none.
        verdicts: whether the samples are answers with a verdict (stage KTO).
        scored: whether the answers of pairs are there as a whole, to be scored (stage RM).
    """

    tokenizer: str
    template: str | None
    pairs: bool
    audio: str = ""
    verdicts: bool = False
    scored: bool = False

    def stored(self) -> dict[str, Any]:
        """Return the values as the folder holds them; without those that are newer where they are empty."""
        return {
            name: value for name, value in asdict(self).items() if name not in ("audio", "verdicts", "scored") or value
        }


@dataclass(frozen=True, slots=True)
class PackedIndex:
    """The rows of a dataset that was read from a pre-packed folder.

    Attributes:
        packs: the rows (with batch_tokens: the micro-batches) in training order, as dataset indices.
        batch_tokens: of the micro-batches, if samples were grouped by length instead of packed; else 0.
        files: the names of the data files.
        file_of: int16[n], the file that each sample was read from.
    """

    packs: Packs
    batch_tokens: int
    files: tuple[str, ...]
    file_of: np.ndarray


def write_packed(
    target: Path, dataset: Dataset, packs: Packs, data_fingerprint: DataFingerprint, *, batch_tokens: int = 0
) -> None:
    """Write the rows of an epoch in order to the folder `target`.

    Raises:
        DataError: `target` is a file or a folder that is not empty, or it cannot be written.
    """
    check_empty_or_new(target)
    temp_dir = target.parent / f".{target.name}.{os.getpid()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temp_dir, ignore_errors=True)
        temp_dir.mkdir()
        _write(temp_dir, dataset, packs, data_fingerprint, batch_tokens)
        os.rename(temp_dir, target)
    except OSError as error:
        raise DataError(
            f"--output {target}: cannot be written: {error.strerror or error}\n"
            "  Make its parent folder writable, free some space, or name another folder."
        ) from None
    finally:
        shutil.rmtree(temp_dir, ignore_errors=True)


def check_empty_or_new(target: Path) -> None:
    """Raise DataError if `target` is a file, or a folder that is not empty."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise DataError(f"--output {target}: already exists\n  Remove it, or name another folder.")


def _write(folder: Path, dataset: Dataset, packs: Packs, data_fingerprint: DataFingerprint, batch_tokens: int) -> None:
    files = {
        ROWS: packs.starts.astype("<i8").tobytes(),
        FILES: dataset.source_of[packs.members].astype("<i2").tobytes(),
    }
    for name, data in files.items():
        with open(folder / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    writer = TokenWriter(folder)
    recordings = RecordingFacts(dataset.audio.sampling_rate if dataset.audio else 1)
    targets = repeated_prompts = 0
    packing = Progress("packing", len(packs.members), "samples")
    try:
        for start in range(0, len(packs.members), BLOCK_SAMPLES):
            members = [int(index) for index in packs.members[start : start + BLOCK_SAMPLES]]
            samples = [dataset.sample(index) for index in members]
            targets += sum(int(np.count_nonzero(sample.labels != IGNORE_INDEX)) for sample in samples)
            repeated_prompts += sum(len(sample.documents) for sample in samples if sample.pair is not None)
            recordings.add([clip for sample in samples for clip in sample.clips])
            writer.append(samples, [dataset.line(index) for index in members])
            packing.advance(len(members))
        counts = {"read": len(packs.members), "dropped": 0, "long_prompts": 0, "truncated": 0, "split": 0}
        writer.finish(
            {
                "packed": PACKED_VERSION,
                "maker": data_fingerprint.stored(),
                "batch_tokens": batch_tokens,
                "files": [str(source.path) for source in dataset.sources],
                "crc32": {name: zlib.crc32(data) for name, data in files.items()},
                "counts": {**counts, "targets": targets, "repeated_prompts": repeated_prompts},
                "unused_fields": [],
                **recordings.metadata(),
            }
        )
    finally:
        packing.close()
        writer.close()


def open_packed(folder: Path, data_fingerprint: DataFingerprint, max_seq_len: int) -> tuple[TokenArrays, PackedIndex]:
    """Open the samples and rows of a folder.

    Raises:
        DataError: the folder is not a complete one of `erniekit pack`, was made with another tokenizer, template or
            stage, or has rows longer than `max_seq_len`.
    """
    metadata = _read_metadata(folder)
    arrays = open_arrays(folder)
    if arrays is None:
        raise DataError(f"{folder}: files are missing or damaged\n  Write the folder again with `erniekit pack`.")
    rows, file_of = (_checked(folder / name, metadata["crc32"].get(name), kind) for name, kind in _EXTRA.items())
    if not len(rows) or rows[-1] != len(file_of) or len(file_of) != len(arrays.lines):
        raise DataError(f"{folder}: its files do not match each other\n  Write the folder again with `erniekit pack`.")
    _check_data_fingerprint(folder, metadata["maker"], asdict(data_fingerprint))
    packed = PackedIndex(
        Packs(np.arange(len(file_of)), rows), int(metadata["batch_tokens"]), tuple(map(str, metadata["files"])), file_of
    )
    if not packed.batch_tokens:
        longest = int(np.diff(arrays.offsets[rows]).max())
    else:
        longest = int(np.diff(arrays.offsets).max())
    if longest > max_seq_len:
        raise DataError(
            f"{folder}: has rows of {longest:,} tokens, more than max_seq_len {max_seq_len:,}\n"
            f"  Set max_seq_len: {longest} or more, or pack the data again."
        )
    return arrays, packed


_EXTRA = {ROWS: "<i8", FILES: "<i2"}
_KEYS = ("maker", "batch_tokens", "files", "crc32", "counts", "unused_fields")


def _read_metadata(folder: Path) -> dict[str, Any]:
    try:
        metadata = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["facts"]
        version = metadata["packed"]
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(
            f"{folder}: is not a folder that `erniekit pack` wrote (train_dataset_type is packed)\n"
            "  Write it with `erniekit pack CONFIG --output DIR`, or give the format of the file."
        ) from None
    if version != PACKED_VERSION or not all(key in metadata for key in _KEYS):
        raise DataError(f"{folder}: was packed by another version of ERNIEKit\n  Pack the data again.")
    return dict(metadata)


def _checked(path: Path, checksum: int | None, kind: str) -> np.ndarray:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    if zlib.crc32(data) != checksum:
        raise DataError(f"{path}: is damaged\n  Write the folder again with `erniekit pack`.")
    return np.frombuffer(data, kind).astype(np.int64 if kind == "<i8" else np.int16)


_CONTENTS = (  # what the flags of a fingerprint say, and which stage reads it
    ("verdicts", "answers with a verdict", "KTO"),
    ("scored", "pairs to be scored", "RM"),
    ("pairs", "pairs", "DPO"),
)


def _check_data_fingerprint(folder: Path, stored: dict[str, Any], expected: dict[str, Any]) -> None:
    different = [name for name, value in expected.items() if (stored.get(name) or None) != (value or None)]
    if not different:
        return
    for field, contents, stage in _CONTENTS:
        if field not in different:
            continue
        what = f"{contents}, which only stage {stage} reads"
        if not stored.get(field):
            what = f"no {contents}, which stage {stage} needs"
        raise DataError(f"{folder}: contains {what}\n  Change `stage`, or pack the data of this stage.")
    name = {"tokenizer": "tokenizer", "template": "chat template", "audio": "audio encoder"}[different[0]]
    raise DataError(
        f"{folder}: was packed with another {name} than model_name_or_path has\n"
        "  Use the model that it was packed for, or pack the data again with `erniekit pack`."
    )
