"""What a model folder says of the texts that it speaks: `speech.json`.

A run writes it into its output_dir, an export into the folder that is passed on, which has no parameters of a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from erniekit.data.speech_text import FRONTENDS, TOKENIZER
from erniekit.errors import DataError

TEXT_READING_FILE = "speech.json"


class Pace(NamedTuple):
    """How long data takes to say a text: `seconds_besides` + letters * `seconds_per_letter` + what its letters take
    more or less than that.

    Attributes:
        letters: such seconds of each lower-case character that stands often enough in the data; others have none.
    """

    seconds_per_letter: float
    seconds_besides: float = 0.0
    letters: Mapping[str, float] = MappingProxyType({})


class TextReading(NamedTuple):
    """How a model reads texts, and how fast its data is spoken.

    Attributes:
        frontend: a value of `text_frontend`.
        pace: as `inference.speaking.pace.measured_pace`; None: unknown.
        tells_language: whether the model has been told the language of its texts (`language_probability`).
        longest_prompt: in seconds (`prompt_seconds`), of what it continued; None: unknown, or nothing.
    """

    frontend: str = TOKENIZER
    pace: Pace | None = None
    tells_language: bool = True
    longest_prompt: float | None = None


def write_text_reading(folder: Path, reading: TextReading) -> None:
    """Write the file into a folder."""
    content = {
        "text_frontend": reading.frontend,
        "pace": reading.pace and reading.pace._asdict() | {"letters": dict(reading.pace.letters)},
        "tells_language": reading.tells_language,
        "longest_prompt": reading.longest_prompt,
    }
    (folder / TEXT_READING_FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_text_reading(folders: Sequence[Path]) -> TextReading | None:
    """Return what the first folder with such a file says; None: none has one.

    Raises:
        DataError: the file is damaged.
    """
    path = next((folder / TEXT_READING_FILE for folder in folders if (folder / TEXT_READING_FILE).is_file()), None)
    if path is None:
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        frontend, pace, tells = (values[name] for name in ("text_frontend", "pace", "tells_language"))
        if frontend not in FRONTENDS:
            raise ValueError(f"text_frontend is {frontend!r:.60}")
        if pace is not None:
            pace = Pace(**pace)
            seconds = [*pace[:2], *pace.letters.values()]
            if not (all(isinstance(each, float) for each in seconds) and 0 < pace[0] < 100 and 0 <= pace[1] < 100):
                raise ValueError(f"pace is {pace!r:.90}")
        if not isinstance(tells, bool):
            raise ValueError(f"tells_language is {tells!r:.60}")
        longest = values.get("longest_prompt")  # files of earlier versions have none
        if longest is not None and not (isinstance(longest, float) and longest > 0):
            raise ValueError(f"longest_prompt is {longest!r:.60}")
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path}: expected text_frontend, one of {', '.join(FRONTENDS)}, pace, null or seconds_per_letter, "
            "seconds_besides and letters, tells_language, true or false, and longest_prompt, null or seconds: "
            f"{error}; put the file of the training back"
        ) from None
    return TextReading(frontend, pace, tells, longest)


def text_reading_of(run: Mapping[str, Any], folders: Sequence[Path]) -> TextReading | None:
    """Return how a model reads texts by the parameters of its run, else by the first folder that says so; None: neither
    does, as of a model that others have trained.

    Args:
        run: empty if they are unknown.

    Raises:
        DataError: the file of a folder is damaged.
    """
    found = read_text_reading(folders)
    if not run:
        return found
    found = found or TextReading()
    return found._replace(
        frontend=str(run.get("text_frontend") or found.frontend),
        tells_language=float(run.get("language_probability", found.tells_language)) > 0,
    )
