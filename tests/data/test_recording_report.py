"""What `validate --data` says of recordings, and what a preview shows in place of their placeholders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from erniekit.data.conversation import Source
from erniekit.data.open_dataset import open_dataset
from erniekit.data.recording_report import check_recordings
from erniekit.data.sampler import StepPlan
from erniekit.data.split import Split
from erniekit.errors import DataError
from erniekit.runners.preview import render_batch
from tests.data.recordings import RATE, ListeningTemplate, audio_inputs, write_recording


@pytest.fixture
def speech(tmp_path: Path) -> Source:
    """Six records: three sound ones, one of silence, one that is too long, one that is no sound file."""
    sound = tmp_path / "sound"
    for number in range(3):
        write_recording(sound / f"{number}.wav", 0.2 + 0.1 * number)
    soundfile.write(sound / "3.wav", np.zeros(RATE // 2), RATE)
    write_recording(sound / "4.wav", 3.0)
    (sound / "5.wav").write_text("this is no sound")
    records = [{"audio_path": f"sound/{number}.wav", "text": f"number {number}"} for number in range(6)]
    for number, language in ((0, "en"), (1, "en"), (3, "de")):
        records[number]["language"] = language
    path = tmp_path / "speech.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Source(path, "asr")


def test_every_recording_is_heard_and_the_suspicious_are_named(speech, tokenizer):
    report = check_recordings([speech], audio_inputs(tokenizer), 64)
    assert (report.clips, round(report.seconds, 3)) == (6, 4.4)
    totals, silent, too_long = report.lines()
    assert silent.startswith(f"{speech.path}:4: ") and "3.wav: expected sound, got silence" in silent
    assert too_long.startswith(f"{speech.path}:5: ")
    assert "4.wav: expected at most 64 tokens (max_seq_len), got 75 of 3.0 s" in too_long
    assert totals == (
        "recordings: 6, 4.4 seconds of sound, from 0.2 seconds to 3.0 seconds; "
        "languages of records: not named 3, en 2, de 1; these are suspicious (2):"
    )


def test_what_only_decoding_finds_is_damaged(speech, tokenizer):
    sound = write_recording(speech.path.parent / "sound/2.flac", 4.0)
    sound.write_bytes(sound.read_bytes()[: sound.stat().st_size // 2])
    speech.path.write_text(json.dumps({"audio_path": "sound/2.flac", "text": "two"}) + "\n")
    report = check_recordings([speech], audio_inputs(tokenizer), 64)
    assert report.lines() == ["recordings: 1, 0.0 seconds of sound; damaged 1"]
    with pytest.raises(DataError, match=rf"{speech.path}:1: .*2.flac: expected a whole recording, .*\n1 problem"):
        report.damaged.raise_if_any()


def test_only_the_part_that_is_read_is_heard(speech, tokenizer):
    parts = [Source(speech.path, "asr", split=Split(0.5, 3, held_out)) for held_out in (False, True)]
    clips = [check_recordings([part], audio_inputs(tokenizer), 64).clips for part in parts]
    assert clips == [3, 3]
    assert check_recordings(parts, audio_inputs(tokenizer), 64).clips == 6
    assert check_recordings([Source(speech.path, "asr", 0.0)], audio_inputs(tokenizer), 64).lines() == []


def test_a_preview_says_where_recordings_stand(speech, tokenizer, tmp_path):
    inputs = audio_inputs(tokenizer)
    dataset = open_dataset(
        [speech], tokenizer, ListeningTemplate(tokenizer), max_seq_len=64, cache_dir=tmp_path / "cache", audio=inputs,
        on_bad_record="skip",
    )  # fmt: skip
    plan = StepPlan(
        dataset, max_seq_len=64, packing=True, greedy=False, window=9, batch_size=1, accumulation=1, shuffle=False
    )
    text = render_batch(plan.micro_batches(0)[0], tokenizer, dataset)
    assert f"User: <audio {tmp_path}/sound/0.wav: 0.20 s, 5 tokens>\nAssistant: [[number 0" in text.replace(" \n", "\n")
    assert "1.wav: 0.30 s, 8 tokens>" in text and tokenizer.decode([inputs.placeholder_id], False) not in text
