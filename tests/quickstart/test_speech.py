"""The speech of the quickstart: the same for the same seed, nothing held out trained on; the model that learns it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import espeakng_loader
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
LISTENER = ROOT / "examples/models/tiny-listener"


@pytest.fixture(scope="module")
def make_speech():
    sys.path.insert(0, str(ROOT / "tools/quickstart"))
    try:
        import make_speech
    finally:
        sys.path.pop(0)
    return make_speech


def test_no_held_out_phrase_is_trained_on_and_voices_are_kept_apart(make_speech) -> None:
    files = make_speech.files()
    assert files == make_speech.files()
    trained = {phrase.text for name in ("train", "new-voice") for phrase in files[name]}
    for name in ("eval", "eval-unseen", "new-voice-eval"):
        assert trained.isdisjoint(phrase.text for phrase in files[name])
    voices = {name: {phrase.voice for phrase in drawn} for name, drawn in files.items()}
    assert len(files["train"]) == 4000 and voices["train"] == voices["eval"] and len(voices["train"]) == 8
    pairs = list(zip(files["train"][::2], files["train"][1::2], strict=True))
    assert all(one.text == other.text and one.voice != other.voice for one, other in pairs)
    assert voices["train"].isdisjoint(voices["eval-unseen"] | voices["new-voice"])
    assert voices["new-voice"] == voices["new-voice-eval"]
    digits = Counter(word for phrase in files["train"] for word in phrase.text.split())
    assert set(digits) == set(make_speech.DIGITS) and min(digits.values()) > 0.8 * max(digits.values())


def test_every_voice_exists(make_speech) -> None:
    """eSpeak NG takes its plain voice where a variant is not there, without a word."""
    variants = {path.name for path in (Path(espeakng_loader.get_data_path()) / "voices" / "!v").iterdir()}
    for voice in (*make_speech.VOICES, *make_speech.UNSEEN_VOICES, *make_speech.NEW_VOICE):
        _, _, variant = voice.partition("+")
        assert not variant or variant in variants, voice


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The first phrases, made by two processes."""
    folders = (tmp_path_factory.mktemp("speech"), tmp_path_factory.mktemp("speech"))
    tool = str(ROOT / "tools/quickstart/make_speech.py")
    for folder in folders:
        command = [sys.executable, tool, "--first", "3", "--output", str(folder)]
        subprocess.run(command, capture_output=True, check=True)
    return folders


def test_the_same_seed_gives_the_same_recordings(made: tuple[Path, Path]) -> None:
    first, second = ({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")} for folder in made)
    assert len(first) == 5 + 5 * 3 and first == second


def test_recordings_are_as_loud_and_as_noisy_as_drawn(make_speech, made: tuple[Path, Path]) -> None:
    import soundfile

    noisy = 0
    for name, drawn in make_speech.files().items():
        records = [json.loads(line) for line in (made[0] / f"{name}.jsonl").read_text().splitlines()]
        for record, phrase in zip(records, drawn[:3], strict=True):
            assert record["text"] == phrase.text and record["voice"] == phrase.voice
            sound, rate = soundfile.read(made[0] / record["audio_path"])
            before, after = int(phrase.before * rate), int(phrase.after * rate)
            assert rate == 16_000 and 0.2 < len(sound) / rate - phrase.before - phrase.after < 2.6
            assert abs(np.abs(sound).max() - phrase.level) < 1e-3
            noise = np.square(np.concatenate([sound[:before], sound[len(sound) - after :]])).mean()
            if phrase.snr is None:
                assert noise == 0
            else:
                noisy += 1
                power = np.square(sound[before : len(sound) - after]).mean() - noise
                assert abs(10 * math.log10(power / noise) - phrase.snr) < 1
    assert noisy > 5


def test_the_listener_is_what_its_tool_makes_and_small() -> None:
    command = [sys.executable, str(ROOT / "tools/quickstart/make_listener.py"), "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_listener_is_small_and_hears_what_its_processor_makes() -> None:
    from erniekit.model.architectures.model_config import ModelConfig

    config = ModelConfig.from_folder(LISTENER)
    assert config.parameter_count() < 3_000_000
    encoder = config.architecture.audio(config)
    extractor = json.loads((LISTENER / "preprocessor_config.json").read_text())
    assert (encoder.mel_bins, encoder.window_frames) == (extractor["feature_size"], extractor["nb_max_frames"])


def test_every_digit_is_one_token(make_speech) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(LISTENER / "tokenizer.json"))
    phrase = " ".join(make_speech.DIGITS)
    encoded = tokenizer.encode(phrase)
    assert len(encoded.ids) == len(make_speech.DIGITS) and tokenizer.decode(encoded.ids) == phrase


@pytest.mark.parametrize("name", ["asr", "asr-lora"])
def test_the_configurations_read_what_is_made(name: str, make_speech) -> None:
    from erniekit.config import Config

    config = Config.load(ROOT / f"examples/configs/quickstart/{name}.yaml", verb="train")
    assert set(config.training.train_dataset_type) == set(config.evaluation.eval_dataset_type) == {"asr"}
    made = {f"output/quickstart/speech/{file}.jsonl" for file in make_speech.files()}
    assert made.issuperset((*config.training.train_dataset_path, *config.evaluation.eval_dataset_path))
