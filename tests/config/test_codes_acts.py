"""Proofs of section 3.2: which codec is fitted or opened for `erniekit codes`, on what, and by how many processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.cli import main
from erniekit.config import Config
from erniekit.data.media.code_shard_reader import read_shards
from erniekit.data.media.code_shards import CodedRecording
from erniekit.errors import ConfigurationError, DataError, ModelFileError
from erniekit.runners.codes import write_codes
from tests.codecs.codec_cases import write_codec
from tests.config.samples import load, problems
from tests.data.media.sounds import RATE, noise, tone, write
from tests.log_capture import captured_log

ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal, sys
from erniekit import cli
from erniekit.runners.codes_progress import CodesProgress

seen = []

def recording(progress, seconds):  # the second one, when the first one's shard is complete
    seen.append(seconds)
    if len(seen) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

CodesProgress.recording = recording
if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[1:]))
"""
SMALL = {"codec": "kmeans", "codebook_size": 4, "codec_fit_seconds": 2.0}
Codes = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight recordings of a quarter of a second: tones that rise, in noise."""
    folder = tmp_path_factory.mktemp("recordings")
    lines = []
    for number in range(8):
        sound = tone(0.25, RATE, 200 + 150 * number) + noise(RATE // 4, seed=number)
        write(folder / f"{number}.wav", sound)
        lines.append(json.dumps({"id": str(number), "audio_path": f"{number}.wav", "text": "la"}))
    (folder / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def words(data: Path, output: Path, **values: Any) -> list[str]:
    own = {"train_dataset_path": data / "data.jsonl", "output_dir": output, "samples_per_shard": 3}
    return [f"{name}={value}" for name, value in (own | {"codes_workers": 1} | values).items()]


@pytest.fixture
def encode(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Encode in this process; the codes and the folder."""
    from erniekit.codecs.workers import encode_clip

    def here(clips: Any, opener: Any, reading: Any, workers: int) -> Any:
        codec = opener()
        return (encode_clip(codec, clip, reading) for clip in clips)

    monkeypatch.setattr("erniekit.runners.code_blocks.encode_clips", here)

    def run(name: str, **values: Any) -> tuple[Codes, Path]:
        output = tmp_path / name
        write_codes(Config.load(None, words(data, output, **values), verb="codes"))
        items = read_shards(output)
        return {item.key: item.codes.tolist() for item in items if isinstance(item, CodedRecording)}, output

    return run


@pytest.mark.proves("codec", "codec_levels", "codebook_size")
def test_the_codec_that_is_fitted(encode: Any) -> None:
    fitted, output = encode("a", codec="residual_kmeans", codebook_size=5, codec_fit_seconds=1)
    units, _ = encode("b", **SMALL)
    assert {len(codes) for codes in fitted.values()} == {4} and {len(codes) for codes in units.values()} == {1}
    assert [max(np.max(codes) for codes in found.values()) for found in (fitted, units)] == [4, 3]
    two, _ = encode("c", codec=output / "codec", codec_levels=2)
    assert two == {key: codes[:2] for key, codes in fitted.items()}
    three, _ = encode("d", codec="residual_kmeans", codebook_size=5, codec_fit_seconds=1, codec_levels=3)
    assert three == {key: codes[:3] for key, codes in fitted.items()}


@pytest.mark.proves("codec_fit_seconds")
def test_how_much_sound_a_codec_is_fitted_on(encode: Any) -> None:
    found = [encode(f"{seconds}", **SMALL | {"codec_fit_seconds": seconds})[0] for seconds in (0.3, 2.0)]
    assert found[0] != found[1]


@pytest.mark.proves("codec_features", "codec_layer")
def test_the_features_of_units(encode: Any, tmp_path: Path) -> None:
    from tests.codecs.test_hubert import PLAIN, tiny

    model = tmp_path / "hubert"
    tiny(model, PLAIN)
    values = SMALL | {"codec_features": model, "device": "cpu"}
    of_layers = [encode(f"{layer}", **values | {"codec_layer": layer})[0] for layer in (1, 3, "null")]
    assert of_layers[0] != of_layers[1] == of_layers[2]  # it has three layers
    rates = [len(found["0"][0]) for found in (of_layers[0], encode("mel", **SMALL)[0])]
    assert rates[0] != rates[1]


@pytest.mark.proves("codec_centroids")
def test_centroids_of_others(encode: Any, tmp_path: Path) -> None:
    """The first centroid is far away from every frame, so no code is 0, and all are below 6."""
    from tests.codecs.test_hubert import PLAIN, tiny

    tiny(tmp_path / "hubert", PLAIN)
    values = SMALL | {"codec_features": tmp_path / "hubert", "codec_layer": 2, "device": "cpu"}
    size = json.loads((tmp_path / "hubert/config.json").read_text(encoding="utf-8"))["hidden_size"]
    centroids = np.random.default_rng(0).standard_normal((6, size))
    centroids[0] = 1e6
    np.save(tmp_path / "of_others.npy", centroids)
    found, output = encode("out", **values | {"codec_centroids": tmp_path / "of_others.npy"})
    units = np.concatenate([codes[0] for codes in found.values()])
    assert units.min() > 0 and units.max() < 6 and len(set(units.tolist())) > 1
    assert json.loads((output / "codes.json").read_text(encoding="utf-8"))["codebook_size"] == 6
    np.save(tmp_path / "narrow.npy", centroids[:, :-1])
    with pytest.raises(ModelFileError, match="fitted on other features"):
        encode("wrong", **values | {"codec_centroids": tmp_path / "narrow.npy"})


def test_neural_codecs_are_opened_from_their_folders(encode: Any, tmp_path: Path) -> None:
    folder = write_codec(tmp_path / "encodec", "encodec", 0)
    found, output = encode("out", codec=folder, codec_levels=3, device="cpu")
    assert {np.shape(codes) for codes in found.values()} == {(3, 25)}
    facts = json.loads((output / "codes.json").read_text(encoding="utf-8"))
    assert (facts["codec"], facts["sampling_rate"], facts["codebook_size"]) == (str(folder), 4000, 16)
    assert main(["codes", "--decode", str(output), "--output", str(tmp_path / "wav"), "--device", "cpu"]) == 0
    assert len(list((tmp_path / "wav").glob("*.wav"))) == 8


@pytest.mark.slow
@pytest.mark.proves("codes_workers")
def test_any_number_of_processes_writes_the_same_and_kill_9_loses_nothing(
    data: Path, tmp_path: Path, encode: Any
) -> None:
    """The real thing: processes that are killed after their first shard, and what this process writes by itself."""
    empty = tmp_path / "empty.yaml"
    empty.write_text("seed: 42\n", encoding="utf-8")

    values = {"codec": "residual_kmeans", "codebook_size": 5, "codec_fit_seconds": 1, "samples_per_shard": 1}
    own = words(data, tmp_path / "killed", **values, codes_workers=2)
    command = ["codes", str(empty), *own]
    with captured_log() as told:
        encode("whole", **values, codes_workers=1)
    assert any(line.endswith(" 1 process") for line in told) and "x real time" in "".join(told)
    killed = subprocess.run([sys.executable, "-c", KILLED, *command], cwd=ROOT, capture_output=True, text=True)
    assert "2 processes" in killed.stdout and killed.returncode == -signal.SIGKILL, killed.stderr
    command = [sys.executable, "-m", "erniekit", *command]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "continuing: " in again.stdout and "fitted already" in again.stdout
    for path in (tmp_path / "whole").rglob("*"):
        other = tmp_path / "killed" / path.relative_to(tmp_path / "whole")
        if path.is_file() and path.name not in ("data.lst", "fit.json"):
            assert path.read_bytes() == other.read_bytes(), path.name
    assert not (tmp_path / "killed/.encoding").exists()


def test_fitting_alone_leaves_a_codec_for_several_machines(data: Path, tmp_path: Path) -> None:
    yaml = tmp_path / "c.yaml"
    yaml.write_text("codec: kmeans\ncodebook_size: 4\ncodec_fit_seconds: 1\n", encoding="utf-8")
    assert main(["codes", str(yaml), *words(data, tmp_path / "out"), "--fit"]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["codec"]
    with pytest.raises(ConfigurationError, match=r"a codec that was made with other values of codebook_size"):
        write_codes(Config.load(yaml, words(data, tmp_path / "out", codebook_size=5), verb="codes"))
    with pytest.raises(ConfigurationError, match=r"--fit: codec is .*, and there is nothing to fit"):
        named = words(data, tmp_path / "o", codec=tmp_path / "out/codec")
        write_codes(Config.load(yaml, named, verb="codes"), fits_only=True)


def test_values_that_do_not_go_together_are_refused() -> None:
    assert "kmeans has one level, not 2" in problems("codes", codec="kmeans", codec_levels=2)
    assert "codes_format jsonl has room for one level" in problems("codes", codes_format="jsonl", codec_levels=2)
    assert load("codes", codes_format="jsonl").codes.codec_levels == 1
    assert "every machine would fit a residual_kmeans" in problems("codes", codes_part="1/2")
    for part in ("0/2", "3/2", "1", "a/b"):
        assert "is no part K/N" in problems("codes", codes_part=part, codec="c")
    assert "is not a shortest and a longest" in problems("codes", duration_range="3,1")
    told = load("codes", codec="kmeans", codec_layer=3).messages
    assert any("`codec_layer`" in line and "has no effect because codec_features is log_mel" in line for line in told)


def test_the_verb_asks_for_data_and_a_folder_and_for_no_model(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)`output_dir`: is required.*`train_dataset_path`: is required"):
        Config.load(None, [], verb="codes")
    with pytest.raises(ConfigurationError, match="contains a space"):
        write_codes(Config.load(None, words(data, tmp_path / "a b"), verb="codes"))
    with pytest.raises(ConfigurationError, match=r"`codec`: /none does not exist"):
        write_codes(Config.load(None, words(data, tmp_path / "out", codec="/none"), verb="codes"))
    with pytest.raises(DataError, match="does not exist"):
        from erniekit.runners.decode import decode_codes

        decode_codes(tmp_path / "none", tmp_path / "wav")


def test_validate_knows_the_verb_and_lists_the_records(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "codec").mkdir()
    named = tmp_path / "c.yaml"
    lines = (data / "data.jsonl").read_text(encoding="utf-8") + '\n{"audio_path": "none.wav"}\n'
    (data / "more.jsonl").write_text(lines, encoding="utf-8")
    text = f"train_dataset_path: {data / 'more.jsonl'}\noutput_dir: {tmp_path / 'out'}\ncodes_format: jsonl\n"
    named.write_text(text, encoding="utf-8")
    assert main(["validate", str(named), "--data"]) == 0
    shown = capsys.readouterr().out
    assert "valid for `erniekit codes`" in shown and "records: 8 with a recording" in shown
    assert "1 record names no recording:" in shown and "more.jsonl:9: audio_path: expected a sound file" in shown
    named.write_text(f"{text}codec: {tmp_path / 'codec'}\n", encoding="utf-8")
    assert main(["validate", str(named)]) == 2
    assert "has no config.json, so it is no folder of a model" in capsys.readouterr().err
    (tmp_path / "codec" / "config.json").write_text("{}", encoding="utf-8")
    assert main(["validate", str(named), "--verb", "codes"]) == 2
    assert "model_type: expected the name of a codec, got none" in capsys.readouterr().err


def test_words_that_do_not_go_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        ([], "name a configuration file, or a folder of codes with --decode"),
        (["c.yaml", "--output", "o"], "--output, --codec and --device belong to --decode"),
        (["--decode", "o"], "--decode needs --output DIR"),
        (["c.yaml", "--decode", "o", "--output", "w"], "--decode takes no configuration"),
    ):
        assert main(["codes", *arguments]) == 2
        assert said in capsys.readouterr().err
