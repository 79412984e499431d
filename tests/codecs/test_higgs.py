"""The tokenizer of Higgs Audio v2 against recorded vectors of transformers 5, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from erniekit.codecs.higgs import Higgs
from erniekit.errors import ConfigurationError, DataError, ModelFileError
from tests.codecs.higgs_models import CASES, SAMPLES
from tests.codecs.seeded_folders import seeded_sound, write_folder

RECORDED = Path(__file__).parent / "recorded/higgs.npz"
every_case = pytest.mark.parametrize("number", range(len(CASES)), ids=[name for name, _ in CASES])


def facts_of(number=0):
    with np.load(RECORDED) as recorded:
        return json.loads(bytes(recorded[f"{number}/facts"]))


def tiny(folder, number=0, **changes):
    facts = facts_of(number)
    config = {**facts["config"], **changes}
    for key in ("acoustic_model_config", "semantic_model_config"):
        if isinstance(changes.get(key), dict):
            config[key] = {**facts["config"][key], **changes[key]}
    return write_folder(folder, config, facts["shapes"])


@every_case
def test_codes_and_sound_are_what_transformers_computes(number, tmp_path):
    facts, codec = facts_of(number), Higgs(tiny(tmp_path, number))
    for samples in SAMPLES:
        with np.load(RECORDED) as recorded:
            codes, sound = recorded[f"{number}/{samples}/codes"], recorded[f"{number}/{samples}/sound"]
        mine = codec.encode(seeded_sound(f"{facts['name']} {samples}", samples))
        assert mine.dtype == np.int32
        np.testing.assert_array_equal(mine, codes)
        decoded = codec.decode(codes)
        assert decoded.dtype == np.float32
        np.testing.assert_allclose(decoded, sound, atol=1e-4)


def test_facts_of_a_codec(tmp_path):
    codec = Higgs(tiny(tmp_path))
    assert (codec.sampling_rate, codec.frame_rate, codec.levels, codec.codebook_size) == (24_000, 25, 4, 32)
    assert codec.can_decode
    for samples, frames in [(1, 1), (960, 1), (961, 2), (4811, 6)]:
        codes = codec.encode(seeded_sound("any", samples))
        assert codes.shape == (4, frames) and codec.decode(codes).shape == (960 * frames,)
    with pytest.raises(DataError, match="without samples"):
        codec.encode(np.zeros(0, np.float32))


def test_branches_that_do_not_fit_together_are_told(tmp_path):
    """Published speech models see 400 samples in a frame; this one sees so many that it has a frame less."""
    facts = facts_of()
    facts["config"]["semantic_model_config"]["conv_kernel"][2] = 30
    facts["shapes"]["semantic_model.feature_extractor.conv_layers.2.conv.weight"][2] = 30
    codec = Higgs(write_folder(tmp_path, facts["config"], facts["shapes"]))
    with pytest.raises(DataError, match="960 samples is too short for the speech model"):
        codec.encode(seeded_sound("short", 900))
    with pytest.raises(DataError, match="2880 samples has 4 acoustic and 2 semantic frames"):
        codec.encode(seeded_sound("long", 2880))


@every_case
def test_pieces_of_a_recording_give_what_the_whole_gives(number, tmp_path, monkeypatch):
    codec, sound = Higgs(tiny(tmp_path, number)), seeded_sound("long", 9011)
    codes = codec.encode(sound)
    decoded = codec.decode(codes)
    for frames in (1, 7):
        monkeypatch.setattr(codec, "_piece", frames)
        np.testing.assert_array_equal(codec.encode(sound), codes)
        np.testing.assert_allclose(codec.decode(codes), decoded, atol=5e-5)  # the sums of a product depend on its rows


def test_fewer_levels_are_the_coarsest(tmp_path):
    folder, sound = tiny(tmp_path), seeded_sound("levels", 3000)
    whole = Higgs(folder)
    codes = whole.encode(sound)
    fewer = Higgs(folder, levels=2)
    np.testing.assert_array_equal(fewer.encode(sound), codes[:2])
    np.testing.assert_array_equal(fewer.decode(codes[:2]), whole.decode(codes[:2]))
    assert fewer.fingerprint != whole.fingerprint and whole.fingerprint == Higgs(folder, levels=4).fingerprint
    with pytest.raises(ConfigurationError, match=r"5 levels: .* has 4; choose from 1"):
        Higgs(folder, levels=5)


def test_weight_norm_is_folded(tmp_path):
    """Published files hold the acoustic convolutions with weight norm, or without."""
    folder, sound = tiny(tmp_path), seeded_sound("norm", 2000)
    codec = Higgs(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [
        name for name in weights if name.startswith("acoustic") and name.endswith(("conv1.weight", "t1.weight"))
    ]:
        path, direction = name.removesuffix(".weight"), weights.pop(name)
        norm = np.sqrt((direction**2).sum((1, 2), keepdims=True))
        weights[f"{path}.parametrizations.weight.original0"] = norm
        weights[f"{path}.parametrizations.weight.original1"] = direction * np.float32(3)
    save_file(weights, folder / "model.safetensors")
    normed = Higgs(folder)
    codes = codec.encode(sound)
    np.testing.assert_array_equal(normed.encode(sound), codes)
    np.testing.assert_allclose(normed.decode(codes), codec.decode(codes), atol=1e-5)


@pytest.mark.parametrize(
    "codes, message",
    [
        ([[0, 32]], "code 32 of level 0, frame 1 is out of range"),
        ([[0]] * 5, r"integers \[1 to 4 levels, frames\]; got int64\[5, 1\]"),
        (np.zeros((4, 0), np.int64), "codes without frames"),
    ],
)
def test_codes_that_are_none_are_refused(codes, message, tmp_path):
    with pytest.raises(DataError, match=message):
        Higgs(tiny(tmp_path)).decode(np.array(codes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"acoustic_model_config": {"model_type": "encodec"}}, "supported are dac as acoustic_model_config"),
        ({"semantic_model_config": {"model_type": "wavlm"}}, "hubert, wav2vec2 as semantic_model_config"),
        ({"semantic_model_config": {"do_stable_layer_norm": True}}, "do_stable_layer_norm is not supported"),
        ({"semantic_model_config": 3}, "semantic_model_config: expected an object, got 3"),
        ({"strides": [1]}, "strides and channel_ratios have different lengths"),
        ({"target_bandwidths": [0.01]}, "target_bandwidths: 0.01 kbit/s are less than a level of 32 codes"),
        ({"codebook_size": 1}, "codebook_size, target_bandwidths: 0.5 kbit/s are less than a level of 1 codes"),
        ({"acoustic_model_config": {"decoder_hidden_size": 40}}, "upsampling_ratios cannot halve decoder_hidden_size"),
        ({"target_bandwidths": [0.7]}, r"lack quantizer.quantizers.4.project_in.weight"),
        ({"semantic_model_config": {"num_hidden_layers": 1}}, r"no place for.*\s+semantic_model.encoder.layers.1"),
        ({"codebook_dim": 7}, r"project_in.weight has shape \[6, 22\]; config.json asks for \[7, 22\]"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(changes, message, tmp_path):
    with pytest.raises(ModelFileError, match=message):
        Higgs(tiny(tmp_path, **changes))
