"""What the token cache records of files of alignments: their paths, sizes and times, to see whether they changed."""

from __future__ import annotations

import json
from pathlib import Path

from erniekit.data.recording_facts import FileStamps
from erniekit.data.token_cache import Metadata

ALIGNMENTS = "alignments"  # the entry of the metadata; only data with such files has it
LIST_FILE = "alignments.jsonl"


class AlignmentFiles:
    """Takes the paths of the files that records are read with, in their order."""

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}

    def add(self, path: str) -> None:
        self._paths[path] = None

    def write(self, folder: Path) -> Metadata:
        """Write the paths into a folder of the token cache; return the entry for its metadata, empty without files."""
        if not self._paths:
            return {}
        stamps = FileStamps()
        with open(folder / LIST_FILE, "w", encoding="utf-8", errors="surrogateescape") as file:
            for path in self._paths:
                file.write(json.dumps(path) + "\n")
                stamps.add(path)
        return {ALIGNMENTS: stamps.hexdigest()}


def alignments_unchanged(folder: Path, metadata: Metadata) -> bool:
    """Return whether all files have the size and the time of when the folder was built."""
    if ALIGNMENTS not in metadata:
        return True
    stamps = FileStamps()
    try:
        with open(folder / LIST_FILE, encoding="utf-8") as file:
            for line in file:
                stamps.add(json.loads(line))
    except (OSError, ValueError):
        return False
    return stamps.hexdigest() == metadata[ALIGNMENTS]
