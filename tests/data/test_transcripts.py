"""Records of type `asr` through both templates: nothing is cut, the end token is trained, refusals name the line."""

from __future__ import annotations

import json

import numpy as np
import pytest
import soundfile

from erniekit.data.conversation import Source
from erniekit.data.media.clip import AudioInputs
from erniekit.data.open_dataset import open_dataset
from erniekit.data.templates.ernie import IGNORE_INDEX, chat_template
from erniekit.data.templates.transcription import Request
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import DataError
from tests.data.published_templates import QWEN2_AUDIO
from tests.data.test_audio_parts import open_template
from tests.data.vocabularies import write_tekken

TEXTS = ["six ducks", "[AUDIO] <|AUDIO|> <audio></s>", " ducks ", "Die Mühle 今天"]
LANGUAGES = ["en", "", "de", ""]


@pytest.fixture
def records(tmp_path):
    for number in range(len(TEXTS)):
        soundfile.write(tmp_path / f"{number}.wav", np.sin(np.arange(16000 * (number + 1)) / 20), 16000)
    return [
        {"audio_path": f"{number}.wav", "text": text, **({"language": language} if language else {})}
        for number, (text, language) in enumerate(zip(TEXTS, LANGUAGES, strict=True))
    ]


def open_family(family, folder, request=None, template=QWEN2_AUDIO):
    if family == "qwen2_audio":
        return open_template(folder, template, request)
    tokenizer = load_tokenizer(write_tekken(folder))
    return tokenizer, chat_template(tokenizer, request=request or Request())


def open_records(family, folder, records, request=None, template=QWEN2_AUDIO, **options):
    tokenizer, opened = open_family(family, folder / family, request, template)
    data = folder / "asr.jsonl"
    data.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    placeholder = tokenizer.token_id("<|AUDIO|>" if family == "qwen2_audio" else "[AUDIO]")
    audio = AudioInputs(placeholder, 8, 200, 25, lambda frames: (frames + 7) // 8)
    options = {"max_seq_len": 300, "over_length": "error", **options}
    dataset = open_dataset([Source(data, "asr")], tokenizer, opened, cache_dir=folder / "cache", audio=audio, **options)
    return tokenizer, opened, placeholder, dataset


@pytest.mark.parametrize("family", ["voxtral", "qwen2_audio"])
def test_every_transcript_is_trained_whole_with_its_end_token(family, records, tmp_path):
    tokenizer, template, placeholder, dataset = open_records(family, tmp_path, records)
    assert len(dataset) == len(TEXTS)
    for number, text in enumerate(TEXTS):
        sample = dataset.sample(number)
        labels = sample.labels[sample.labels != IGNORE_INDEX].tolist()
        assert labels[-1] == sample.labels[-1] and labels[-1] in template.stop_token_ids
        expected = text.rstrip(" ") if family == "voxtral" else text
        assert tokenizer.decode(labels[:-1], skip_special_tokens=False) == expected
        (clip,) = sample.clips
        tokens = 25 * (number // 2) + [13, 25][number % 2]  # of windows of 2 s
        assert clip.tokens == tokens == sample.input_ids.tolist().count(placeholder)
        assert set(sample.input_ids[clip.place : clip.place + tokens]) == {placeholder}


@pytest.mark.parametrize("family", ["voxtral", "qwen2_audio"])
def test_a_transcript_too_long_is_told_and_never_cut(family, records, tmp_path):
    records[2]["text"] = "six ducks " * 300
    with pytest.raises(DataError, match=r"asr\.jsonl:3: "):
        open_records(family, tmp_path, records)
    for policy in ("drop", "truncate_turns"):
        *_, dataset = open_records(family, tmp_path, records, over_length=policy)
        assert len(dataset) == 3 and [source.dropped for source in dataset.report.sources] == [1]


def test_refusals_name_the_line(records, tmp_path):
    with pytest.raises(DataError, match=r"asr\.jsonl:2: .*asr_prompt contains \{language\}") as raised:
        open_records("qwen2_audio", tmp_path, records, Request("In {language}:"))
    assert "asr.jsonl:4: " in str(raised.value) and "asr.jsonl:1: " not in str(raised.value)
    *_, dataset = open_records("qwen2_audio", tmp_path, records, Request("In {language}:", "fr"))
    assert len(dataset) == 4
    drops = QWEN2_AUDIO.replace("<|AUDIO|>", "")
    with pytest.raises(DataError, match=r"asr\.jsonl:1: .*1 recordings?, for which .* writes 0 placeholders"):
        open_records("qwen2_audio", tmp_path, records, template=drops)
    records[1]["language"] = "zh-CN"
    with pytest.raises(DataError, match=r"asr\.jsonl:2: .*language: 'zh-CN' is no two-letter code"):
        open_records("voxtral", tmp_path, records)
