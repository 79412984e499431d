"""EnCodec against recorded vectors of transformers 4, in pieces, and what is refused."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from erniekit.codecs import encodec
from erniekit.codecs.encodec import LOUDNESS, Encodec
from erniekit.errors import ConfigurationError, DataError, ModelFileError
from tests.codecs.codec_cases import ENCODEC_CASES, RECORDED, case_sound, write_codec

CAUSAL, CHUNKS = 0, 1
every_case = pytest.mark.parametrize("number", range(len(ENCODEC_CASES)), ids=[name for name, _ in ENCODEC_CASES])


def recorded(number, what):
    with np.load(RECORDED) as file:
        return file.get(f"encodec/{number}/{what}")


@every_case
def test_codes_scales_and_sound_are_transformers(number, tmp_path):
    codec = Encodec(write_codec(tmp_path, "encodec", number))
    channels = codec.config.seanet.audio_channels
    codes, scales = codec.encode_channels(case_sound(ENCODEC_CASES[number][0], channels))
    assert codes.dtype == np.int32
    np.testing.assert_array_equal(codes, recorded(number, "codes"))
    if codec.config.normalize:
        np.testing.assert_allclose(scales, recorded(number, "scales"), rtol=1e-6)
    else:
        assert scales is None
    sound = codec.decode_channels(codes, scales)
    assert sound.dtype == np.float32
    np.testing.assert_allclose(sound, recorded(number, "sound"), atol=1e-5)


def test_a_codec_of_one_channel(tmp_path):
    codec = Encodec(write_codec(tmp_path, "encodec", CAUSAL))
    assert (codec.levels, codec.codebook_size, codec.sampling_rate, codec.frame_rate) == (15, 16, 4000, 100.0)
    sound = case_sound(ENCODEC_CASES[CAUSAL][0])[0]
    codes = codec.encode(sound)
    np.testing.assert_array_equal(codes, recorded(CAUSAL, "codes"))
    decoded = codec.decode(codes.astype(np.int16))
    np.testing.assert_allclose(decoded, recorded(CAUSAL, "sound")[0], atol=1e-5)
    assert [codec.encode(sound[:samples]).shape[1] for samples in (1, 39, 40, 41)] == [1, 1, 1, 2]


def test_a_codec_of_two_channels_takes_sound_of_one_and_gives_it_a_loudness(tmp_path):
    codec = Encodec(write_codec(tmp_path, "encodec", CHUNKS))
    assert codec.frame_rate == 4000 * 25 / 960
    sound = case_sound("one")[0]
    codes = codec.encode(sound)
    both, scales = codec.encode_channels(np.stack([sound, sound]))
    np.testing.assert_array_equal(codes, both)
    assert codes.shape == (15, 27) and len(scales) == 2
    np.testing.assert_array_equal(codec.encode(100 * sound), codes)  # loudness is what the scales tell
    np.testing.assert_allclose(codec.decode(codes), codec.decode_channels(codes, [LOUDNESS, LOUDNESS]).mean(0))
    first = codes[:, :25]
    np.testing.assert_allclose(codec.decode_channels(first, [2.0]), 20 * codec.decode_channels(first), rtol=1e-5)
    with pytest.raises(DataError, match="codes of 2 chunks need as many scales, not 1"):
        codec.decode_channels(codes, scales[:1])


@pytest.mark.parametrize("number", [0, 2, 3])
def test_long_sound_goes_through_in_pieces(number, tmp_path, monkeypatch):
    codec = Encodec(write_codec(tmp_path, "encodec", number))
    sound = case_sound("long", samples=5003)[0]
    codes = codec.encode(sound)
    whole = codec.decode(codes)
    lengths = []
    quantize = encodec.quantize
    monkeypatch.setattr(encodec, "quantize", lambda x, books: lengths.append(x.shape[0]) or quantize(x, books))
    for frames in (7, 30):
        monkeypatch.setattr(codec, "_piece", frames)
        lengths.clear()
        np.testing.assert_array_equal(codec.encode(sound), codes)
        assert len(lengths) > 2 and sum(lengths) == 126
        np.testing.assert_allclose(codec.decode(codes), whole, atol=1e-6)


def test_fewer_levels_are_the_first_ones(tmp_path):
    folder = write_codec(tmp_path, "encodec", CAUSAL)
    every, three = Encodec(folder), Encodec(folder, levels=3)
    sound = case_sound("levels")[0]
    codes = every.encode(sound)
    np.testing.assert_array_equal(three.encode(sound), codes[:3])
    np.testing.assert_array_equal(three.decode(codes[:3]), every.decode(codes[:3]))
    assert every.config.levels_at(1.5) == 3 and every.config.levels_at(3) == 7 and every.config.levels_at(6) == 15
    with pytest.raises(ConfigurationError, match=r"a bandwidth of 2 kbit/s: this EnCodec has 1.5, 3, 6"):
        every.config.levels_at(2.0)
    for levels in (0, 16):
        with pytest.raises(ConfigurationError, match=f"{levels} levels: .* has 15; choose from 1"):
            Encodec(folder, levels=levels)


def test_the_fingerprint_tells_what_changes_codes(tmp_path):
    folder = write_codec(tmp_path / "a", "encodec", CAUSAL)
    same = Encodec(write_codec(tmp_path / "b", "encodec", CAUSAL, architectures=["EncodecModel"]))
    assert Encodec(folder).fingerprint == same.fingerprint
    others = [Encodec(folder, levels=3), Encodec(write_codec(tmp_path / "c", "encodec", CAUSAL, pad_mode="constant"))]
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layers.0.conv.bias"] += 1
    save_file(weights, folder / "model.safetensors")
    others.append(Encodec(folder))
    assert len({same.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_what_cannot_be_coded_is_refused(tmp_path):
    codec = Encodec(write_codec(tmp_path, "encodec", CAUSAL))
    with pytest.raises(DataError, match="a recording without samples"):
        codec.encode(np.zeros(0, np.float32))
    with pytest.raises(DataError, match="1 of 3 samples are NaN"):
        codec.encode(np.array([0, np.nan, 0], np.float32))
    with pytest.raises(DataError, match="code 16 of level 1, frame 2 is out of range"):
        codec.decode(np.array([[0, 0, 0], [0, 0, 16]]))
    with pytest.raises(DataError, match="codes without frames"):
        codec.decode(np.zeros((3, 0), int))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_type": "layer"}, "norm_type: 'layer' is none of weight_norm, time_group_norm"),
        ({"pad_mode": "circular"}, "pad_mode: 'circular' is none of"),
        ({"audio_channels": 3}, "audio_channels: 3 is neither 1 nor 2"),
        ({"target_bandwidths": [0.1]}, "target_bandwidths: the largest leaves no level"),
        ({"target_bandwidths": "all"}, "target_bandwidths: expected a list of numbers"),
        ({"chunk_length_s": 1.0}, "chunk_length_s .* comes with an overlap"),
        ({"chunk_length_s": 1.0, "overlap": 1.0}, "an overlap of at least 0 and less than 1"),
        ({"trim_right_ratio": 0.5, "use_causal_conv": False}, r"trim_right_ratio: 0\.5 needs use_causal_conv"),
        ({"codebook_dim": 4}, "codebook_dim: 4 is not the hidden_size 10"),
        ({"sampling_rate": 0}, "sampling_rate: expected a number above 0"),
        ({"kernel_size": 5}, r"encoder\.layers\.0\.conv\.weight has shape \[4, 1, 7\]; config.json asks for \[4,"),
        ({"target_bandwidths": [1e9]}, r"lack quantizer\.layers\.15\.codebook\.embed"),
        ({"upsampling_ratios": [10**9] * 3}, r"config.json asks for \["),
        ({"num_lstm_layers": 3}, r"lack encoder\.layers\.10\.lstm\.weight_ih_l2"),
        ({"num_lstm_layers": 1}, r"has no place for\n  decoder\.layers\.1\.lstm\.bias_hh_l1"),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_fit_is_refused(tmp_path, changes, message):
    with pytest.raises(ModelFileError, match=message):
        Encodec(write_codec(tmp_path, "encodec", CAUSAL, **changes))


def test_opening_draws_no_random_number(tmp_path):
    folder = write_codec(tmp_path, "encodec", CAUSAL)
    paddle.seed(3)
    expected = paddle.rand([2]).tolist()
    paddle.seed(3)
    Encodec(folder)
    assert paddle.rand([2]).tolist() == expected
