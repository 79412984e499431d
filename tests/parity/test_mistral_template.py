"""The dialogues of Tekken vocabularies against mistral-common: chats, system texts, recordings, transcripts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import mistral_common
import numpy as np
import pytest
import soundfile
from mistral_common.protocol.instruct.chunk import AudioChunk, TextChunk
from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.transcription.request import TranscriptionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from erniekit.data.conversation import ASSISTANT, USER, Conversation, Turn
from erniekit.data.media.clip import AudioInputs, Clip, ContentClip
from erniekit.data.templates.ernie import chat_template, encode_prompt, encode_sample
from erniekit.data.templates.transcription import LANGUAGES
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from tests.data.vocabularies import AUDIO_SECTION, VOXTRAL_TOKENS, special_tokens_of_tekken, tekken_values, write_tekken

pytestmark = pytest.mark.parity

VOXTRAL = AudioInputs(24, 128, 3000, 375, lambda frames: 375)
SECONDS = {Clip("/short.wav"): 0.4, Clip("/long.wav"): 30.1, Clip("/whole.wav"): 60.0}
SHORT, LONG, WHOLE = SECONDS
WORDS = "What [INST]<s> is\nsaid  <audio>?"


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Return a function from a version to our tokenizer and template, and mistral-common's."""
    made = {}

    def open_version(version: str):
        if version not in made:
            folder = tmp_path_factory.mktemp("tekken")
            published = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
            values = json.loads(published.read_text(encoding="utf-8"))
            values["config"]["version"] = version
            values["special_tokens"] = special_tokens_of_tekken(VOXTRAL_TOKENS, 1000)
            values.pop("image")
            if version != "v3":
                values["audio"] = AUDIO_SECTION
            write_tekken(folder, values)
            tokenizer = load_tokenizer(folder)
            theirs = MistralTokenizer.from_file(folder / "tekken.json")
            made[version] = tokenizer, chat_template(tokenizer), theirs
        return made[version]

    return open_version


def sound(clip: Clip) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(round(SECONDS[clip] * 16000), np.float32), 16000, format="WAV")
    return file.getvalue()


def expanded(ids: list[int], conversation: Conversation) -> list[int]:
    """Return the ids with as many placeholder tokens as the encoder has states."""
    clips = iter(conversation.clips)
    counts = (VOXTRAL.clip_tokens(round(SECONDS[next(clips)] * 16000)) if number == 24 else 1 for number in ids)
    return [number for number, count in zip(ids, counts, strict=True) for _ in range(count)]


def their_messages(conversation: Conversation):
    if conversation.system:
        yield SystemMessage(content=conversation.system)
    for turn in conversation.turns:
        if turn.role == ASSISTANT:
            yield AssistantMessage(content=turn.content)
        elif turn.clips:
            chunks = [
                TextChunk(text=part) if isinstance(part, str) else AudioChunk(input_audio=sound(part))
                for part in turn.parts
            ]
            yield UserMessage(content=chunks)
        else:
            yield UserMessage(content=turn.content)


def user(text: str, *clips: ContentClip) -> Turn:
    return Turn(USER, text, clips=clips)


def answer(text: str) -> Turn:
    return Turn(ASSISTANT, text, True)


CHATS = {
    "one question": (user(WORDS),),
    "several turns": (user("a"), answer("b "), user(" c"), answer("  d"), user("e")),
    "two turns of the user": (user("a"), user("b"), answer("c"), user(""), user("d"), user("e ")),
}
LISTENING = {
    "a recording first": (user(WORDS, ContentClip(0, SHORT)),),
    "a recording last": (user(WORDS, ContentClip(len(WORDS), SHORT)),),
    "inside": (user(WORDS, ContentClip(5, LONG)),),
    "alone": (user("", ContentClip(0, WHOLE)),),
    "two, and a second turn": (
        user("ab", ContentClip(0, SHORT), ContentClip(1, LONG)), answer("six"), user("c", ContentClip(0, SHORT)),
    ),
    "two turns of the user": (
        user("a"), user("bc", ContentClip(1, SHORT)), user("d"), user("e", ContentClip(0, SHORT)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("system", ["", "Be [AUDIO] brief."])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13"])
def test_chats(load, version, chat, system):
    check(load(version), Conversation(CHATS[chat], system))


@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("chat", LISTENING)
@pytest.mark.parametrize("version", ["v7", "v11", "v13"])
def test_recordings(load, version, chat, system):
    if system and version != "v13":
        pytest.skip("mistral-common refuses it, as we do")
    check(load(version), Conversation(LISTENING[chat], system))


def check(opened, conversation):
    tokenizer, template, theirs = opened
    request = ChatCompletionRequest(messages=list(their_messages(conversation)))
    expected = theirs.encode_chat_completion(request).tokens
    assert expanded(encode_prompt(template, tokenizer, conversation), conversation) == expected


@pytest.mark.parametrize("version", ["v7", "v11", "v13"])
@pytest.mark.parametrize("clip", SECONDS)
@pytest.mark.parametrize("language", ["", "en", "fr"])
def test_transcripts(load, version, clip, language):
    tokenizer, template, theirs = load(version)
    request = TranscriptionRequest(audio=sound(clip), language=language or None)
    turns = (user("", ContentClip(0, clip)), answer("six ducks"))
    conversation = Conversation(turns, transcribes=True, language=language)
    prompt = Conversation(turns[:1], transcribes=True, language=language)
    expected = theirs.encode_transcription(request).tokens
    assert expanded(encode_prompt(template, tokenizer, prompt), prompt) == expected
    sample = encode_sample(template, tokenizer, conversation)
    target = theirs.instruct_tokenizer.tokenizer.encode("six ducks", bos=False, eos=True)
    assert sample.labels[sample.labels >= 0].tolist() == target


def test_every_language_is_one_that_mistral_common_takes():
    import pycountry

    assert {each.alpha_2 for each in pycountry.languages if hasattr(each, "alpha_2")} == LANGUAGES


def test_the_small_vocabulary_of_the_plain_run_opens(tmp_path):
    values = tekken_values(tokens=VOXTRAL_TOKENS) | {"audio": AUDIO_SECTION}
    assert MistralTokenizer.from_file(write_tekken(tmp_path, values) / "tekken.json")
