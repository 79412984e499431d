"""What a miniature of stage TTS reads in the place of the user's codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from erniekit.codecs.open import open_codec
from erniekit.data.formats.registry import read_records
from erniekit.runners.shrink_codes import CODEC, RECORDS, codes_parameters, write_codes
from tests.config.samples import load
from tests.model.tiny_speech import CODES, LEVELS, omnivoice_config, vall_e_config

SPEECH: dict[str, Any] = {"stage": "TTS", "train_dataset_type": "codes"}
AR_NAR = {"tts_objective": "ar_nar"}


@pytest.mark.proves("batch_seconds", "audio_codebook_weights", "codebook_size", "tts_objective", "lora_codebooks")
@pytest.mark.parametrize(
    ("values", "name", "expected"),
    [
        ({}, "batch_seconds", None),
        ({"batch_seconds": 100.0, "packing": False}, "batch_seconds", 1.0),
        ({}, "audio_codebook_weights", None),
        ({"audio_codebook_weights": "1,2"}, "audio_codebook_weights", [1.0] * LEVELS),
        ({}, "codebook_size", None),
        ({"codebook_size": 1024}, "codebook_size", CODES),
        ({}, "prompt_seconds", None),
        (AR_NAR, "prompt_seconds", [0.05, 0.1]),
        (AR_NAR | {"lora": True}, "lora_codebooks", None),
        (AR_NAR | {"lora": True, "lora_codebooks": "1,2"}, "lora_codebooks", [0]),
    ],
)
def test_what_depends_on_the_levels_follows_the_small_model(values: dict[str, Any], name: str, expected: Any) -> None:
    assert codes_parameters(load(**SPEECH, **values), omnivoice_config(), Path("o")).get(name) == expected


@pytest.mark.parametrize("model", [omnivoice_config(), vall_e_config()], ids=["masked", "ar_nar"])
def test_codes_fit_their_model_and_their_codec(tmp_path: Path, model: Any) -> None:
    write_codes(model, tmp_path, seed=3)
    codec = open_codec(tmp_path / CODEC)
    assert (codec.levels, codec.codebook_size) == (LEVELS, CODES)
    records = [record for _, record in read_records(tmp_path / RECORDS, "codes")]
    assert len(records) == 16 and {record.codes.shape[0] for record in records} == {LEVELS}
    assert 0 <= min(record.codes.min() for record in records) <= max(record.codes.max() for record in records) < CODES
    assert all(record.seconds == pytest.approx(record.codes.shape[1] / codec.frame_rate) for record in records)
