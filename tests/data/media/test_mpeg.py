"""The frames of MP3 files, counted without decoding."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.data.media.mpeg import MAX_TRIMMED, sample_count
from tests.data.media.sounds import noise, write


@pytest.mark.parametrize("rate", [8000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000])
@pytest.mark.parametrize("channels", [1, 2])
def test_frames_of_every_version_and_rate_are_counted(tmp_path, rate, channels):
    samples = 5 * rate
    content = Path(write(tmp_path / "s.mp3", noise(samples, channels), rate)).read_bytes()
    found = sample_count(content)
    assert found is not None and samples <= found <= samples + MAX_TRIMMED
    behind_tags = b"ID3\x04\0\0\0\0\x01\x00" + b"\xff\xfb" * 64 + content + b"TAG" + bytes(125)
    assert sample_count(behind_tags) == found
    assert sample_count(content[: len(content) // 2]) == pytest.approx(found / 2, abs=3 * 1152)


def test_layers_have_frames_of_their_own_sizes():
    """MPEG-1 at 44.1 kHz: layer I with 32 kbit/s, II with 32, III with 32; frames of 32, 104 and 104 bytes."""
    for header, size, samples in ((0xFFFF10, 32, 384), (0xFFFD10, 104, 1152), (0xFFFB10, 104, 1152)):
        frame = header.to_bytes(3, "big") + bytes(size - 3)
        assert sample_count(frame * 5) == 5 * samples


def test_what_cannot_be_counted():
    assert sample_count((0xFFFB00).to_bytes(3, "big") + bytes(500)) is None  # a free bit rate
    assert sample_count(b"") == sample_count(b"\xff" * 50) == sample_count(b"a text") == 0
