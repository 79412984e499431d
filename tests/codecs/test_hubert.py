"""Features of speech models against recorded vectors of transformers 4, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from erniekit.codecs.hubert import SpeechModel, normalise
from erniekit.errors import ConfigurationError, DataError, ModelFileError
from tests.codecs.seeded_folders import seeded_sound, write_folder
from tests.codecs.speech_models import CASES

RECORDED = Path(__file__).parent / "recorded/speech_models.npz"
PLAIN = {"do_normalize": False}
every_case = pytest.mark.parametrize("number", range(len(CASES)), ids=[name for name, _, _ in CASES])


def facts(number=0):
    with np.load(RECORDED) as recorded:
        return json.loads(bytes(recorded[f"{number}/facts"]))


def tiny(folder, preprocessor=PLAIN, number=0, **changes):
    case = facts(number)
    return write_folder(folder, {**case["config"], **changes}, case["shapes"], preprocessor)


@every_case
def test_every_hidden_state_is_what_transformers_computes(number, tmp_path):
    with np.load(RECORDED) as recorded:
        states = recorded[f"{number}/states"]
    case = facts(number)
    folder = tiny(tmp_path, number=number)
    for layer, expected in enumerate(states):
        model = SpeechModel(folder, layer)
        features = model.features(seeded_sound(case["name"], 403))
        assert features.dtype == np.float32 and features.shape == expected.shape == (len(expected), model.size)
        np.testing.assert_allclose(features, expected, atol=5e-5)


def test_facts_of_a_model(tmp_path):
    model = SpeechModel(tiny(tmp_path))
    assert (model.sampling_rate, model.frame_rate, model.size, model.layer) == (16_000, 800, 16, 3)
    assert [model.config.frames(samples) for samples in (29, 30, 49, 50, 403)] == [0, 1, 1, 2, 19]
    assert model.shortest == 30 and model.features(seeded_sound("short", 30)).shape == (1, 16)
    with pytest.raises(DataError, match=r"29 samples.*at least 30"):
        model.features(seeded_sound("short", 29))
    with pytest.raises(DataError, match="1 of 40 samples are NaN"):
        model.features(np.float32([0] * 39 + [np.nan]))


def test_a_sound_is_normalised_as_its_preprocessor_config_says(tmp_path):
    sound = seeded_sound("loud", 500)
    plain = SpeechModel(tiny(tmp_path / "plain"))
    normalising = SpeechModel(tiny(tmp_path / "normalising", {"do_normalize": True, "sampling_rate": 16_000}))
    silent = SpeechModel(tiny(tmp_path / "default", None))  # transformers normalises where nothing is said
    expected = plain.features(normalise(sound))
    np.testing.assert_array_equal(normalising.features(sound), expected)
    np.testing.assert_array_equal(silent.features(sound), expected)
    assert np.abs(plain.features(sound) - expected).max() > 1e-3
    assert abs(normalise(sound).mean()) < 1e-6 and abs(normalise(sound).std() - 1) < 1e-4
    np.testing.assert_array_equal(normalise(np.zeros(9, np.float32)), np.zeros(9))


def test_the_fingerprint_is_that_of_the_features(tmp_path):
    folder = tiny(tmp_path / "a")
    model = SpeechModel(folder, 1)
    assert model.fingerprint == SpeechModel(tiny(tmp_path / "b"), 1).fingerprint
    others = [SpeechModel(folder, 2), SpeechModel(tiny(tmp_path / "c", {"do_normalize": True}), 1)]
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layers.0.layer_norm.bias"][3] += 1e-3
    save_file(weights, folder / "model.safetensors")
    others.append(SpeechModel(folder, 1))
    assert len({model.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_only_what_a_layer_depends_on_is_read(tmp_path):
    folder = tiny(tmp_path)
    weights = load_file(folder / "model.safetensors")
    before = SpeechModel(folder, 1).features(seeded_sound("x", 403))
    save_file({name: v for name, v in weights.items() if ".layers.2." not in name}, folder / "model.safetensors")
    np.testing.assert_array_equal(SpeechModel(folder, 1).features(seeded_sound("x", 403)), before)
    with pytest.raises(ModelFileError, match=r"encoder\.layers\.2\.attention\.q_proj\.weight, which config"):
        SpeechModel(folder)


@every_case
def test_pieces_of_a_recording_give_what_the_whole_gives(number, tmp_path, monkeypatch):
    model, sound = SpeechModel(tiny(tmp_path, number=number)), seeded_sound("long", 3017)
    whole = model.features(sound)
    monkeypatch.setattr("erniekit.codecs.attention._BLOCK", 1000)
    monkeypatch.setattr("erniekit.codecs.hubert.PIECE_FRAMES", 7)
    np.testing.assert_allclose(model.features(sound), whole, atol=5e-5)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "wavlm"}, "model_type: 'wavlm' is no speech model; known: hubert, wav2vec2"),
        ({"feat_extract_norm": "batch"}, "feat_extract_norm: expected group or layer, got 'batch'"),
        ({"hidden_act": "maxout"}, "hidden_act: 'maxout' is not supported"),
        ({"conv_dim": [8, 12]}, "conv_dim, conv_stride and conv_kernel have different lengths"),
        ({"conv_dim": [8, 0, 3]}, "conv_dim: expected a list of numbers above 0"),
        ({"num_attention_heads": 3}, "hidden_size 16 is no multiple of num_attention_heads"),
        ({"num_hidden_layers": 10**9}, "encoder.layers.3.attention.q_proj.weight, which config.json asks for"),
        ({"layer_norm_eps": float("inf")}, "layer_norm_eps: expected a number such as 1e-05, got inf"),
        ({"layer_norm_eps": 1.0}, r"layer_norm_eps: expected a number above 0 and up to 0\.001, got 1\.0"),
        ({"hidden_size": "16"}, "hidden_size: expected a value such as 768, got '16'"),
        (
            {"hidden_size": 32},
            r"projection.weight has shape \[16, 10\]; config.json asks for \[32, 10\]",
        ),
        (
            {"num_conv_pos_embeddings": 9},
            r"conv.weight has shape \[16, 4, 8\]; config.json asks for \[16, 4, 9\]",
        ),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(changes, message, tmp_path):
    with pytest.raises(ModelFileError, match=message):
        SpeechModel(tiny(tmp_path, **changes))


@pytest.mark.parametrize("layer", [-1, 4])
def test_a_layer_that_the_model_lacks_is_refused(layer, tmp_path):
    with pytest.raises(ConfigurationError, match=f"layer {layer}: .* has 3 layers; choose from 0 to 3"):
        SpeechModel(tiny(tmp_path), layer)
