"""What is wrong with a recording, told with its place."""

from __future__ import annotations

from erniekit.data.media.clip import Clip
from erniekit.errors import DataError

INSTALL = "pip install 'erniekit[audio]'"


class RecordingError(DataError):
    """A recording cannot be read, or its sound cannot be what it is taken for.

    Attributes:
        expected, got: as those of a RecordProblem, to tell them with the line of the record.
    """

    def __init__(self, clip: Clip, expected: str, got: str) -> None:
        super().__init__(f"{describe_clip(clip)}: expected {expected}, got {got}")
        self.expected = expected
        self.got = got


def describe_clip(clip: Clip) -> str:
    """Return where the sound is: the file, the row of a Parquet file (from 1, as in other messages), the seconds."""
    place = clip.path if clip.row < 0 else f"{clip.path}:{clip.row + 1} ({clip.column})"
    if clip.end is not None:
        return f"{place} from {clip.start:g} s to {clip.end:g} s"
    return f"{place} from {clip.start:g} s" if clip.start else place
