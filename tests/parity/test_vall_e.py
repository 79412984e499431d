"""Codes that are written level after level, against torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from erniekit.build.speech_tokens import SpeechTokens
from erniekit.config.sections.speaking import SpeakingParameters
from erniekit.inference.sampling import Sampling
from erniekit.inference.speaking import PreparedUtterance
from erniekit.inference.speaking.ar_nar import ArNar
from erniekit.model.architectures.speaking import code_layout
from erniekit.model.weights import save_model_folder
from tests.model.tiny_speech import CODES, LEVELS, speaking_model, vall_e_config
from tests.parity.vall_e_reference import Marks, Reference, Spoken

pytestmark = pytest.mark.parity
TOKENS = SpeechTokens(50, (40, 41, 42, 43), {"continuation": 44, "stt": 45}, (46, 47), (48, 49))
MARKS = Marks(50, (40, 41, 42, 43), 44, (46, 47), (48, 49))
VOICE = np.random.default_rng(3).integers(0, CODES, (LEVELS, 6))
MOST = 12


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("one_count", [True, False])
def test_the_likeliest_codes_are_those_of_torch(tmp_path: Path, one_count: bool, both_ways: bool, bias: bool) -> None:
    config = vall_e_config(unified_position_ids=one_count, noncausal_masks=both_ways, classifiers_bias=bias)
    decoder = speaking_model(config, seed=2)
    save_model_folder(decoder, tmp_path, ())
    reference = Reference(tmp_path, MARKS)
    settings, sampling = SpeakingParameters(), Sampling(temperature=0.0)
    writer = ArNar(decoder, code_layout(config), TOKENS, settings, sampling)
    requests = [
        PreparedUtterance([5, 6, 7], None, None, [], 0, MOST),
        PreparedUtterance([8, 9], None, VOICE, [11, 12], 1, MOST),
        PreparedUtterance([3, 4, 5, 6], None, VOICE[:, :3], [], 2, MOST, continues=True),
    ]
    for request, written in zip(requests, sorted(writer.write(requests)), strict=True):
        voice = None if request.voice_codes is None else torch.from_numpy(request.voice_codes)
        spoken = Spoken(request.text_ids, voice, request.language_ids, request.continues)
        np.testing.assert_array_equal(written.codes, reference.speak(spoken, MOST).numpy())
