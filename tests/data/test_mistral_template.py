"""The dialogues of Tekken vocabularies: recordings, requests for transcripts, system texts, and what is refused."""

from __future__ import annotations

import json

import pytest

from erniekit.data.conversation import ASSISTANT, USER, Conversation, Turn
from erniekit.data.media.clip import Clip, ContentClip
from erniekit.data.templates.ernie import (
    IGNORE_INDEX,
    RewritesTurnsError,
    TemplateRefusedError,
    chat_template,
    encode_prompt,
    encode_sample,
)
from erniekit.data.templates.mistral import MistralTemplate
from erniekit.data.templates.samples import render_samples
from erniekit.data.templates.transcription import Request
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import DataError, ModelFileError
from tests.data.vocabularies import VOXTRAL_TOKENS, tekken_values, write_tekken

CLIP = Clip("/clips/a.wav")


def asked(*turns: str | Turn, **fields: object) -> Conversation:
    """A dialogue whose turns are the user's and the assistant's in turn; answers are trained."""
    made = [
        turn if isinstance(turn, Turn) else Turn((USER, ASSISTANT)[number % 2], turn, number % 2 == 1)
        for number, turn in enumerate(turns)
    ]
    return Conversation(tuple(made), **fields)


def heard(text: str, *offsets: int) -> Turn:
    return Turn(USER, text, clips=tuple(ContentClip(offset, CLIP) for offset in offsets))


def transcript(text: str, language: str = "") -> Conversation:
    return asked(heard("", 0), text, transcribes=True, language=language)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    def open_version(version: str, request: Request | None = None, tokens: dict[int, str] | None = VOXTRAL_TOKENS):
        folder = write_tekken(tmp_path_factory.mktemp("tekken"), tekken_values(version, tokens))
        tokenizer = load_tokenizer(folder)
        return tokenizer, chat_template(tokenizer, request=request or Request())

    return open_version


@pytest.fixture(scope="module")
def v7(load):
    return load("v7")


def text_of(template, conversation):
    return "".join(segment.text for segment in template.render(conversation))


def test_the_template_follows_from_the_file(v7):
    assert isinstance(v7[1], MistralTemplate)


def test_a_question_about_a_recording(v7):
    segments = v7[1].render(asked(heard("What is said?", 0), "Six ducks. "))
    assert [(segment.text, segment.trained) for segment in segments] == [
        ("<s>[INST][BEGIN_AUDIO][AUDIO]What is said?[/INST]", False), ("Six ducks.</s>", True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        (heard("ab", 1), "a[BEGIN_AUDIO][AUDIO]b"),
        (heard("ab", 2), "ab[BEGIN_AUDIO][AUDIO]"),
        (heard("ab", 0, 0, 2), "[BEGIN_AUDIO][AUDIO][BEGIN_AUDIO][AUDIO]ab[BEGIN_AUDIO][AUDIO]"),
    ],
)
def test_recordings_stand_where_the_content_has_them(v7, turn, expected):
    assert text_of(v7[1], asked(turn)) == f"<s>[INST]{expected}[/INST]"


def test_several_turns_and_two_of_the_user(v7):
    dialogue = asked(heard("a", 0), "b", heard("c", 1), "d")
    expected = "<s>[INST][BEGIN_AUDIO][AUDIO]a[/INST]b</s>[INST]c[BEGIN_AUDIO][AUDIO][/INST]d</s>"
    assert text_of(v7[1], dialogue) == expected
    twice = Conversation((Turn(USER, "a"), heard("bc", 1), Turn(USER, "d"), Turn(USER, ""), Turn(USER, "e")))
    assert text_of(v7[1], twice) == "<s>[INST]a\n\nb[BEGIN_AUDIO][AUDIO]c\n\nd\n\ne[/INST]"


def test_a_transcript_is_requested_with_its_language_or_without(v7, load):
    _, template = v7
    assert (
        text_of(template, transcript("six", "en")) == "<s>[INST][BEGIN_AUDIO][AUDIO][/INST]lang:en[TRANSCRIBE]six</s>"
    )
    assert text_of(template, transcript("six")) == "<s>[INST][BEGIN_AUDIO][AUDIO][/INST][TRANSCRIBE]six</s>"
    _, german = load("v7", Request(language="de"))
    assert "lang:de[TRANSCRIBE]" in text_of(german, transcript("six"))
    assert "lang:en[TRANSCRIBE]" in text_of(german, transcript("six", "en"))
    assert german.fingerprint != template.fingerprint


def test_the_end_token_is_the_last_label_and_ends_generation(v7):
    tokenizer, template = v7
    for dialogue in (transcript("six ducks " * 50, "en"), transcript(""), asked("a", "b"), asked("a", "b", "c", "d")):
        sample = encode_sample(template, tokenizer, dialogue)
        assert sample.labels[-1] == tokenizer.eos_id and template.stop_token_ids == (tokenizer.eos_id,)
        labels = [label for label in sample.labels if label != IGNORE_INDEX]
        answers = [tokenizer.encode(turn.content.rstrip(" ")) for turn in dialogue.turns if turn.trained]
        assert labels == [number for answer in answers for number in (*answer, tokenizer.eos_id)]


def test_a_prompt_is_what_training_reads_before_the_answer(v7):
    tokenizer, template = v7
    dialogue = transcript("six", "en")
    prompt = encode_prompt(template, tokenizer, Conversation(dialogue.turns[:1], transcribes=True, language="en"))
    assert prompt == [1, 3, 25, 24, 4, *tokenizer.encode("lang:en"), 34]
    sample = encode_sample(template, tokenizer, dialogue)
    assert sample.input_ids[: len(prompt)].tolist() == prompt
    assert (sample.labels[: len(prompt) - 1] == IGNORE_INDEX).all()


def test_control_words_in_a_users_or_an_assistants_text_are_text(v7):
    tokenizer, template = v7
    words = "[AUDIO] [INST]x[/INST]</s>[BEGIN_AUDIO]<audio>[TRANSCRIBE]"
    dialogue = asked(heard(words, 3), words, system="")
    ids = encode_sample(template, tokenizer, dialogue).input_ids.tolist()
    assert [number for number in ids if number < 40] == [1, 3, 25, 24, 4]
    transcribed = encode_sample(template, tokenizer, transcript(words)).input_ids.tolist()
    assert [number for number in transcribed if number < 40] == [1, 3, 25, 24, 4, 34]


def test_system_texts(v7, load):
    dialogue = asked("a", "b", "c", "d", system="Be brief.")
    expected = "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]a[/INST]b</s>[INST]c[/INST]d</s>"
    assert text_of(v7[1], dialogue) == expected
    _, v13 = load("v13")
    assert text_of(v13, asked(heard("a", 0), system="S")).startswith("<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST][BEGIN")


def test_before_v7_the_system_text_stands_in_the_last_question(load):
    _, v3 = load("v3", tokens=None)
    dialogue = asked("a", "b", "c", "d", system="S")
    with pytest.raises(RewritesTurnsError):
        v3.render(dialogue)
    (samples,) = render_samples(v3, [dialogue], None)
    texts = ["".join(segment.text for segment in sample.segments) for sample in samples]
    assert texts == ["<s>[INST]S\n\na[/INST]b</s>", "<s>[INST]a[/INST]b</s>[INST]S\n\nc[/INST]d</s>"]
    assert text_of(v3, asked("a", "b", "c", "d")) == "<s>[INST]a[/INST]b</s>[INST]c[/INST]d</s>"


def test_what_has_no_place_is_refused(v7, load):
    cases = [
        (v7[1], asked(heard("a", 0), "b", system="S"), "a system text beside a recording"),
        (load("v13")[1], asked(heard("", 0), "b", system="S", transcribes=True), "a system text beside a recording"),
        (v7[1], asked("a", Turn(ASSISTANT, "b", True, clips=(ContentClip(0, CLIP),))), "a recording in an answer"),
        (v7[1], asked("a", "b", tools=({"name": "f"},)), "tools or reasoning_content"),
        (v7[1], asked("a", Turn(ASSISTANT, "b", True, thoughts="t")), "tools or reasoning_content"),
        (load("v7", tokens=None)[1], asked(heard("a", 0), "b"), r"its tokenizer lacks \[BEGIN_AUDIO\]"),
        (load("v3")[1], asked(heard("a", 0), "b"), "Tekken v3 has no place"),
    ]
    without = {number: text for number, text in VOXTRAL_TOKENS.items() if text != "[TRANSCRIBE]"}
    cases.append((load("v7", tokens=without)[1], transcript("six"), r"lacks \[TRANSCRIBE\]"))
    for template, dialogue, message in cases:
        with pytest.raises(TemplateRefusedError, match=message):
            template.render(dialogue)
        (result,) = template.render_many([dialogue])
        assert isinstance(result, TemplateRefusedError)


def test_unknown_versions_and_lacking_tokens_are_named(load):
    with pytest.raises(
        ModelFileError, match=r"tekken.json: config.version: the dialogues of v15 .* chat_template.jinja"
    ):
        load("v15")
    with pytest.raises(ModelFileError, match=r"\[SYSTEM_PROMPT\] is missing"):
        load("v7", tokens={number: text for number, text in VOXTRAL_TOKENS.items() if number != 17})


def test_the_same_dialogues_with_tokenizer_json_beside(tmp_path, v7):
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    made.add_special_tokens(list(VOXTRAL_TOKENS.values()))
    write_tekken(tmp_path)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    template = chat_template(load_tokenizer(tmp_path))
    dialogue = transcript("six", "en")
    assert template.render(dialogue) == v7[1].render(dialogue)


def test_languages_are_two_letter_codes(v7, load):
    for wrong in ("EN", "eng", "xx", "zh-CN"):
        with pytest.raises(TemplateRefusedError, match=r"language: .* no two-letter code"):
            v7[1].render(transcript("six", wrong))
        with pytest.raises(DataError, match=r"asr_language: .* no two-letter code"):
            load("v7", Request(language=wrong))
