"""The processors of transformers, opened from folders with the files that we write beside a trained model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import transformers

from erniekit.data.conversation import Conversation
from erniekit.data.media.log_mel import log_mel
from erniekit.data.templates.ernie import chat_template, encode_prompt
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.model.architectures.architecture import EncoderInput
from erniekit.model.processor_files import write_processor_files
from tests.data.conftest import write_tokenizer
from tests.data.published_templates import QWEN2_AUDIO, QWEN2_AUDIO_TOKENS
from tests.data.test_audio_parts import NAMES
from tests.data.test_mistral_template import asked, heard, transcript
from tests.data.vocabularies import write_tekken

pytestmark = pytest.mark.parity

SECONDS = 2
SOUND = (np.random.default_rng(0).standard_normal(16000 * SECONDS) * 0.1).astype(np.float32)


@pytest.fixture(params=["Auto", "own"])
def opened_by(request):
    return request.param


def published(folder: Path, target: Path, audio: EncoderInput) -> Path:
    """Return a folder with the tokenizer's files as a checkpoint has them, and ours."""
    target.mkdir()
    for path in load_tokenizer(folder).files:
        shutil.copy(path, target)
    shutil.copy(folder / "config.json", target)
    write_processor_files(target, [folder], audio)
    return target


def test_voxtral(tmp_path, opened_by):
    base = write_tekken(tmp_path / "base")
    (base / "config.json").write_text(json.dumps({"model_type": "voxtral", "audio_token_id": 24}))
    folder = published(base, tmp_path / "trained", EncoderInput(24, 128, 3000, 375, lambda frames: 375))
    kind = transformers.AutoProcessor if opened_by == "Auto" else transformers.VoxtralProcessor
    processor = kind.from_pretrained(folder)
    assert isinstance(processor, transformers.VoxtralProcessor)
    made = processor.apply_transcription_request("en", [SOUND], model_id="voxtral", sampling_rate=16000, format=["WAV"])
    tokenizer = load_tokenizer(folder)
    conversation = Conversation(transcript("", "en").turns[:1], transcribes=True, language="en")
    ours = encode_prompt(chat_template(tokenizer), tokenizer, conversation)
    place = ours.index(24)
    assert made["input_ids"][0].tolist() == [*ours[:place], *[24] * 375, *ours[place + 1 :]]
    assert made["input_features"].shape == (1, 128, 3000)
    features = processor.feature_extractor(SOUND, sampling_rate=16000)["input_features"][0]
    assert np.abs(features - log_mel(SOUND, 128, 3000)).max() < 1e-5


@pytest.mark.parametrize("saved_by", [4, 5])
def test_qwen2_audio(tmp_path, opened_by, saved_by):
    base = write_tokenizer(
        tmp_path / "base", ("<unk>", *QWEN2_AUDIO_TOKENS), **NAMES, tokenizer_class="PreTrainedTokenizerFast"
    )
    (base / "config.json").write_text(json.dumps({"model_type": "qwen2_audio", "audio_token_index": 4}))
    (base / "chat_template.json").write_text(json.dumps({"chat_template": QWEN2_AUDIO}))
    audio = EncoderInput(4, 16, 300, 75, lambda frames: frames)
    if saved_by == 5:  # what transformers 5.23 saves: the settings, within those of the processor
        (settings,) = write_processor_files(base, [], audio)
        names = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
        nested = {"processor_class": "Qwen2AudioProcessor", "feature_extractor": json.loads(settings.read_text())}
        settings.unlink()
        (base / "processor_config.json").write_text(json.dumps({**names, **nested}))
    folder = published(base, tmp_path / "trained", audio)
    kind = transformers.AutoProcessor if opened_by == "Auto" else transformers.Qwen2AudioProcessor
    processor = kind.from_pretrained(folder)
    assert isinstance(processor, transformers.Qwen2AudioProcessor)
    assert processor.chat_template == QWEN2_AUDIO
    tokenizer = load_tokenizer(folder)
    text = "".join(segment.text for segment in chat_template(tokenizer).render(asked(heard("What?", 0))))
    made = processor(text=text, audio=[SOUND], sampling_rate=16000)
    features = np.asarray(made["input_features"])
    assert features.shape == (1, 16, 300) and int(np.sum(made["feature_attention_mask"])) == 100 * SECONDS
    assert np.abs(features[0] - log_mel(SOUND, 16, 300)).max() < 1e-5
    placeholder = tokenizer.token_id("<|AUDIO|>")
    assert made["input_ids"][0].count(placeholder) == (100 * SECONDS // 2 - 2) // 2 + 1
