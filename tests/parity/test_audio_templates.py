"""Dialogues with recordings against the processors of transformers: the text, and the number of placeholder tokens."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import transformers

from erniekit.data.conversation import ASSISTANT, Conversation, Turn
from erniekit.data.media.clip import Clip
from erniekit.data.templates.ernie import chat_template, encode_prompt
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from tests.data.conftest import write_tokenizer
from tests.data.published_templates import QWEN2_AUDIO_TOKENS
from tests.data.test_audio_parts import NAMES
from tests.data.test_mistral_template import asked, heard

pytestmark = pytest.mark.parity

DIALOGUES = {
    "a question behind the recording": asked(heard("What is said?", 0)),
    "a recording behind the question": asked(heard("What is said? ", 14)),
    "two recordings": asked(heard("one two", 0, 4)),
    "several turns": asked(heard("a", 0), "six", "b", "ten", heard("", 0, 0), "two", "c"),
    "a system text": asked(heard("a", 0), "six", heard("c", 1), system="Be brief."),
    "no recording": asked("a", "six", "b"),
    "an answer at the end": asked(heard("a", 0), "six"),
    "words that look like recordings": asked(heard("<audio> Audio 1: \n", 3)),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = write_tokenizer(tmp_path_factory.mktemp("qwen2_audio"), ("<unk>", *QWEN2_AUDIO_TOKENS), **NAMES)
    theirs = transformers.Qwen2AudioProcessor(
        transformers.WhisperFeatureExtractor(feature_size=128),
        transformers.PreTrainedTokenizerFast.from_pretrained(str(folder)),
    )
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": theirs.chat_template}))
    tokenizer = load_tokenizer(folder)
    return tokenizer, chat_template(tokenizer), theirs


def their_message(turn: Turn) -> dict[str, Any]:
    if not turn.clips:
        return {"role": turn.role, "content": turn.content}
    parts = [
        {"type": "audio", "audio_url": part.path} if isinstance(part, Clip) else {"type": "text", "text": part}
        for part in turn.parts
    ]
    return {"role": turn.role, "content": parts}


@pytest.mark.parametrize("dialogue", DIALOGUES)
def test_texts_and_ids_are_those_of_the_processor(both, dialogue):
    tokenizer, template, theirs = both
    conversation: Conversation = DIALOGUES[dialogue]
    messages = [their_message(turn) for turn in conversation.turns]
    if conversation.system:
        messages.insert(0, {"role": "system", "content": conversation.system})
    asks = conversation.turns[-1].role != ASSISTANT
    expected = theirs.apply_chat_template(messages, add_generation_prompt=asks, tokenize=False)
    text = "".join(segment.text for segment in template.render(conversation))
    assert text == (expected if asks else expected.removesuffix("\n"))
    if asks:
        audio = [np.zeros(1600, np.float32)] * len(conversation.clips)
        sampling = {"audio": audio, "sampling_rate": 16000} if audio else {}
        ids = theirs(text=expected, **sampling)["input_ids"][0]
        placeholder = tokenizer.token_id("<|AUDIO|>")
        # 0.1 s is 10 frames, of which the encoder makes 2 states
        ours = [
            number
            for token in encode_prompt(template, tokenizer, conversation)
            for number in ([token] * 2 if token == placeholder else [token])
        ]
        assert ours == ids
