"""DAC against recorded vectors of transformers 4, in pieces, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from erniekit.codecs.dac import Dac
from erniekit.errors import ConfigurationError, DataError, ModelFileError
from tests.codecs.codec_cases import DAC_CASES, RECORDED, case_sound, write_codec

every_case = pytest.mark.parametrize("number", range(len(DAC_CASES)), ids=[name for name, _ in DAC_CASES])


def recorded(number, what):
    with np.load(RECORDED) as file:
        return file[f"dac/{number}/{what}"]


@every_case
def test_codes_and_sound_are_transformers(number, tmp_path):
    codec = Dac(write_codec(tmp_path, "dac", number))
    codes = codec.encode(case_sound(DAC_CASES[number][0])[0])
    assert codes.dtype == np.int32
    np.testing.assert_array_equal(codes, recorded(number, "codes"))
    sound = codec.decode(codes.astype(np.int16))
    assert sound.dtype == np.float32 and np.abs(sound).max() < 1
    np.testing.assert_allclose(sound, recorded(number, "sound")[0], atol=1e-5)


def test_facts_of_a_codec(tmp_path):
    codec = Dac(write_codec(tmp_path, "dac", 0))
    assert (codec.levels, codec.codebook_size, codec.sampling_rate, codec.frame_rate) == (6, 32, 4000, 100.0)
    assert [codec.encode(np.zeros(samples, np.float32)).shape[1] for samples in (1, 39, 40, 41)] == [1, 1, 1, 2]


@every_case
def test_long_sound_goes_through_in_pieces(number, tmp_path, monkeypatch):
    codec = Dac(write_codec(tmp_path, "dac", number))
    sound = case_sound("long", samples=6011)[0]
    codes = codec.encode(sound)
    whole = codec.decode(codes)
    frames = codes.shape[1]
    looked_up = []
    monkeypatch.setattr(codec, "_quantize", lambda x: looked_up.append(x.shape[2]) or Dac._quantize(codec, x))
    for piece in (9, 40):
        monkeypatch.setattr(codec, "_piece", piece)
        looked_up.clear()
        np.testing.assert_array_equal(codec.encode(sound), codes)
        assert len(looked_up) > 1 and sum(looked_up) == frames
        np.testing.assert_allclose(codec.decode(codes), whole, atol=2e-6)


def test_fewer_levels_are_the_first_ones(tmp_path):
    folder = write_codec(tmp_path, "dac", 0)
    every, two = Dac(folder), Dac(folder, levels=2)
    sound = case_sound("levels")[0]
    codes = every.encode(sound)
    np.testing.assert_array_equal(two.encode(sound), codes[:2])
    np.testing.assert_array_equal(two.decode(codes[:2]), every.decode(codes[:2]))
    assert every.fingerprint != two.fingerprint
    with pytest.raises(ConfigurationError, match=r"7 levels: .* has 6; choose from 1"):
        Dac(folder, levels=7)


def test_the_fingerprint_tells_what_changes_codes(tmp_path):
    folder = write_codec(tmp_path / "a", "dac", 0)
    known = Dac(folder).fingerprint
    assert Dac(write_codec(tmp_path / "b", "dac", 0)).fingerprint == known
    weights = load_file(folder / "model.safetensors")
    for name, changes in (("decoder.conv1.bias", False), ("quantizer.quantizers.5.codebook.weight", True)):
        weights[name] += 1
        save_file(weights, folder / "model.safetensors")
        assert (Dac(folder).fingerprint != known) == changes


def test_what_cannot_be_coded_is_refused(tmp_path):
    codec = Dac(write_codec(tmp_path, "dac", 0))
    with pytest.raises(DataError, match="a recording without samples"):
        codec.encode(np.zeros(0, np.float32))
    with pytest.raises(DataError, match="1 of 3 samples are NaN"):
        codec.encode(np.array([0, np.inf, 0], np.float32))
    with pytest.raises(DataError, match="code 32 of level 1, frame 2 is out of range"):
        codec.decode(np.array([[0, 0, 0], [0, 0, 32]]))
    with pytest.raises(DataError, match="codes without frames"):
        codec.decode(np.zeros((3, 0), int))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden_size: 64: expected 32, as other values say"),
        ({"upsampling_ratios": [2, 4, 5]}, r"upsampling_ratios: \[2, 4, 5\]: expected \[5, 4, 2\]"),
        ({"codebook_size": "many"}, "codebook_size: expected a value such as 1024, got 'many'"),
        ({"downsampling_ratios": [2, 4, 4]}, r"encoder\.block\.2\.conv1\.weight has shape \[32, 16, 10\]; config"),
        ({"n_codebooks": 7}, r"lack quantizer\.quantizers\.6\.in_proj\.weight"),
        ({"decoder_hidden_size": 64}, r"decoder\.conv1\.weight has shape \[32, 32, 7\]"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path, changes, message):
    with pytest.raises(ModelFileError, match=message):
        Dac(write_codec(tmp_path, "dac", 0, **changes))
