"""Sound and codes that a codec refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from erniekit.codecs.checks import check_codes, check_sound
from erniekit.errors import DataError

_CODEC: Any = SimpleNamespace(levels=3, codebook_size=10)


def test_sound_of_one_channel_is_taken_as_float32() -> None:
    sound = check_sound(np.array([0.5, -1.0]))
    assert sound.dtype == np.float32 and sound.tolist() == [0.5, -1.0]
    assert check_sound(np.zeros(0, np.float32)).shape == (0,)


@pytest.mark.parametrize(
    ("sound", "message"),
    [
        (np.array([0.0, np.nan, np.inf]), "2 of 3 samples are NaN or infinite"),
        (np.zeros((2, 5), np.float32), r"one channel; got float32\[2, 5\]"),
        (np.zeros(5, np.int16), r"got int16\[5\]"),
    ],
)
def test_other_sound_is_refused(sound: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_sound(sound)


def test_codes_of_fewer_levels_are_taken() -> None:
    assert check_codes(np.array([[0, 9]], np.int16), _CODEC).dtype == np.int64


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.array([[0, 1], [2, 10]]), "code 10 of level 1, frame 1 is out of range: this codec has 10 codes"),
        (np.array([[0, -1]]), "code -1 of level 0, frame 1"),
        (np.zeros((4, 2), int), r"\[1 to 3 levels, frames\]; got int64\[4, 2\]"),
        (np.zeros((0, 2), int), r"got int64\[0, 2\]"),
        (np.zeros(2, int), r"got int64\[2\]"),
        (np.zeros((1, 2)), r"integers .* got float64\[1, 2\]"),
    ],
)
def test_other_codes_are_refused(codes: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_codes(codes, _CODEC)
