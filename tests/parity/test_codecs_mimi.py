"""Mimi against transformers 4: equal codes, and sound within 1e-4, on odd lengths."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import transformers

from erniekit.codecs.mimi import Mimi
from tests.codecs.mimi_models import CASES, LENGTHS, TINY
from tests.codecs.seeded_folders import seeded_sound
from tests.codecs.test_mimi import RECORDED
from tests.parity.record_codecs import record_mimi, seeded_model

pytestmark = pytest.mark.parity


def theirs(model, sound, levels=None):
    with torch.no_grad():
        codes = model.encode(torch.tensor(sound)[None, None], num_quantizers=levels).audio_codes
        return codes[0].numpy(), model.decode(codes).audio_values[0, 0].numpy()


@pytest.mark.parametrize("name, changes", CASES, ids=[name for name, _ in CASES])
def test_codes_are_theirs_and_so_is_the_sound(name, changes, tmp_path):
    model = transformers.MimiModel(transformers.MimiConfig(**{**TINY, **changes}))
    seeded_model(model)
    model.save_pretrained(tmp_path)
    ours = Mimi(tmp_path)
    for samples in LENGTHS:
        sound = seeded_sound(f"{name} {samples}", samples)
        codes, decoded = theirs(model, sound)
        np.testing.assert_array_equal(ours.encode(sound), codes)
        np.testing.assert_allclose(ours.decode(codes), decoded, atol=1e-4)
    for levels in range(model.config.num_semantic_quantizers, 5):
        codes, decoded = theirs(model, sound, levels)
        fewer = Mimi(tmp_path, levels=levels)
        np.testing.assert_array_equal(fewer.encode(sound), codes)
        np.testing.assert_allclose(fewer.decode(codes), decoded, atol=1e-4)
        np.testing.assert_allclose(ours.decode(codes), decoded, atol=1e-4)


def test_published_widths(tmp_path):
    """The sizes of kyutai/mimi, on a second of sound and a few samples."""
    torch.manual_seed(0)
    model = transformers.MimiModel(transformers.MimiConfig()).eval()
    with torch.no_grad():
        for name, values in model.named_buffers():
            if name.endswith("embed_sum"):
                values.normal_()
    model.save_pretrained(tmp_path)
    ours = Mimi(tmp_path, levels=8)
    assert (ours.sampling_rate, ours.frame_rate, ours.codebook_size) == (24_000, 12.5, 2048)
    sound = seeded_sound("second", 24_101)
    codes, decoded = theirs(model, sound, 8)
    started = time.perf_counter()
    mine = ours.encode(sound), ours.decode(codes)
    middle = time.perf_counter()
    theirs(model, sound, 8)
    print(f"ours {middle - started:.2f} s, theirs {time.perf_counter() - middle:.2f} s")
    assert codes.shape == (8, 13)
    np.testing.assert_array_equal(mine[0], codes)
    np.testing.assert_allclose(mine[1], decoded, atol=1e-4)


def test_the_recorded_vectors_are_what_transformers_computes(tmp_path):
    record_mimi(tmp_path)
    stored, now = np.load(RECORDED), np.load(tmp_path / RECORDED.name)
    assert stored.files == now.files
    for key in stored.files:
        np.testing.assert_allclose(stored[key], now[key], atol=0 if stored[key].dtype.kind in "iu" else 1e-5)
