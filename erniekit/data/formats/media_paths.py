"""Find the files of the recordings that a record names. They must lie below the folders of `media_dir`."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from erniekit.data.conversation import Conversation, Preference
from erniekit.data.formats.format import Record
from erniekit.data.formats.problems import MalformedError, shorten
from erniekit.data.media.clip import Clip
from erniekit.errors import DataError


def media_folders(path: str | Path, media_dir: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the folders below which the recordings of a data file lie, without symbolic links.

    Args:
        path: of the data file, whose folder it is by default.
        media_dir: the folders that the user has set.

    Raises:
        DataError: one of these is no folder.
    """
    for folder in media_dir:
        if not os.path.isdir(os.path.expanduser(folder)):
            here = f"paths are relative to the current folder, {os.getcwd()}"
            raise DataError(f"media_dir: expected folders that exist, got {shorten(folder, 100)} ({here})")
    return tuple(os.path.realpath(os.path.expanduser(folder)) for folder in media_dir or (os.path.dirname(path),))


def locate_clips(record: Record, value: dict, folders: Sequence[str]) -> Record:
    """Return a record whose clips have absolute paths of files that exist.

    Nothing is opened: the file is looked up, and reading it tells what is wrong with its sound.

    Args:
        value: what the record was parsed from, in which a problem names the field.
        folders: a relative path belongs to the first of them that has such a file.

    Raises:
        MalformedError: a path leaves the folders, or is not that of a file.
    """
    if isinstance(record, Preference):
        return replace(record, prompt=_located(record.prompt, value, folders)) if record.prompt.clips else record
    return _located(record, value, folders) if isinstance(record, Conversation) and record.clips else record


def _located(dialogue: Conversation, value: dict, folders: Sequence[str]) -> Conversation:
    turns = [
        replace(turn, clips=tuple(found._replace(clip=locate_clip(found.clip, value, folders)) for found in turn.clips))
        for turn in dialogue.turns
    ]
    return replace(dialogue, turns=tuple(turns))


def locate_clip(clip: Clip, value: dict, folders: Sequence[str]) -> Clip:
    """Return a clip with the absolute path of a file that exists; the arguments are those of `locate_clips`."""
    if clip.row >= 0:  # in the data file itself
        return clip
    real, reason = find_file(clip.path, folders, "recordings")
    if real:
        return replace(clip, path=real)
    field = _place_of(clip.path, value) or "audio"
    expected = f"a sound file below {' or '.join(folders)}"
    raise MalformedError(field, expected, f"{shorten(clip.path, 100)}: {reason}")


def find_file(name: str, folders: Sequence[str], what: str) -> tuple[str, str]:
    """Return the absolute path of a file that a record names, or "" and the reason why there is none below the folders.

    Nothing is opened.

    Args:
        what: such files are, for the message.
    """
    advice = f"set media_dir to the folder of the {what}"
    reason = f"no such file there ({advice}, if they lie elsewhere)"
    for folder in folders:
        path = os.path.join(folder, name)  # that is the name, if it is absolute
        try:
            real = _real_path(path)
            if not any(real.startswith(os.path.join(each, "")) for each in folders):
                reason = f"which lies elsewhere ({advice})"
                continue
            status = os.stat(real)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            continue
        problem = _file_problem(status)
        if problem is None:
            return real, ""
        reason = problem
    if not os.path.isabs(name) and os.path.isfile(name):
        reason = "such a file is in the current folder only (write media_dir: . if paths are relative to that)"
    return "", reason


def _file_problem(status: os.stat_result) -> str | None:
    if stat.S_ISDIR(status.st_mode):
        return "a folder"
    if not stat.S_ISREG(status.st_mode):
        return "a pipe, device or socket"
    return None if status.st_size else "an empty file"


def _real_path(path: str) -> str:
    folder, name = os.path.split(path)
    here = os.path.join(_real_folder(folder), name)
    return os.path.realpath(here) if name in ("", ".", "..") or os.path.islink(here) else here


@lru_cache(maxsize=1024)  # recordings share folders, and each part of a path is looked up
def _real_folder(path: str) -> str:
    return os.path.realpath(path)


def _place_of(text: str, value: Any) -> str | None:
    """Return the field in which a text stands, such as "messages[0].content[1].path"."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        name = str(key) if isinstance(value, dict) else f"[{key}]"
        if item == text:
            return name
        if (rest := _place_of(text, item)) is not None:
            return f"{name}{rest}" if rest.startswith("[") else f"{name}.{rest}"
    return None
