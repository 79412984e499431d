"""The folder of codes: its files, and `codes.json`, which says of which codec the codes are."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erniekit.errors import DataError

if TYPE_CHECKING:
    from erniekit.data.media.code_shards import Shard

FACTS, UNITS, ERRORS, SKIPPED = "codes.json", "units.jsonl", "errors.jsonl", "skipped.jsonl"
TARS, RECORDS = "audios", "txts"  # the folders of the two files of shards, named as OmniVoice names them
CODEC = "codec"  # the folder of a codec that was fitted for these codes
FORMAT = 1
_KINDS: dict[str, type | tuple[type, ...]] = {
    "codec": str, "fingerprint": str, "sampling_rate": int, "frame_rate": (int, float), "levels": int,
    "codebook_size": int, "request": dict, "complete": bool, "recordings": int, "seconds": (int, float),
    "errors": int, "skipped": int,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CodesFacts:
    """What `codes.json` says.

    Attributes:
        codec: its folder; relative to the folder of the codes where it is in it.
        fingerprint, sampling_rate, frame_rate, levels, codebook_size: as those of a `Codec`.
        request: what the command was asked for, as far as it changes what is written.
        complete: whether the command has ended.
        recordings, seconds, errors, skipped: of a complete one.
    """

    codec: str
    fingerprint: str
    sampling_rate: int
    frame_rate: float
    levels: int
    codebook_size: int
    request: dict[str, Any]
    complete: bool = False
    recordings: int = 0
    seconds: float = 0.0
    errors: int = 0
    skipped: int = 0
    format: int = FORMAT


def shard_files(folder: Path, number: int) -> Shard:
    """Return the files of a shard, from 0."""
    from erniekit.data.media.code_shards import Shard  # which imports NumPy

    return Shard(folder / TARS / f"shard-{number:06d}.tar", folder / RECORDS / f"shard-{number:06d}.jsonl")


def write_facts(folder: Path, facts: CodesFacts) -> None:
    """Write `codes.json`, complete or not at all."""
    from erniekit.data.media.code_shards import write_whole

    write_whole(folder / FACTS, json.dumps(asdict(facts), indent=2).encode() + b"\n")


def read_facts(folder: Path) -> CodesFacts | None:
    """Return what `codes.json` says; None if the folder has none.

    Raises:
        DataError: it is damaged, or of another version.
    """
    path = folder / FACTS
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r}, and this version reads {FORMAT}")
        wrong = [name for name, kind in _KINDS.items() if not isinstance(values[name], kind)]
        if wrong:
            raise ValueError(f"{wrong[0]} is {str(values[wrong[0]])[:60]!r}")
        return CodesFacts(**values)
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise DataError(f"{path}: expected what `erniekit codes` writes, got another file ({error})") from None


def codec_folder(folder: Path, facts: CodesFacts) -> Path:
    """Return the folder of the codec of some codes."""
    return folder / Path(facts.codec).expanduser()
