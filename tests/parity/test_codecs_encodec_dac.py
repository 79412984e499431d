"""EnCodec and DAC against transformers 4: equal codes, and sound within 1e-4, on odd lengths."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from erniekit.codecs.dac import Dac
from erniekit.codecs.encodec import Encodec
from tests.codecs.codec_cases import DAC_CASES, DAC_LENGTHS, ENCODEC_CASES, ENCODEC_LENGTHS, RECORDED, case_sound
from tests.parity.record_codecs import dac_coded, encodec_coded, record_encodec_and_dac, tiny_codec

pytestmark = pytest.mark.parity
every_encodec = pytest.mark.parametrize("number", range(len(ENCODEC_CASES)), ids=[name for name, _ in ENCODEC_CASES])
every_dac = pytest.mark.parametrize("number", range(len(DAC_CASES)), ids=[name for name, _ in DAC_CASES])
LONG = 34_567  # samples, several pieces


def same_sound(ours, theirs, bound=1e-4):
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, atol=bound * max(1.0, np.abs(theirs).max()))


@every_encodec
def test_codes_and_sound_of_encodec(number, tmp_path):
    model, _ = tiny_codec("encodec", number)
    model.save_pretrained(tmp_path)
    channels = model.config.audio_channels
    codec = Encodec(tmp_path)
    for samples in (*ENCODEC_LENGTHS, LONG):
        sound = case_sound(ENCODEC_CASES[number][0], channels, samples)
        theirs = encodec_coded(model, sound, 6.0)
        codes, scales = codec.encode_channels(sound)
        np.testing.assert_array_equal(codes, theirs.codes)
        same_sound(codec.decode_channels(codes, scales), theirs.sound)
        if channels == 1:
            np.testing.assert_array_equal(codec.encode(sound[0]), theirs.codes)
    for bandwidth in (1.5, 3.0):
        fewer = Encodec(tmp_path, levels=codec.config.levels_at(bandwidth))
        sound = case_sound("bandwidth", channels)
        theirs = encodec_coded(model, sound, bandwidth)
        codes, scales = fewer.encode_channels(sound)
        np.testing.assert_array_equal(codes, theirs.codes)
        same_sound(codec.decode_channels(codes, scales), theirs.sound)


@every_dac
@pytest.mark.parametrize("weight_norm", [False, True])
def test_codes_and_sound_of_dac(number, weight_norm, tmp_path):
    model, _ = tiny_codec("dac", number)
    if weight_norm:
        model.apply_weight_norm()
    model.save_pretrained(tmp_path)
    codec = Dac(tmp_path)
    for samples in (*DAC_LENGTHS, LONG):
        sound = case_sound(DAC_CASES[number][0], 1, samples)[0]
        theirs = dac_coded(model, sound)
        np.testing.assert_array_equal(codec.encode(sound), theirs.codes)
        same_sound(codec.decode(theirs.codes)[None], theirs.sound)
    theirs = dac_coded(model, sound, levels=2)
    np.testing.assert_array_equal(Dac(tmp_path, levels=2).encode(sound), theirs.codes)
    same_sound(codec.decode(theirs.codes)[None], theirs.sound)


def test_older_names_of_weight_norm_and_shards(tmp_path):
    """The published EnCodec files spell weight norm in the older way."""
    model, _ = tiny_codec("encodec", 0)
    model.save_pretrained(tmp_path / "newer", max_shard_size="5KB")
    assert len(list((tmp_path / "newer").glob("model-*.safetensors"))) > 1
    newer = Encodec(tmp_path / "newer")
    model.save_pretrained(tmp_path / "older")
    path = tmp_path / "older/model.safetensors"
    spellings = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    tensors = {}
    for name, values in load_file(path).items():
        for spelling, older in spellings.items():
            name = name.replace(spelling, older)
        tensors[name] = values
    assert any(name.endswith("weight_g") for name in tensors)
    save_file(tensors, path)
    assert Encodec(tmp_path / "older").fingerprint == newer.fingerprint
    sound = case_sound("names")[0]
    np.testing.assert_array_equal(newer.encode(sound), encodec_coded(model, sound[None], 6.0).codes)


def test_the_recorded_vectors_are_fresh(tmp_path):
    record_encodec_and_dac(tmp_path)
    with np.load(RECORDED) as recorded, np.load(tmp_path / RECORDED.name) as fresh:
        assert recorded.files == fresh.files
        for name in recorded.files:
            if recorded[name].dtype == np.float32:
                np.testing.assert_allclose(recorded[name], fresh[name], atol=1e-5)
            else:
                np.testing.assert_array_equal(recorded[name], fresh[name])


def published_width(kind, changes, sound):
    """Return a model of published sizes with random weights, whose codebooks are about where its states are."""
    torch.manual_seed(0)
    model = kind(kind.config_class(**changes)).eval()
    with torch.no_grad():
        mean, spread = (found(model.encoder(torch.tensor(sound)[None])[0], 1) for found in (torch.mean, torch.std))
    for name, values in model.state_dict().items():
        if name.endswith("embed"):
            values.normal_().mul_(spread)
        if name.endswith("layers.0.codebook.embed"):
            values.add_(mean)
    return model


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("encodec_24khz", {}),
        (
            "encodec_48khz",
            {
                "audio_channels": 2,
                "sampling_rate": 48_000,
                "normalize": True,
                "chunk_length_s": 1.0,
                "overlap": 0.01,
                "norm_type": "time_group_norm",
                "use_causal_conv": False,
                "target_bandwidths": [3.0, 6.0, 12.0, 24.0],
            },
        ),
        ("dac_44khz", {"sampling_rate": 44_100, "downsampling_ratios": [2, 4, 8, 8]}),
        ("dac_16khz", {"sampling_rate": 16_000, "downsampling_ratios": [2, 4, 5, 8], "n_codebooks": 12}),
    ],
)
def test_published_widths(name, changes, tmp_path):
    """Code a second of sound and a few samples, and print CPU times. Eight levels are 6 kbit/s at 24 kHz, 12 at 48."""
    encodec = name.startswith("encodec")
    kind = transformers.EncodecModel if encodec else transformers.DacModel
    channels, rate = changes.get("audio_channels", 1), changes.get("sampling_rate", 24_000)
    sound = case_sound(name, channels, rate + 77)
    model = published_width(kind, changes, sound)
    model.save_pretrained(tmp_path)
    codec = Encodec(tmp_path, levels=8) if encodec else Dac(tmp_path, levels=8)
    seconds = []

    def timed(compute):
        start = time.process_time()
        result = compute()
        seconds.append(time.process_time() - start)
        return result

    if encodec:
        codes, scales = timed(lambda: codec.encode_channels(sound))
        theirs = timed(lambda: encodec_coded(model, sound, 6.0 if channels == 1 else 12.0))
        decoded = timed(lambda: codec.decode_channels(theirs.codes, scales))
    else:
        codes = timed(lambda: codec.encode(sound[0]))
        theirs = timed(lambda: dac_coded(model, sound[0], 8))
        decoded = timed(lambda: codec.decode(theirs.codes)[None])
    differing = (codes != theirs.codes).any(0).sum()
    print(f"\n{name}: codes {codes.shape}, {len(np.unique(codes))} of 1024 used; {differing} frames differ")
    print(f"CPU: encode {seconds[0]:.2f} s, decode {seconds[2]:.2f} s; transformers does both in {seconds[1]:.2f} s")
    assert differing <= 1  # the rounding of a sum decides between two entries as near as each other
    same_sound(decoded, theirs.sound)
