"""The files from which other programs make a model's features: `preprocessor_config.json` and `processor_config.json`.

transformers 4 keeps the settings of a feature extractor in the first, transformers 5 in the second, under the name
`feature_extractor`. Version 5 reads both forms, version 4 only its own, which is therefore what is written. What these
settings say has to be what the data path computes: Whisper's log-mel spectrogram.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from erniekit.errors import ModelFileError
from erniekit.json_files import read_json_object
from erniekit.model.architectures.architecture import EncoderInput

PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
PROCESSOR_FILES = (PREPROCESSOR_FILE, PROCESSOR_FILE)
NESTED = "feature_extractor"  # the key of the settings in processor_config.json
EXTRACTOR = "WhisperFeatureExtractor"
HOP, N_FFT, SAMPLING_RATE = 160, 400, 16_000


def check_processor_files(folder: Path, audio: EncoderInput) -> None:
    """Check that a model's features are those that the data path computes.

    A folder without these files says nothing, and is right. Settings that are missing have the values of
    `transformers.WhisperFeatureExtractor`. The length of a window is the encoder's: only config.json says it.

    Raises:
        ModelFileError: a setting has another value, or a file is malformed.
    """
    for path, settings in _settings_of(folder):
        for name, expected in _expected(audio).items():
            value = settings.get(name, expected)
            same = value == expected and isinstance(value, bool) is isinstance(expected, bool)
            if not same:
                raise ModelFileError(
                    f"{path}: {name} is {value!r:.80}, and features are computed here with {expected!r} only.\n"
                    "  A model that was trained with other features would not understand these. If it was not, correct "
                    "the file."
                )


def write_processor_files(folder: Path, sources: Sequence[Path], audio: EncoderInput) -> list[Path]:
    """Write these files beside a trained model, so that `transformers.AutoProcessor` opens its folder.

    Args:
        folder: of the trained model.
        sources: folders of models that it was made of, the nearest first; the files are those of the first that has
            any. Settings that none of them has follow from the model's encoder.

    Returns:
        the files written.
    """
    source = next((each for each in sources if _files_of(each)), None)
    settings = [values for _, values in _settings_of(source)] if source else []
    written = [_write(folder / PREPROCESSOR_FILE, settings[0] if settings else _made(audio))]
    if source and (source / PROCESSOR_FILE).is_file():
        values = read_json_object(source / PROCESSOR_FILE)
        written.append(_write(folder / PROCESSOR_FILE, {name: values[name] for name in values if name != NESTED}))
    return written


def _write(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return path


def _files_of(folder: Path) -> tuple[Path, ...]:
    return tuple(folder / name for name in PROCESSOR_FILES if (folder / name).is_file())


def _settings_of(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the settings of the feature extractor and the file of each, as far as there are any."""
    found = []
    for path in _files_of(folder):
        values = read_json_object(path)
        if path.name == PROCESSOR_FILE:
            if NESTED not in values:
                continue
            values = values[NESTED]
            if not isinstance(values, dict):
                raise ModelFileError(f"{path}: {NESTED}: expected a JSON object, got {type(values).__name__}")
        found.append((path, values))
    return found


def _expected(audio: EncoderInput) -> dict[str, Any]:
    return {
        "feature_extractor_type": EXTRACTOR,
        "feature_size": audio.mel_bins,
        "sampling_rate": SAMPLING_RATE,
        "hop_length": HOP,
        "n_fft": N_FFT,
        "dither": 0.0,
        "padding_value": 0.0,
    }


def _made(audio: EncoderInput) -> dict[str, Any]:
    """Return the settings of a feature extractor for an encoder, as transformers writes them."""
    samples = audio.window_frames * HOP
    seconds, rest = divmod(samples, SAMPLING_RATE)
    return {
        **_expected(audio),
        "chunk_length": samples / SAMPLING_RATE if rest else seconds,
        "n_samples": samples,
        "nb_max_frames": audio.window_frames,
        "padding_side": "right",
        "return_attention_mask": False,
    }
