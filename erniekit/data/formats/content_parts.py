"""Read the content of a message: a text, or a list of parts that hold texts, recordings and units of speech."""

from __future__ import annotations

from typing import NamedTuple

from erniekit.data.conversation import Part
from erniekit.data.formats.aligned_units import parse_units
from erniekit.data.formats.problems import MalformedError, parse_flag, parse_text, shorten
from erniekit.data.formats.recordings import AUDIO_PARTS, parse_audio_part
from erniekit.data.media.clip import ContentClip
from erniekit.data.units import Units

TEXT_PARTS = ("text", "input_text", "output_text")  # the types of a content part that holds text
UNITS, TRAIN = "units", "train"
# What other parts of a content hold, by a word in their type: "image_url", "video", ...
OTHER_PARTS = {"image": "a vision record", "video": "a video record"}
_UNTYPED = (UNITS, "audio", "text")  # fields that tell what a part without a type holds
PART_FIELDS = frozenset({"type", "text", "value", UNITS, TRAIN})  # of parts that hold text or units


class Content(NamedTuple):
    """A message's content.

    Attributes:
        text: the texts of all parts, joined.
        clips: the recordings between them.
        parts: see `Turn.units_and_texts`.
    """

    text: str
    clips: tuple[ContentClip, ...] = ()
    parts: tuple[Part, ...] = ()


def parse_content_parts(value: object, name: str, *, trains: bool = False) -> Content:
    """Return the content of a message: a string, OpenAI's list of typed parts, or parts that only have a field of their
    type: `{"units": [...]}`, `{"audio": path}`, `{"text": "..."}`.

    The texts of parts are joined without anything between them, as templates join them.

    Args:
        trains: whether a part may have `train`: the message is the assistant's.

    Raises:
        MalformedError: the value is neither, or a part holds an image or a video.
    """
    if not isinstance(value, list):
        return Content(parse_text(value, name))
    text, clips, parts = "", [], []
    for number, part in enumerate(value):
        place = f"{name}[{number}]"
        kind = _kind(part)
        if isinstance(part, dict):
            _refuse_several_contents(part, place)
        trained = _trained(part, place, trains) if isinstance(part, dict) else True
        if kind == UNITS:
            codes = parse_units(part[UNITS], f"{place}.{UNITS}")
            if not codes:
                raise MalformedError(f"{place}.{UNITS}", "at least one unit", "none")
            parts.append(Part(Units(codes), trained))
        elif kind in AUDIO_PARTS:
            clips.append(ContentClip(len(text), parse_audio_part(part, place)))
            parts.append(Part(None, trained))
        elif kind in TEXT_PARTS:
            key = "value" if "text" not in part and "value" in part else "text"  # "value" is LLaMA-Factory's name
            own = parse_text(part.get(key), f"{place}.{key}")
            text += own
            parts.append(Part(own, trained))
        else:
            other = next((what for word, what in OTHER_PARTS.items() if word in str(kind)), None)
            got = shorten(part) if other is None else f"{kind} ({other}; ERNIEKit reads texts and recordings only)"
            raise MalformedError(place, "a string or parts of type text, audio or units", got)
    plain = all(part.trained and not isinstance(part.value, Units) for part in parts)
    return Content(text, tuple(clips), () if plain else _merged(parts))


def _kind(part: object) -> str | None:
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if kind is None:
        kind = next((field for field in _UNTYPED if field in part), None)
    return kind if kind != UNITS or UNITS in part else None


def _refuse_several_contents(part: dict, place: str) -> None:
    """Raise MalformedError if a part holds more than one thing, of which some would be lost."""
    held = [field for field in _UNTYPED if part.get(field) is not None]
    held += ["value"] if UNITS in held and part.get("value") is not None else []
    if len(held) > 1 and (UNITS in held or "type" not in part):
        raise MalformedError(place, "one of units, audio and text in a part", " and ".join(held))


def _trained(part: dict, place: str, trains: bool) -> bool:
    if TRAIN not in part:
        return True
    if not trains:
        raise MalformedError(f"{place}.{TRAIN}", "`train` in the assistant's messages only", shorten(part[TRAIN]))
    return parse_flag(part[TRAIN], f"{place}.{TRAIN}")


def _merged(parts: list[Part]) -> tuple[Part, ...]:
    """Return the parts with texts that follow each other joined: no token arises between them that neither writes."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last and isinstance(last.value, str) and isinstance(part.value, str) and last.trained == part.trained:
            merged[-1] = Part(last.value + part.value, part.trained)
        elif part.value != "":
            merged.append(part)
    return tuple(merged)
