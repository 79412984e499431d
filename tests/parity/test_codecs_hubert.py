"""Features of speech models against transformers 4: every hidden state, on odd lengths; and the recorded vectors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from erniekit.codecs.hubert import SpeechModel
from tests.codecs.seeded_folders import seeded_sound, seeded_tensor
from tests.codecs.speech_models import CASES, LENGTHS, TINY
from tests.codecs.test_hubert import RECORDED
from tests.parity.record_codecs import record_speech_models

pytestmark = pytest.mark.parity
CLASSES = {"hubert": transformers.HubertModel, "wav2vec2": transformers.Wav2Vec2Model}


def their_model(model_type, changes):
    model = CLASSES[model_type](CLASSES[model_type].config_class(**{**TINY, **changes})).eval()
    values = {name: torch.tensor(seeded_tensor(name, tuple(v.shape))) for name, v in model.state_dict().items()}
    model.load_state_dict({**model.state_dict(), **values})
    return model


def save(model, folder, do_normalize):
    model.save_pretrained(folder)
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=do_normalize)
    extractor.save_pretrained(folder)
    return extractor


@pytest.mark.parametrize("name, model_type, changes", CASES, ids=[name for name, _, _ in CASES])
def test_every_hidden_state_is_theirs(name, model_type, changes, tmp_path):
    model = their_model(model_type, changes)
    normalises = "large" in name
    extractor = save(model, tmp_path, normalises)
    ours = [SpeechModel(tmp_path, layer) for layer in range(model.config.num_hidden_layers + 1)]
    for samples in LENGTHS:
        if samples < ours[0].shortest:
            continue
        sound = seeded_sound(name, samples)
        inputs = extractor(sound, sampling_rate=16_000, return_tensors="pt").input_values
        with torch.no_grad():
            states = model(inputs, output_hidden_states=True).hidden_states
        assert len(states) == len(ours)
        for mine, state in zip(ours, states, strict=True):
            np.testing.assert_allclose(mine.features(sound), state[0].numpy(), atol=5e-5)


def test_the_inputs_of_a_ctc_model_and_old_names_of_weight_norm(tmp_path):
    from safetensors.torch import load_file, save_file

    model = transformers.HubertForCTC(transformers.HubertConfig(**TINY, vocab_size=7)).eval()
    save(model, tmp_path, True)
    sound = seeded_sound("ctc", 900)
    first = SpeechModel(tmp_path).features(sound)
    with torch.no_grad():
        inputs = transformers.Wav2Vec2FeatureExtractor()(sound, sampling_rate=16_000, return_tensors="pt").input_values
        theirs = model(inputs, output_hidden_states=True).hidden_states[-1][0].numpy()
    np.testing.assert_allclose(first, theirs, atol=5e-5)
    weights = load_file(tmp_path / "model.safetensors")
    old = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    for new_name, old_name in old.items():
        weights = {name.replace(new_name, old_name): value for name, value in weights.items()}
    assert any(name.endswith("conv.weight_g") for name in weights)
    save_file(weights, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(SpeechModel(tmp_path).features(sound), first)


def test_published_widths(tmp_path):
    """Base models have 12 layers of 768; a second of sound is enough to meet every shape of the convolutions."""
    torch.manual_seed(0)
    model = transformers.HubertModel(transformers.HubertConfig(num_hidden_layers=2)).eval()
    save(model, tmp_path, False)
    sound = seeded_sound("second", 16_000)
    with torch.no_grad():
        theirs = model(torch.tensor(sound)[None]).last_hidden_state[0].numpy()
    ours = SpeechModel(tmp_path)
    assert ours.frame_rate == 50 and theirs.shape == (49, 768)
    np.testing.assert_allclose(ours.features(sound), theirs, atol=1e-4)


def test_the_recorded_vectors_are_what_transformers_computes(tmp_path):
    record_speech_models(tmp_path)
    stored, now = np.load(RECORDED), np.load(tmp_path / Path(RECORDED).name)
    assert stored.files == now.files
    for key in stored.files:
        if key.endswith("facts"):
            assert json.loads(bytes(stored[key])) == json.loads(bytes(now[key]))
        else:
            np.testing.assert_allclose(stored[key], now[key], atol=2e-6)
