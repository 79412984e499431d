"""`erniekit speak`: words, files, streams, exit codes."""

from __future__ import annotations

import json
from io import BytesIO, TextIOWrapper
from pathlib import Path

import numpy as np
import pytest
import soundfile

from erniekit.build.text_reading import TEXT_READING_FILE, TextReading, write_text_reading
from erniekit.cli import main
from tests.inference.speaking.speaker_folder import CODES, LEVELS, speaker_folder

LONG = "One two three. Four five six seven! Eight nine; ten eleven."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaker_folder(tmp_path_factory.mktemp("speaker"))


def speak(model: Path, *words: object) -> int:
    return main(["speak", str(model), "--unmask-steps", "2", "--device", "cpu", *map(str, words)])


def test_one_text_becomes_one_file(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--text", "one two", "--duration", "0.5", "--output", tmp_path / "a.wav", "--keep-silence"]
    assert speak(model, *words, "--save-codes", tmp_path / "a.npy") == 0
    shown = capsys.readouterr()
    assert shown.out == "" and f"1 of 1: {tmp_path / 'a.wav'}: 0.7 s of sound, 1 piece" in shown.err
    assert "first sound after" in shown.err and "x real time" in shown.err
    sound, rate = soundfile.read(tmp_path / "a.wav")
    codes = np.load(tmp_path / "a.npy")
    assert rate == 8000 and len(sound) == 31 * 128 + 1600 and codes.shape == (LEVELS, 31) and codes.max() < CODES
    assert speak(model, *words) == 2
    assert "never overwritten" in capsys.readouterr().err


def test_parameters_and_seeds_act(model: Path, tmp_path: Path) -> None:
    def codes(name: str, *words: str) -> np.ndarray:
        more = ["--output", tmp_path / f"{name}.wav", "--save-codes", tmp_path / f"{name}.npy"]
        assert speak(model, "--text", "one two", "--duration", "0.5", *more, *words) == 0
        return np.load(tmp_path / f"{name}.npy")

    first = codes("first")
    assert (first == codes("again")).all()
    assert (first != codes("seed", "--seed", "7")).any()
    assert (first != codes("steps", "--num-step", "9")).any()
    assert (first != codes("classes", "--class-temperature", "3")).any()


def test_a_model_is_opened_where_it_is_to_compute(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from erniekit.errors import UserError
    from erniekit.inference.speaking.speaker import SpeechModel

    given = []

    def load(folder: Path, *, device: str, ignored_keys: tuple[str, ...], **named: object) -> None:
        given.append((device, ignored_keys))
        raise UserError("enough")

    monkeypatch.setattr(SpeechModel, "load", load)
    words = ["--text", "one", "--output", tmp_path / "a.wav", "--ignore-config-keys", "future_key"]
    assert speak(model, *words) == 2
    assert given == [("cpu", ("future_key",))]


def test_texts_are_drawn_by_the_seed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from erniekit.inference import engine

    seeds = []
    sampling_from = engine.sampling_from
    monkeypatch.setattr(
        engine, "sampling_from", lambda parameters, seed: seeds.append(seed) or sampling_from(parameters, seed)
    )
    assert speak(model, "--text", "one", "--duration", "0.1", "--output", tmp_path / "a.wav", "--seed", "7") == 0
    assert seeds == [7]


def test_a_file_of_texts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soundfile.write(tmp_path / "voice.wav", 0.2 * np.random.default_rng(0).standard_normal(9000), 8000)
    records = [
        {"text": "one", "id": "first", "voice": "voice.wav", "voice_text": "two"},
        {"text": "two", "voice": "absent.wav", "voice_text": "two"},
        {"text": "three", "voice": "voice.wav"},
        {"text": "four", "language": "en", "speed": 2},
    ]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert speak(model, "--texts", tmp_path / "texts.jsonl", "--output", tmp_path / "out", "--format", "flac") == 2
    shown = capsys.readouterr().err
    assert "error: 2 of 4 texts cannot be spoken" in shown
    assert "absent.wav" in shown and "texts.jsonl:3: voice_text: expected what is said in" in shown
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0004.flac", "first.flac"]
    assert "4 of 4" in shown and "2 texts" in shown


def test_pieces_are_streamed_as_they_are_written_to_a_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--text", LONG, "--chunk-seconds", "1", "--chunk-threshold", "1", "--first-seconds", "0.5"]
    assert speak(model, *words, "--output", tmp_path / "a.wav") == 0
    stream = BytesIO()
    monkeypatch.setattr("sys.stdout", TextIOWrapper(stream, encoding="utf-8"))
    assert speak(model, *words, "--output", "-") == 0
    spoken, _ = soundfile.read(tmp_path / "a.wav", dtype="int16")
    np.testing.assert_array_equal(np.frombuffer(stream.getvalue()[44:], "<i2"), spoken)
    monkeypatch.undo()
    assert speak(model, *words, "--output", tmp_path / "b", "--chunks") == 0
    parts = [soundfile.read(path, dtype="int16")[0] for path in sorted((tmp_path / "b").iterdir())]
    assert len(parts) > 2
    np.testing.assert_array_equal(np.concatenate(parts), spoken)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--text", "a"], "--output"),
        (["--output", "a.wav"], "--text --texts"),
        (["--text", "a", "--output", "a.wav", "--voice", "v.wav"], "--voice needs --voice-text"),
        (["--text", "a", "--output", "a.wav", "--voice-text", "v"], "name the recording"),
        (["--text", "a", "--output", "a.wav", "--continue"], "--continue goes on from --voice"),
        (["--text", "a", "--output", "a.wav", "--duration", "2", "--speed", "2"], "drop one of them"),
        (["--text", "a", "--output", "a.wav", "--speed", "0"], "expected a number from 0.1 to 10"),
        (["--text", "a", "--output", "-", "--chunks"], "is one stream"),
        (["--text", "a", "--output", "-", "--format", "flac"], "is a stream of wav or raw"),
        (["--text", "a", "--text", "b", "--output", "a.wav"], "is one file, and there are 2 texts"),
        (["--text", "a", "--output", "a.wav", "--guidance-scale", "-1"], "guidance_scale"),
        (["--texts", "absent.txt", "--output", "out"], "absent.txt"),
    ],
)
def test_words_that_do_not_go_together(
    model: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["speak", str(model), *words]) == 2
    assert told in capsys.readouterr().err


def test_other_models_are_refused(tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert speak(tiny_base, "--text", "a", "--output", tmp_path / "a.wav") == 2
    assert "writes text and no codes" in capsys.readouterr().err


def test_options_without_effect_are_told(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    words = ["--text", "a", "--min-p", "0.1", "--temperature", "1", "--output"]
    assert speak(model, *words, tmp_path / "a.wav") == 0
    assert "no effect: --min-p, --temperature, because the model was trained with tts_objective: masked" in (
        capsys.readouterr().err
    )
    other = speaker_folder(tmp_path_factory.mktemp("levels"), "vall_e")
    assert speak(other, *words, tmp_path / "b.wav", "--max-seconds", "0.2") in (0, 2)
    shown = capsys.readouterr().err
    assert "no effect: --unmask-steps, because the model was trained with tts_objective: ar_nar" in shown


def test_the_configuration_of_a_run_names_the_model_that_it_has_left(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tts.yaml"
    path.write_text(f"stage: TTS\ntrain_dataset_path: data\ntrain_dataset_type: codes\noutput_dir: {model}\nseed: 3\n")
    assert speak(path, "--text", "one", "--output", tmp_path / "a.wav") == 0
    shown = capsys.readouterr()
    assert (tmp_path / "a.wav").is_file() and "no effect" not in shown.out + shown.err


def test_a_published_model_is_told_languages_by_their_codes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--text", "one", "--duration", "0.2", "--language", "English", "--output", tmp_path / "a.wav"]
    assert speak(model, *words) == 0
    assert "warning: --text: language: 'English' is no code of a language" in capsys.readouterr().err
    write_text_reading(model, TextReading(tells_language=False))
    try:
        assert speak(model, *words[:-1], tmp_path / "b.wav") == 0
    finally:
        (model / TEXT_READING_FILE).unlink()
    shown = capsys.readouterr().err
    assert "warning" not in shown and "no effect: --language, because the model was trained with" in shown
