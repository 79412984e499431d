"""Silence is found as pydub finds it (tools/parity/record_speaking.py); pieces are joined without clicks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from erniekit.inference.speaking.sound import (
    OF_REFERENCE,
    OF_SPEECH,
    JoinedSound,
    SoundSettings,
    louder,
    loudness,
    without_silence,
)
from tests.inference.speaking.speaking_cases import RATE as SPOKEN_RATE
from tests.inference.speaking.speaking_cases import RECORDED, SOUNDS, described, sound

RATE = 8000
PLAIN = SoundSettings(keep_silence=True, pad=0.0, fade=0.0)


@pytest.mark.parametrize("kind", ["speech", "reference"])
@pytest.mark.parametrize("name", SOUNDS)
def test_silence_is_removed_as_in_the_package(name: str, kind: str) -> None:
    expected = json.loads((RECORDED / "silence.json").read_text())[f"{name}-{kind}"]
    kept = without_silence(sound(name), SPOKEN_RATE, OF_SPEECH if kind == "speech" else OF_REFERENCE)
    assert kept.dtype == np.float32 and described(kept) == expected


def test_edges_fade_and_are_padded() -> None:
    settings = SoundSettings(keep_silence=True, pad=0.1, fade=0.05)
    made = JoinedSound(RATE, 0.2, settings).add(np.full(4000, 0.3, np.float32), last=True)
    assert len(made) == 4000 + 2 * 800
    assert not made[:800].any() and not made[-800:].any()
    np.testing.assert_allclose(made[800:1200], 0.3 * np.linspace(0, 1, 400), atol=1e-6)
    np.testing.assert_allclose(made[-1200:-800], 0.3 * np.linspace(1, 0, 400), atol=1e-6)
    assert (made[1200:-1200] == np.float32(0.3)).all()


def test_a_sound_shorter_than_its_fades() -> None:
    made = JoinedSound(RATE, None, SoundSettings(keep_silence=True, fade=1.0)).add(np.ones(7, np.float32), last=True)
    np.testing.assert_allclose(made[800:-800], [0, 0.25, 0.5, 0.5, 0.5, 0.25, 0], atol=1e-6)


def test_pieces_are_joined_over_a_gap() -> None:
    joined = JoinedSound(RATE, 1.0, PLAIN)
    first, second = joined.add(np.ones(2000, np.float32), last=False), joined.add(np.ones(3000, np.float32), last=True)
    gap = int(0.3 * RATE) // 3
    assert len(first) == 2000 and len(second) == gap + 3000
    np.testing.assert_allclose(first[-gap:], np.linspace(1, 0, gap), atol=1e-6)
    assert not second[:gap].any()
    np.testing.assert_allclose(second[gap : 2 * gap], np.linspace(0, 1, gap), atol=1e-6)
    assert second[-1] == 1.0


def test_loudness_is_that_of_the_voice() -> None:
    quiet = np.full(400, 0.02, np.float32)
    assert loudness(quiet) == pytest.approx(0.02)
    assert loudness(louder(quiet)) == pytest.approx(0.1)
    assert loudness(louder(np.full(400, 0.3, np.float32))) == pytest.approx(0.3)
    assert not louder(np.zeros(4, np.float32)).any() and loudness(np.zeros(0, np.float32)) == 0.0
    loud = np.full(100, 0.4, np.float32)
    assert JoinedSound(RATE, 0.02, PLAIN).add(loud, last=True).max() == pytest.approx(0.08)
    assert JoinedSound(RATE, 0.2, PLAIN).add(loud, last=True).max() == pytest.approx(0.4)


def test_without_a_voice_the_first_piece_that_is_heard_sets_the_loudness() -> None:
    joined = JoinedSound(RATE, None, PLAIN)
    assert not joined.add(np.zeros(5000, np.float32), last=False).any()
    assert joined.add(np.full(5000, 0.25, np.float32), last=False).max() == pytest.approx(0.5)
    assert joined.add(np.full(5000, 0.75, np.float32), last=True).max() == 1.0  # three times as loud, within the scale


def test_silence_alone_becomes_nothing() -> None:
    assert len(without_silence(np.zeros(9000, np.float32), RATE, OF_SPEECH)) == 0
    assert len(without_silence(np.zeros(0, np.float32), RATE, OF_SPEECH)) == 0
    assert len(JoinedSound(RATE, None, SoundSettings(pad=0.1)).add(np.zeros(0, np.float32), last=True)) == 1600
