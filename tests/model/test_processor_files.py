"""The settings of feature extractors: those that are not computed here are refused, and new folders get them."""

from __future__ import annotations

import json

import pytest

from erniekit.data.media.clip import AudioInputs
from erniekit.errors import ModelFileError
from erniekit.model.architectures.architecture import EncoderInput
from erniekit.model.processor_files import (
    HOP,
    PREPROCESSOR_FILE,
    PROCESSOR_FILE,
    SAMPLING_RATE,
    check_processor_files,
    write_processor_files,
)

AUDIO = EncoderInput(24, 128, 3000, 375, lambda frames: 375)
# as transformers 4.55 publishes it for Voxtral
PUBLISHED = {
    "chunk_length": 30, "dither": 0.0, "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128,
    "hop_length": 160, "n_fft": 400, "n_samples": 480000, "nb_max_frames": 3000, "padding_side": "right",
    "padding_value": 0.0, "processor_class": "VoxtralProcessor", "return_attention_mask": False, "sampling_rate": 16000,
}  # fmt: skip


def write(folder, name, values):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(values), encoding="utf-8")
    return folder


def read(folder, name=PREPROCESSOR_FILE):
    return json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("settings", [PUBLISHED, {}, {"chunk_length": 300}, {"dither": 0}])
def test_published_settings_are_what_is_computed(settings, tmp_path):
    check_processor_files(write(tmp_path, PREPROCESSOR_FILE, settings), AUDIO)
    check_processor_files(write(tmp_path, PROCESSOR_FILE, {"feature_extractor": settings}), AUDIO)
    write(tmp_path, PROCESSOR_FILE, {"processor_class": "VoxtralProcessor"})
    check_processor_files(tmp_path, AUDIO)


def test_a_folder_without_settings_says_nothing(tmp_path):
    check_processor_files(tmp_path, AUDIO)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hop_length", 200), ("n_fft", 512), ("sampling_rate", 8000), ("dither", 1e-4), ("padding_value", 1.0),
        ("feature_extractor_type", "SeamlessM4TFeatureExtractor"), ("feature_size", 80), ("hop_length", "160"),
        ("n_fft", None), ("dither", False),
    ],
)  # fmt: skip
def test_other_features_are_refused_by_name(name, value, tmp_path):
    write(tmp_path, PREPROCESSOR_FILE, {**PUBLISHED, name: value})
    with pytest.raises(ModelFileError, match=rf"{PREPROCESSOR_FILE}: {name} is .* computed here with"):
        check_processor_files(tmp_path, AUDIO)
    (tmp_path / PREPROCESSOR_FILE).unlink()
    write(tmp_path, PROCESSOR_FILE, {"feature_extractor": {**PUBLISHED, name: value}})
    with pytest.raises(ModelFileError, match=rf"{PROCESSOR_FILE}: {name} is "):
        check_processor_files(tmp_path, AUDIO)


@pytest.mark.parametrize("content", ["[]", "{", ""])
def test_malformed_files_are_named(content, tmp_path):
    (tmp_path / PREPROCESSOR_FILE).write_text(content)
    with pytest.raises(ModelFileError, match=PREPROCESSOR_FILE):
        check_processor_files(tmp_path, AUDIO)
    (tmp_path / PREPROCESSOR_FILE).unlink()
    write(tmp_path, PROCESSOR_FILE, {"feature_extractor": content})
    with pytest.raises(ModelFileError, match="feature_extractor: expected a JSON object"):
        check_processor_files(tmp_path, AUDIO)


def test_the_files_of_the_nearest_model_are_written(tmp_path):
    trained, base = tmp_path / "trained", tmp_path / "base"
    trained.mkdir()
    settings = {**PUBLISHED, "processor_class": "Qwen2AudioProcessor", "chunk_length": 300}
    write(base, PREPROCESSOR_FILE, settings)
    write(base, PROCESSOR_FILE, {"processor_class": "Qwen2AudioProcessor"})
    target = tmp_path / "target"
    target.mkdir()
    written = write_processor_files(target, [trained, base], AUDIO)
    assert [path.name for path in written] == [PREPROCESSOR_FILE, PROCESSOR_FILE]
    assert read(target) == settings and read(target, PROCESSOR_FILE) == {"processor_class": "Qwen2AudioProcessor"}
    write(trained, PREPROCESSOR_FILE, PUBLISHED)
    write_processor_files(target, [trained, base], AUDIO)
    assert read(target) == PUBLISHED
    write_processor_files(target, [target], AUDIO)  # a folder that is its own source
    assert read(target) == PUBLISHED


def test_settings_of_transformers_5_are_written_as_4_reads_them(tmp_path):
    base, target = tmp_path / "base", tmp_path / "target"
    target.mkdir()
    write(base, PROCESSOR_FILE, {"feature_extractor": PUBLISHED, "audio_token": "<|AUDIO|>"})
    write_processor_files(target, [base], AUDIO)
    assert read(target) == PUBLISHED and read(target, PROCESSOR_FILE) == {"audio_token": "<|AUDIO|>"}


@pytest.mark.parametrize(("frames", "seconds"), [(3000, 30), (300, 3), (40, 0.4)])
def test_settings_follow_from_the_encoder_where_there_are_none(frames, seconds, tmp_path):
    audio = AUDIO._replace(mel_bins=16, window_frames=frames)
    write_processor_files(tmp_path, [tmp_path / "nothing"], audio)
    made = read(tmp_path)
    check_processor_files(tmp_path, audio)
    assert (made["feature_size"], made["chunk_length"], made["nb_max_frames"]) == (16, seconds, frames)
    assert isinstance(made["chunk_length"], type(seconds))
    assert made.keys() == PUBLISHED.keys() - {"processor_class"}


def test_the_data_path_computes_with_these_numbers():
    inputs = AudioInputs(*AUDIO)
    assert (inputs.hop, inputs.sampling_rate) == (HOP, SAMPLING_RATE)
