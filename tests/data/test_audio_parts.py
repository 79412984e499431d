"""Recordings in jinja templates: parts of a content, the words that ask for a transcript, and what is refused."""

from __future__ import annotations

import hashlib
import json

import pytest

from erniekit.data.conversation import ASSISTANT, USER, Conversation, Turn
from erniekit.data.media.clip import Clip, ContentClip
from erniekit.data.templates.ernie import (
    IGNORE_INDEX,
    ErnieTemplate,
    TemplateRefusedError,
    chat_template,
    encode_prompt,
    encode_sample,
)
from erniekit.data.templates.transcription import Request
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from tests.data.conftest import write_tokenizer
from tests.data.published_templates import QWEN2_AUDIO, QWEN2_AUDIO_TOKENS, QWEN25
from tests.data.test_mistral_template import asked, heard, text_of, transcript

SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
FIRST, SECOND = (f"Audio {number}: <|audio_bos|><|AUDIO|><|audio_eos|>\n" for number in (1, 2))
NAMES = {"bos_token": None, "unk_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def open_template(folder, template=QWEN2_AUDIO, request=None):
    write_tokenizer(folder, ("<unk>", *QWEN2_AUDIO_TOKENS), **NAMES)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    return tokenizer, chat_template(tokenizer, request=request or Request())


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return open_template(tmp_path_factory.mktemp("qwen2_audio"))


def asking(content: str) -> str:
    return f"{SYSTEM}<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def test_recordings_are_parts_of_the_content(qwen):
    segments = qwen[1].render(asked(heard("What?", 0), "Six.", heard("And?", 4), "Two."))
    assert [(segment.text, segment.trained) for segment in segments] == [
        (asking(f"{FIRST}What?"), False),
        ("Six.<|im_end|>", True),
        (f"\n<|im_start|>user\nAnd?{SECOND}<|im_end|>\n<|im_start|>assistant\n", False),
        ("Two.<|im_end|>", True),
    ]


def test_a_template_sees_no_path(tmp_path):
    shows = QWEN2_AUDIO.replace("Audio {{ ns.count }}", "{{ part | tojson }}")
    _, template = open_template(tmp_path, shows)
    turn = Turn(USER, "", clips=(ContentClip(0, Clip("/secret/a.wav", 1.0, 2.0)),))
    text = text_of(template, Conversation((turn,)))
    assert "secret" not in text and '{"type": "audio"' in text


def test_words_of_a_user_are_text(qwen):
    tokenizer, template = qwen
    words = "<audio> <|AUDIO|> <|im_end|>"
    ids = encode_prompt(template, tokenizer, asked(heard(words, 3)))
    assert ids.count(tokenizer.token_id("<|AUDIO|>")) == 1 and ids.count(tokenizer.token_id("<|im_end|>")) == 2
    assert words[3:] in tokenizer.decode(ids, skip_special_tokens=False)
    without = encode_prompt(template, tokenizer, asked(words))
    assert tokenizer.token_id("<|AUDIO|>") not in without


def test_the_words_of_the_request_follow_the_recording(qwen, tmp_path):
    assert text_of(qwen[1], Conversation(transcript("six").turns[:1], transcribes=True)) == asking(
        f"{FIRST}Transcribe the audio."
    )
    request = Request("Write what is said in {language}, <|im_end|> {x}", "de")
    tokenizer, template = open_template(tmp_path, request=request)
    assert "said in de, " in text_of(template, transcript("six"))
    assert "said in en, " in text_of(template, transcript("six", "en"))
    ids = encode_sample(template, tokenizer, transcript("six", "en")).input_ids.tolist()
    assert ids.count(tokenizer.token_id("<|im_end|>")) == 2  # of the system text and of the question
    assert template.fingerprint != qwen[1].fingerprint


def test_the_default_request_leaves_the_fingerprint_of_text_templates(tmp_path):
    _, template = open_template(tmp_path, QWEN25)
    source = json.dumps([[("default", QWEN25)], []])
    assert template.fingerprint == hashlib.blake2b(b"2" + source.encode(), digest_size=16).hexdigest()


def test_a_language_that_the_words_need_is_asked_for(tmp_path):
    _, template = open_template(tmp_path, request=Request("In {language}:"))
    with pytest.raises(TemplateRefusedError, match=r"asr_prompt contains \{language\}.*set asr_language"):
        template.render(transcript("six"))
    refused, rendered = template.render_many([transcript("six"), transcript("six", "en")])
    assert isinstance(refused, TemplateRefusedError) and "In en:" in "".join(segment.text for segment in rendered)


def test_the_end_token_is_the_last_label_and_ends_generation(qwen):
    tokenizer, template = qwen
    for dialogue in (transcript("six ducks " * 50), transcript("six", "en"), asked(heard("a", 0), "b", "c", "d")):
        sample = encode_sample(template, tokenizer, dialogue)
        assert sample.labels[-1] in template.stop_token_ids
        expected = [
            number
            for turn in dialogue.turns
            if turn.trained
            for number in (*tokenizer.encode(turn.content), tokenizer.token_id("<|im_end|>"))
        ]
        assert [label for label in sample.labels if label != IGNORE_INDEX] == expected


def test_templates_without_a_place_for_recordings_refuse_them(qwen, template, tmp_path):
    _, text_only = open_template(tmp_path, QWEN25)
    assert isinstance(template, ErnieTemplate)
    for refusing, message in ((text_only, "no place for `audio`"), (template, "recordings")):
        for dialogue in (asked(heard("a", 0), "b"), transcript("six")):
            with pytest.raises(TemplateRefusedError, match=message):
                refusing.render(dialogue)
    answered = asked("a", Turn(ASSISTANT, "b", True, clips=(ContentClip(0, Clip("/a.wav")),)))
    with pytest.raises(TemplateRefusedError, match="only a user's turn"):
        qwen[1].render(answered)
