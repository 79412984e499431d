"""What a codec is: sound to codes in a few levels, and back where it can."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Codec(Protocol):
    """A quantizer of sound. Implementations are told by `model_type` in the `config.json` of their folder.

    Attributes:
        sampling_rate: of the sound, in Hz.
        frame_rate: frames per second.
        levels: codes per frame (codebooks, from the coarsest).
        codebook_size: a code is at least 0 and less than this.
        can_decode: whether `decode` gives sound back; k-means units of a speech model do not.
        fingerprint: hex digest of everything that determines the codes of a sound.
    """

    sampling_rate: int
    frame_rate: float
    levels: int
    codebook_size: int
    can_decode: bool
    fingerprint: str

    def encode(self, sound: np.ndarray) -> np.ndarray:
        """Return the codes int32[levels, frames] of a recording, float32[samples] of one channel from -1 to 1.

        Equal sound gives equal codes, whatever was encoded before.
        """
        ...

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return the sound float32[samples] of codes int[levels, frames].

        Raises:
            DataError: a code is out of range, or their shape is wrong.
        """
        ...
