"""Mimi against recorded vectors of transformers 4 and 5, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from erniekit.codecs.mimi import Mimi
from erniekit.errors import ConfigurationError, DataError, ModelFileError
from tests.codecs.mimi_models import CASES, SAMPLES
from tests.codecs.seeded_folders import seeded_sound, write_folder

RECORDED = Path(__file__).parent / "recorded/mimi.npz"
every_case = pytest.mark.parametrize("number", range(len(CASES)), ids=[name for name, _ in CASES])


def recorded(number=0):
    with np.load(RECORDED) as file:
        facts = json.loads(bytes(file[f"{number}/facts"]))
        return facts, file[f"{number}/codes"], file[f"{number}/sound"]


def tiny(folder, number=0, **changes):
    facts, _, _ = recorded(number)
    return write_folder(folder, {**facts["config"], **changes}, facts["shapes"])


@every_case
def test_codes_and_sound_are_what_transformers_computes(number, tmp_path):
    facts, codes, sound = recorded(number)
    codec = Mimi(tiny(tmp_path, number))
    mine = codec.encode(seeded_sound(facts["name"], SAMPLES))
    assert mine.dtype == np.int32
    np.testing.assert_array_equal(mine, codes)
    decoded = codec.decode(codes)
    assert decoded.dtype == np.float32
    np.testing.assert_allclose(decoded, sound, atol=1e-4)


def test_facts_of_a_codec(tmp_path):
    codec = Mimi(tiny(tmp_path))
    assert (codec.sampling_rate, codec.frame_rate, codec.levels, codec.codebook_size) == (800, 50, 4, 32)
    assert codec.can_decode
    for samples, frames in [(1, 1), (16, 1), (17, 2), (803, 51)]:
        codes = codec.encode(seeded_sound("any", samples))
        assert codes.shape == (4, frames) and codec.decode(codes).shape == (16 * frames,)


@every_case
def test_pieces_of_a_recording_give_what_the_whole_gives(number, tmp_path, monkeypatch):
    codec, sound = Mimi(tiny(tmp_path, number)), seeded_sound("long", 611)
    codes = codec.encode(sound)
    decoded = codec.decode(codes)
    for frames in (1, 7):
        monkeypatch.setattr(codec, "_piece", frames)
        np.testing.assert_array_equal(codec.encode(sound), codes)
        np.testing.assert_allclose(codec.decode(codes), decoded, atol=5e-5)


def test_fewer_levels_are_the_coarsest(tmp_path):
    folder, sound = tiny(tmp_path), seeded_sound("levels", 333)
    whole = Mimi(folder)
    codes = whole.encode(sound)
    fingerprints = {whole.fingerprint}
    for levels in (1, 2, 3):
        fewer = Mimi(folder, levels=levels)
        np.testing.assert_array_equal(fewer.encode(sound), codes[:levels])
        np.testing.assert_array_equal(fewer.decode(codes[:levels]), whole.decode(codes[:levels]))
        fingerprints.add(fewer.fingerprint)
    assert len(fingerprints) == 4
    with pytest.raises(ConfigurationError, match=r"5 levels: .* has 4; choose from 1"):
        Mimi(folder, levels=5)


def test_a_frame_attends_to_its_window(tmp_path):
    """What lies further back than the windows of all layers and the reach of the convolutions does not matter."""
    codec = Mimi(tiny(tmp_path, sliding_window=3))
    sound = seeded_sound("window", 800)
    other = sound.copy()
    other[:100] = 0.3
    codes, changed = codec.encode(sound), codec.encode(other)
    assert (codes[:, :7] != changed[:, :7]).any()
    np.testing.assert_array_equal(codes[:, 20:], changed[:, 20:])
    wide = Mimi(tiny(tmp_path / "wide"))
    assert (wide.encode(sound)[:, 20:] != codes[:, 20:]).any()


def test_the_fingerprint_is_that_of_the_codes(tmp_path):
    one = Mimi(tiny(tmp_path / "a"))
    assert one.fingerprint == Mimi(tiny(tmp_path / "b")).fingerprint
    other = Mimi(tiny(tmp_path / "c", sliding_window=7))
    weights = load_file(tmp_path / "b/model.safetensors")
    weights["downsample.conv.weight"][0, 0, 0] += 1e-3
    save_file(weights, tmp_path / "b/model.safetensors")
    assert len({one.fingerprint, other.fingerprint, Mimi(tmp_path / "b").fingerprint}) == 3


@pytest.mark.parametrize(
    "codes, message",
    [
        ([[0, 32]], "code 32 of level 0, frame 1 is out of range"),
        ([[0], [-1]], "code -1 of level 1, frame 0 is out of range"),
        ([[0]] * 5, r"integers \[1 to 4 levels, frames\]; got int64\[5, 1\]"),
        ([0, 1], r"got int64\[2\]"),
        ([[0.0]], r"got float64\[1, 1\]"),
        (np.zeros((4, 0), np.int64), "codes without frames"),
    ],
)
def test_codes_that_are_none_are_refused(codes, message, tmp_path):
    with pytest.raises(DataError, match=message):
        Mimi(tiny(tmp_path)).decode(np.array(codes))


def test_sound_that_is_none_is_refused(tmp_path):
    codec = Mimi(tiny(tmp_path))
    with pytest.raises(DataError, match="without samples"):
        codec.encode(np.zeros(0, np.float32))
    with pytest.raises(DataError, match="1 of 2 samples are NaN"):
        codec.encode(np.float32([0, np.nan]))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_act": "maxout"}, "hidden_act: 'maxout' is not supported"),
        ({"pad_mode": "circular"}, "pad_mode: 'circular' is none of constant"),
        ({"audio_channels": 2}, "audio_channels: codecs of one channel"),
        ({"num_semantic_quantizers": 4}, "num_semantic_quantizers must be less"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide"),
        ({"codebook_dim": 9}, "codebook_dim and vector_quantization_hidden_dimension differ"),
        ({"upsample_groups": 3}, "upsample_groups must divide hidden_size"),
        ({"trim_right_ratio": 3}, r"trim_right_ratio: expected at most 1, got 3\.0"),
        ({"norm_eps": 1}, r"norm_eps: expected a number above 0 and up to 0\.001, got 1\.0"),
        ({"frame_rate": 12.5}, r"frame_rate: 12.5 is not half of 100"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "scaled rotary positions"),
        ({"num_quantizers": 5}, r"lack quantizer.acoustic_residual_vector_quantizer.layers.3.codebook.cluster_usage"),
        ({"num_hidden_layers": 1}, r"no place for.*\s+decoder_transformer.layers.1"),
        ({"num_hidden_layers": 10**9}, r"lack encoder_transformer.layers.2.self_attn.q_proj.weight"),
        ({"num_filters": 6}, r"encoder.layers.0.conv.weight has shape \[4, 1, 7\]; config.json asks for \[6, 1, 7\]"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(changes, message, tmp_path):
    with pytest.raises(ModelFileError, match=message):
        Mimi(tiny(tmp_path, **changes))


def test_the_window_is_that_of_transformers_5(tmp_path):
    with np.load(RECORDED.parent / "mimi5.npz") as file:
        facts = json.loads(bytes(file["0/facts"]))
        codes, sound = file["0/803/codes"], file["0/803/sound"]
    codec = Mimi(write_folder(tmp_path / "narrow", facts["config"], facts["shapes"]))
    heard = seeded_sound(f"{facts['name']} 803", 803)
    np.testing.assert_array_equal(codec.encode(heard), codes)
    np.testing.assert_allclose(codec.decode(codes), sound, atol=1e-4)
    wide = Mimi(write_folder(tmp_path / "wide", {**facts["config"], "sliding_window": 250}, facts["shapes"]))
    assert (wide.encode(heard) != codes).any()


def test_positions_are_read_where_transformers_5_puts_them(tmp_path):
    facts, codes, _ = recorded(4)
    config = {**facts["config"], "rope_parameters": {"rope_theta": facts["config"]["rope_theta"]}}
    del config["rope_theta"]
    codec = Mimi(write_folder(tmp_path, config, facts["shapes"]))
    np.testing.assert_array_equal(codec.encode(seeded_sound(facts["name"], SAMPLES)), codes)
