"""Any values where recordings are named: a record whose recordings are in place, or a problem that can be printed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from erniekit.data.conversation import USER, Conversation, Preference
from erniekit.data.formats.problems import MalformedError
from erniekit.data.formats.registry import FORMATS, parse_record

NAMES = ("1.wav", "clips/2.wav")
FOUND = st.sampled_from([*NAMES, "./1.wav", "clips/../1.wav"])
HOSTILE = st.one_of(
    st.sampled_from(["", ".", "..", "/", "clips", "../1.wav", "/dev/zero", "a\0b", "\x1b[2J", "x" * 5000, "~"]),
    st.sampled_from(["http://x/1.wav", "data:audio/wav;base64,AA==", "file:///1.wav", "file:///%00", "C:\\1.wav"]),
    st.text(max_size=8),
)
SECONDS = st.one_of(
    st.floats(0, 9), st.sampled_from([0, 1, -1, 10**400, 1e308, "1", "", "nan", True, None]), st.floats()
)
KEYS = st.sampled_from(["path", "bytes", "array", "url", "audio", "audio_url", "data"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(FOUND, HOSTILE, SECONDS),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(KEYS, inner, max_size=2)),
    max_leaves=4,
)
RECORDINGS = st.one_of(FOUND, FOUND, FOUND, st.fixed_dictionaries({"path": FOUND}), VALUES)
WORDS = st.lists(st.sampled_from(["<audio>", "<audio>", "<audio", ">", "q", " "]), max_size=4).map("".join)
PARTS = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, WORDS),
    st.builds(
        lambda kind, key, value: {"type": kind, key: value},
        st.sampled_from(["audio", "audio_url", "input_audio"]),
        st.sampled_from(["path", "audio", "audio_url", "x"]),
        RECORDINGS,
    ),
)
CONTENTS = st.one_of(WORDS, st.lists(PARTS, min_size=1, max_size=3))
ANSWERS = st.one_of(st.just("a"), st.just("a"), st.just("a"), CONTENTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    (folder / "clips").mkdir()
    for name in NAMES:
        (folder / name).write_bytes(b"x")
    return folder


def check(kind: str, record: dict[str, Any], folder: Any) -> Conversation | None:
    """Return the dialogue that a record has, or None if it is a problem."""
    try:
        parsed = parse_record(FORMATS[kind], record, [str(folder)])
    except MalformedError as error:
        problem = f"{error.field}: expected {error.expected}, got {error.got}"
        assert problem.isprintable() and len(problem) < 1000, problem
        event("problem")
        return None
    dialogue = parsed.prompt if isinstance(parsed, Preference) else parsed
    assert isinstance(dialogue, Conversation)
    assert {clip.path for clip in dialogue.clips} <= {str(folder / name) for name in NAMES}
    for turn in dialogue.turns:
        offsets = [found.offset for found in turn.clips]
        assert offsets == sorted(offsets) and all(0 <= offset <= len(turn.content) for offset in offsets)
        assert turn.role == USER or not turn.clips
    event(f"{len(dialogue.clips)} recordings")
    return dialogue


@settings(max_examples=200, deadline=None)
@given(
    record=st.fixed_dictionaries(
        {"audio_path": RECORDINGS, "text": st.one_of(st.just("four"), st.just("four"), VALUES)},
        optional={
            **dict.fromkeys(("audio", "path"), RECORDINGS),
            **dict.fromkeys(("start", "end", "offset", "duration"), SECONDS),
            "language": st.one_of(st.sampled_from(["en", "zh-CN", ""]), st.text(max_size=5), SECONDS),
        },
    )
)
def test_any_transcript(folder, record):
    dialogue = check("asr", record, folder)
    if dialogue is not None:
        (clip,) = dialogue.clips
        assert clip.start >= 0 and (clip.end is None or clip.end > clip.start)
        json.dumps([clip.start, clip.end, clip.duration], allow_nan=False)


def messages_of(rounds: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
    pairs = [({"role": "user", "content": asked}, {"role": "assistant", "content": told}) for asked, told in rounds]
    return [message for pair in pairs for message in pair]


def marks(rounds: list[tuple[Any, Any]]) -> int:
    """Return how many recordings the questions want of the field `audios`."""
    parts = [part for asked, _ in rounds if not isinstance(asked, str) for part in asked]
    texts = [asked for asked, _ in rounds if isinstance(asked, str)]
    texts += ["".join(part.get("text", "") for part in asked) for asked, _ in rounds if not isinstance(asked, str)]
    return sum(text.count("<audio>") for text in texts) + sum("x" in part for part in parts)


ROUNDS = st.lists(st.tuples(CONTENTS, ANSWERS), min_size=1, max_size=2)
LISTS = st.one_of(st.none(), st.none(), st.none(), st.lists(RECORDINGS, max_size=3), VALUES)


@settings(max_examples=200, deadline=None)
@given(rounds=ROUNDS, audios=LISTS)
def test_any_dialogue(folder, rounds, audios):
    audios = ["1.wav"] * marks(rounds) if audios is None else audios
    dialogue = check("messages", {"messages": messages_of(rounds), "audios": audios}, folder)
    if dialogue is not None:
        texts = [
            text if isinstance(text, str) else "".join(part.get("text", "") for part in text) for text, _ in rounds
        ]
        turns = [turn for turn in dialogue.turns if turn.role == USER]
        assert [text.replace("<audio>", "") for text in texts] == [turn.content for turn in turns]


@settings(max_examples=100, deadline=None)
@given(prompt=CONTENTS, chosen=ANSWERS, audios=LISTS)
def test_any_pair(folder, prompt, chosen, audios):
    audios = ["1.wav"] * marks([(prompt, "")]) if audios is None else audios
    asked = [{"role": "user", "content": prompt}]
    check("messages preferences", {"prompt": asked, "chosen": chosen, "rejected": "b", "audios": audios}, folder)
