"""Resampling against recorded vectors of torchaudio."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from erniekit.codecs.resampling import resample
from tests.codecs.seeded_folders import seeded_sound

with np.load(Path(__file__).parent / "recorded/resampled.npz") as recorded:
    RECORDED = dict(recorded)


@pytest.mark.parametrize("case", RECORDED)
def test_it_is_what_torchaudio_computes(case):
    rate, wanted, samples = (int(number) for number in case.split())
    ours = resample(seeded_sound(f"{rate} {wanted}", samples), rate, wanted)
    assert ours.dtype == np.float32 and len(ours) == -(-samples * wanted // rate)
    np.testing.assert_allclose(ours, RECORDED[case], atol=1e-6)


def test_a_tone_stays_a_tone_and_one_rate_is_left_alone():
    time = np.arange(2400) / 24_000
    tone = np.sin(2 * np.pi * 440 * time).astype(np.float32)
    expected = np.sin(2 * np.pi * 440 * np.arange(1600) / 16_000)
    np.testing.assert_allclose(resample(tone, 24_000, 16_000)[50:-50], expected[50:-50], atol=2e-3)
    assert resample(tone, 16_000, 16_000) is tone
