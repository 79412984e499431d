"""Recordings in records: transcripts, messages with audio, paths, and what is refused with a reason."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from erniekit.data.conversation import Conversation, Preference, Turn
from erniekit.data.formats.asr import LANGUAGE_FIELDS, RECORDING_FIELDS, STRETCH_FIELDS, TEXT_FIELDS
from erniekit.data.formats.problems import MalformedError, NothingToTrainError, RecordProblem
from erniekit.data.formats.registry import FORMATS, parse_record, read_records, recognise
from erniekit.data.media.clip import Clip, ContentClip
from erniekit.errors import DataError

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    for name in ("1.wav", "2.wav", "3.wav"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "é 1.flac").write_bytes(b"x")
    return tmp_path


@pytest.fixture
def parse(folder):
    def parsed(kind, **record):
        return parse_record(FORMATS[kind], record, [str(folder)])

    return parsed


@pytest.fixture
def refusal(parse):
    def refused(kind, **record):
        with pytest.raises(MalformedError) as caught:
            parse(kind, **record)
        return f"{caught.value.field}: expected {caught.value.expected}, got {caught.value.got}"

    return refused


@pytest.fixture
def clip(folder):
    def of(name="1.wav", *more, **fields):
        return Clip(str(folder / name), *more, **fields)

    return of


def transcript(clip, text="four", language=""):
    turns = (Turn("user", "", clips=(ContentClip(0, clip),)), Turn("assistant", text, True))
    return Conversation(turns, transcribes=True, language=language)


def ask(*parts):
    """Return the user's turn of texts and clips, in their order."""
    text, clips = "", []
    for part in parts:
        if isinstance(part, Clip):
            clips.append(ContentClip(len(text), part))
        else:
            text += part
    return Turn("user", text, clips=tuple(clips))


def answer(text="yes", trained=True):
    return Turn("assistant", text, trained)


def message(role, content, **more):
    return {"role": role, "content": content, **more}


YES = message("assistant", "yes")


# asr


@pytest.mark.parametrize(
    ("record", "stretch", "language"),
    [
        ({"audio_path": "1.wav", "text": "four"}, {}, ""),
        ({"audio_path": "1.wav", "text": "four", "language": "en"}, {}, "en"),
        ({"audio_path": "1.wav", "text": "four", "start": 0.5, "end": 2}, {"start": 0.5, "end": 2.0}, ""),
        ({"audio": {"path": "1.wav", "bytes": None}, "sentence": "four"}, {}, ""),  # a column of `datasets`
        ({"file_name": "1.wav", "transcription": "four"}, {}, ""),  # audiofolder
        ({"path": "1.wav", "sentence": "four", "lang": "en"}, {}, "en"),  # Common Voice
        ({"wav": "1.wav", "txt": "four"}, {}, ""),  # WeNet
        ({"audio_filepath": "1.wav", "text": "four", "duration": 3.5}, {"duration": 3.5}, ""),  # NeMo
        (
            {"audio_filepath": "1.wav", "text": "four", "offset": 2, "duration": 1.5},
            {"start": 2.0, "end": 3.5, "duration": 1.5},
            "",
        ),
        ({"audio_path": "1.wav", "text": "four", "start": "1", "end": "2.5"}, {"start": 1.0, "end": 2.5}, ""),  # CSV
    ],
)
def test_transcripts_by_the_names_that_others_give_them(parse, clip, write_jsonl, record, stretch, language):
    assert parse("asr", **record) == transcript(clip(**stretch), language=language)
    assert recognise(write_jsonl([record]), "erniekit") == "asr"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"audio_path": None}, "audio_path: expected the path of a sound file, got nothing"),
        ({"text": None}, "text: expected the transcript, got nothing"),
        ({"audio_path": 3}, "audio_path: expected the path of a sound file, got 3"),
        ({"audio_path": " "}, "audio_path: expected the path of a sound file, got an empty string"),
        (
            {"audio_path": {"array": [0.1], "sampling_rate": 8000}},
            "got the sound itself in `array`: write it to a file",
        ),
        ({"audio_path": {"bytes": "UklGRg==", "path": None}}, "got the sound itself in `bytes`: write it to a file"),
        ({"audio_path": "https://example.org/1.wav"}, "(an address, from which nothing is downloaded): write it to a"),
        ({"audio_path": "data:audio/wav;base64,UklGRg=="}, "(the sound itself): write it to a file, and its path here"),
        ({"language": 3}, "language: expected a string, got 3"),
        ({"language": "en\n"}, None),
        ({"language": "[lang]"}, "language: expected a language such as en or zh-CN, got '[lang]'"),
        ({"start": -1}, "start: expected a number of seconds from 0, got -1"),
        ({"start": True}, "start: expected a number of seconds from 0, got True"),
        ({"end": float("nan")}, "end: expected a number of seconds from 0, got nan"),
        ({"end": 10**400}, "end: expected a number of seconds from 0, got 1"),
        ({"end": "late"}, "end: expected a number of seconds from 0, got 'late'"),
        ({"start": 2, "end": 2}, "end: expected seconds after the start (2), got 2"),
        ({"start": 1e308, "duration": 1e308}, "end: expected seconds after the start (1e+308), got inf"),
        ({"start": 2, "offset": 2}, "offset: expected none beside `start`, which means the same, got 2"),
        ({"duration": 0}, "duration: expected seconds above 0, got 0"),
    ],
)
def test_malformed_transcripts(parse, refusal, change, told):
    record = {"audio_path": "1.wav", "text": "four", **change}
    if told is None:
        parse("asr", **record)
    else:
        assert told in refusal("asr", **record)


def test_an_empty_transcript_is_left_out_and_a_misspelt_field_named(parse, refusal):
    with pytest.raises(NothingToTrainError):
        parse("asr", audio_path="1.wav", text=" ")
    assert "got nothing, but audio_pth: did you mean it?" in refusal("asr", audio_pth="1.wav", text="four")


def test_recordings_are_no_plain_text_and_transcripts_no_pairs(write_jsonl, refusal):
    problem = recognise(write_jsonl([{"audio_path": "1.wav", "text": "four"}]), "text")
    assert isinstance(problem, RecordProblem) and "write stage: SFT" in problem.got
    assert "audio: expected plain text, got a recording" in refusal("text", text="four", audio="1.wav")


# Messages


def test_the_same_dialogue_as_ms_swift_llama_factory_and_axolotl_write_it(parse, clip):
    expected = Conversation((ask(clip(), "What is said?"), answer()), "Be brief.")
    system = message("system", "Be brief.")
    marked = [system, message("user", "<audio>What is said?"), YES]
    text = {"type": "text", "text": "What is said?"}
    llama_factory = [
        {"from": "human", "value": "<audio>What is said?"},
        {"from": "gpt", "value": "yes"},
    ]
    assert parse("messages", messages=marked, audios=["1.wav"]) == expected  # ms-swift
    assert parse("messages", messages=marked, audios="1.wav") == expected
    assert parse("messages", messages=marked, audio={"path": "1.wav"}) == expected
    assert parse("sharegpt", conversations=llama_factory, audios=["1.wav"], system="Be brief.") == expected
    alpaca = {"instruction": "<audio>What is said?", "output": "yes", "system": "Be brief."}
    assert parse("alpaca", **alpaca, audios=["1.wav"]) == expected
    assert parse("erniekit", src="<audio>What is said?", tgt="yes", system="Be brief.", audios=["1.wav"]) == expected
    for part in (
        {"type": "audio", "path": "1.wav"},  # axolotl
        {"type": "audio", "audio": "1.wav"},
        {"type": "audio", "url": "1.wav"},
        {"type": "audio", "audio_url": "1.wav"},  # Qwen2-Audio
        {"type": "audio", "value": "1.wav"},
        {"type": "audio_url", "audio_url": {"url": "1.wav"}},  # OpenAI and vLLM
        {"type": "audio", "audio": {"path": "1.wav", "bytes": None}},
    ):
        assert parse("messages", messages=[system, message("user", [part, text]), YES]) == expected
        prompt = [system, message("user", [part, text])]
        assert parse("prompt_completion", prompt=prompt, completion="yes") == expected
    unnamed = [system, message("user", [{"type": "audio"}, text]), YES]
    assert parse("messages", messages=unnamed, audios=["1.wav"]) == expected


def test_recordings_keep_their_places(parse, clip):
    talk = [message("user", "A: <audio>, B: <audio>"), YES, message("user", "<audio>"), YES]
    conversation = parse("messages", messages=talk, audios=["1.wav", "2.wav", "3.wav"])
    assert conversation.turns[0] == ask("A: ", clip("1.wav"), ", B: ", clip("2.wav"))
    assert conversation.turns[2] == ask(clip("3.wav"))
    assert conversation.drop_oldest_rounds(1).clips == (clip("3.wav"),)
    assert conversation.untrained().clips == conversation.clips
    assert [len(each.clips) for each in conversation.split_answers()] == [2, 3]


def test_marks_parts_and_named_recordings_together(parse, clip):
    parts = [
        {"type": "text", "text": "<audio>a"},
        {"type": "audio", "path": "3.wav"},
        {"type": "text", "text": "b"},
        {"type": "audio"},
    ]
    conversation = parse("messages", messages=[message("user", parts), YES], audios=["1.wav", "2.wav"])
    assert conversation.turns[0] == ask(clip("1.wav"), "a", clip("3.wav"), "b", clip("2.wav"))


def test_without_audios_the_word_is_text(parse):
    talk = [message("user", "<audio> is an element of HTML"), message("assistant", "<audio> it is")]
    assert parse("messages", messages=talk).turns[0] == ask("<audio> is an element of HTML")
    named = [message("user", [{"type": "text", "text": "<audio>"}, {"type": "audio", "path": "1.wav"}]), YES]
    assert parse("messages", messages=named).turns[0].content == "<audio>"


USER_AUDIO = message("user", "<audio>")


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"messages": [USER_AUDIO, YES], "audios": []}, "audios: expected as many recordings as <audio> marks or part"),
        ({"messages": [USER_AUDIO, YES], "audios": ["1.wav", "2.wav"]}, "parts without a path (1), got 2"),
        ({"messages": [message("user", "q"), YES], "audios": ["1.wav"]}, "parts without a path (0), got 1"),
        ({"messages": [message("user", [{"type": "audio"}]), YES]}, "audios: expected as many recordings as"),
        (
            {"messages": [USER_AUDIO, message("assistant", "<audio>")], "audios": ["1.wav"]},
            "audios: expected <audio> in a user's text only",
        ),
        (
            {"messages": [message("system", "<audio>"), USER_AUDIO, YES], "audios": ["1.wav"]},
            "audios: expected <audio> in a user's text only",
        ),
        (
            {"messages": [message("user", "q"), message("assistant", [{"type": "audio", "path": "1.wav"}])]},
            "messages[1].content: expected recordings in messages of the user only, got one in another message",
        ),
        (
            {"messages": [message("system", [{"type": "audio", "path": "1.wav"}]), USER_AUDIO, YES]},
            "messages[0].content: expected recordings in messages of the user only",
        ),
        (
            {
                "messages": [
                    message("user", [{"type": "input_audio", "input_audio": {"data": "Ukl", "format": "wav"}}]),
                    YES,
                ]
            },
            "messages[0].content[0].input_audio: expected the path of a sound file, got the sound itself in `data`",
        ),
        (
            {"messages": [message("user", [{"type": "audio_url", "audio_url": {"url": "http://x/1.wav"}}]), YES]},
            "messages[0].content[0].audio_url.url: expected the path of a sound file, got 'http://x/1.wav' (an address",
        ),
        (
            {"messages": [message("user", [{"type": "audio", "path": "4.wav"}]), YES]},
            "messages[0].content[0].path: expected a sound file below",
        ),
        ({"messages": [USER_AUDIO, YES], "audios": ["4.wav"]}, "audios[0]: expected a sound file below"),
        ({"messages": [USER_AUDIO, YES], "audios": [7]}, "audios[0]: expected the path of a sound file, got 7"),
    ],
)
def test_malformed_messages_with_audio(refusal, record, told):
    assert told in refusal("messages", **record)


def test_pairs_have_recordings_in_their_prompt(parse, refusal, clip):
    expected = Preference(Conversation((ask(clip(), "q"),)), (answer("a"),), (answer("b"),))
    kind = "messages preferences"
    parts = [message("user", [{"type": "audio", "path": "1.wav"}, {"type": "text", "text": "q"}])]
    assert parse(kind, prompt="<audio>q", chosen="a", rejected="b", audios=["1.wav"]) == expected
    assert parse(kind, prompt=parts, chosen="a", rejected="b") == expected
    full = {name: [*parts, message("assistant", text)] for name, text in (("chosen", "a"), ("rejected", "b"))}
    assert parse(kind, **full) == expected
    other = [message("user", [{"type": "audio", "path": "2.wav"}, {"type": "text", "text": "q"}])]
    with_other = {**full, "rejected": [*other, message("assistant", "b")]}
    assert "no common prompt" in refusal(kind, **with_other)
    talk = [{"from": "human", "value": "<audio>q"}]
    pair = {"chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}}
    assert parse("sharegpt preferences", conversations=talk, **pair, audios=["1.wav"]) == expected
    later = [message("assistant", "a"), *parts, message("assistant", "b")]
    assert "chosen: expected recordings in the prompt of a pair only" in refusal(
        kind, prompt="q", chosen=later, rejected="b"
    )


# Paths


def test_where_recordings_lie(folder, clip, monkeypatch):
    def read(path, *media_dir):
        data = folder / "data" / "a.jsonl"
        data.parent.mkdir(exist_ok=True)
        data.write_text(json.dumps({"audio_path": path, "text": "four"}) + "\n")
        (item,) = read_records(data, "asr", media_dir=media_dir)
        return str(item) if isinstance(item, RecordProblem) else item[1].clips[0]

    data = folder / "data"
    data.mkdir()
    (data / "1.wav").write_bytes(b"x")
    assert read("1.wav") == clip("data/1.wav")
    assert read(str(data / "1.wav")) == clip("data/1.wav")
    assert read("../data/./1.wav") == clip("data/1.wav")
    elsewhere = read("../1.wav")
    assert elsewhere.startswith(f"{data / 'a.jsonl'}:1: audio_path: expected a sound file below {data}, got '../1.wav'")
    assert elsewhere.endswith("which lies elsewhere (set media_dir to the folder of the recordings)")
    assert "lies elsewhere" in read(str(folder / "1.wav"))
    assert read("1.wav", str(folder)) == clip("1.wav")
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match=r"media_dir: expected folders that exist, got 'gone' \(paths are relative to"):
        read("1.wav", str(folder), "gone")
    assert "current folder only (write media_dir: . if" in read("2.wav")
    assert read("2.wav", ".") == clip("2.wav")
    assert read("2.wav", str(data), str(folder)) == clip("2.wav")
    assert read("clips/é 1.flac", str(folder)) == clip("clips/é 1.flac")
    assert read(f"file://{folder}/clips/%C3%A9%201.flac", str(folder)) == clip("clips/é 1.flac")


def test_links_that_leave_the_folder_are_refused(folder, parse, refusal, clip, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "o.wav").write_bytes(b"x")
    (folder / "out.wav").symlink_to(outside / "o.wav")
    (folder / "away").symlink_to(outside)
    (folder / "in.wav").symlink_to("1.wav")
    (folder / "loop.wav").symlink_to("loop.wav")
    for path in ("out.wav", "away/o.wav", "away/../out.wav", "/etc/passwd", "/dev/zero"):
        assert "which lies elsewhere (set media_dir" in refusal("asr", audio_path=path, text="four")
    assert parse("asr", audio_path="in.wav", text="four") == transcript(clip("1.wav"))
    assert "audio_path: expected a sound file below" in refusal("asr", audio_path="loop.wav", text="four")


def test_hostile_paths_are_named_and_escaped(folder, refusal):
    os.mkfifo(folder / "pipe.wav")
    (folder / "none.wav").write_bytes(b"")
    cases = {
        "pipe.wav": "a pipe, device or socket",
        "none.wav": "an empty file",
        "clips": "a folder",
        ".": "lies elsewhere",
        "no.wav": "no such file there (set media_dir",
        "1.wav/x": "",
        "a" * 300: "",
        "a/" * 3000: "too long",
        "a\0b": "'a\\x00b', which has a control character",
        "\x1b[2J.wav": "'\\x1b[2J.wav', which has a control character",
        "\ud800.wav": "half of a surrogate pair",
        "~/1.wav": "no such file",
    }
    for path, told in cases.items():
        refused = refusal("asr", audio_path=path, text="four")
        assert told in refused and refused.isprintable(), (path, refused)
        assert len(refused) < 400 + len(str(folder))


def test_the_examples_of_the_documentation_are_read(tmp_path):
    text = (PROJECT / "docs" / "data.md").read_text(encoding="utf-8")
    section = text.partition("\n### Recordings\n")[2].partition("\n### Tools\n")[0]
    for name in ("clips/0001.wav", "talks/17.flac"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"x")
    records = [json.loads(line) for line in section.splitlines() if line.startswith("{")]
    read = []
    for record in records:
        (kind,) = [kind for kind, form in FORMATS.items() if form.fits(record)]
        parsed = parse_record(FORMATS[kind], record, [str(tmp_path)])
        read.append((kind, parsed.prompt if isinstance(parsed, Preference) else parsed))
    assert [kind for kind, _ in read] == ["asr"] * 3 + ["messages", "sharegpt"] + ["messages"] * 2 + [
        "messages preferences",
        "codes",
    ]
    assert read[1][1].turns[1] == read[2][1].turns[1]
    assert replace(read[1][1].clips[0], duration=3.6) == replace(read[2][1].clips[0], end=66.1)
    assert all(dialogue == read[3][1] for _, dialogue in read[4:7])
    for names in (RECORDING_FIELDS, TEXT_FIELDS, LANGUAGE_FIELDS, STRETCH_FIELDS):
        assert all(f"`{name}`" in section for name in names)
