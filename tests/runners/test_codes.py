"""`erniekit codes`: what is written, how it goes on after an interruption, what is refused, and sound again."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from erniekit.cli import main
from erniekit.codecs.workers import Reading, Result, encode_clip
from erniekit.config import Config
from erniekit.data.media.clip import Clip
from erniekit.data.media.code_shard_reader import ShardProblem, read_shards
from erniekit.data.media.code_shards import CodedRecording
from erniekit.errors import ConfigurationError, DataError
from erniekit.runners.codes import records_summary, write_codes
from erniekit.runners.decode import decode_codes
from tests.codecs.fakes import FRAME, LoudnessCodec, open_loudness
from tests.data.media.sounds import RATE, tone, write
from tests.log_capture import captured_log

Write = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake codec stands for any folder, and encodes here."""

    def encode(clips: Iterator[Clip], opener: Callable[[], Any], reading: Reading, workers: int) -> Iterator[Result]:
        return (encode_clip(opener(), clip, reading) for clip in clips)

    monkeypatch.setattr("erniekit.runners.code_blocks.encode_clips", encode)
    for module in ("codes", "decode"):
        opener = lambda folder, levels, device: partial(open_loudness, levels)  # noqa: E731
        monkeypatch.setattr(f"erniekit.runners.{module}.codec_opener", opener)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Seven recordings of 1 to 7 frames of growing loudness, the last two of which cannot be encoded."""
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "loudness").mkdir()
    (tmp_path / "loudness" / "config.json").write_text('{"model_type": "loudness"}', encoding="utf-8")
    records = []
    for number in range(1, 8):
        write(folder / f"{number}.wav", number / 4 * tone(number * FRAME / RATE, RATE))
        records.append({"id": f"r{number}", "audio_path": f"{number}.wav", "text": f"say {number}", "speaker": "ä"})
    (folder / "7.wav").write_bytes(b"no sound")
    records[5]["audio_path"] = "missing.wav"
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return tmp_path


def config_of(data: Path, **values: Any) -> Config:
    own = {"train_dataset_path": str(data / "data/data.jsonl"), "output_dir": str(data / "out")}
    return Config.from_mapping(own | {"codec": str(data / "loudness")} | values, verb="codes")


def coded(folder: Path) -> dict[str, list[list[int]]]:
    found = list(read_shards(folder))
    assert not [item for item in found if isinstance(item, ShardProblem)]
    return {item.key: item.codes.tolist() for item in found if isinstance(item, CodedRecording)}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.proves("random_shuffle", "seed")
def test_shards_hold_codes_and_records_and_nothing_is_lost(data: Path) -> None:
    summary = write_codes(config_of(data, samples_per_shard=3))
    out = data / "out"
    assert (summary.recordings, summary.errors) == (5, 2)
    assert {name.split("/")[0] for name in files(out)} == {"audios", "txts", "data.lst", "codes.json", "errors.jsonl"}
    codes = coded(out)
    assert sorted(codes) == ["r1", "r2", "r3", "r4", "r5"]
    assert all(len(codes[f"r{number}"][0]) == number for number in range(1, 6))
    record = next(record for path in (out / "txts").iterdir() for record in lines(path) if record["id"] == "r3")
    assert record == {
        "id": "r3", "audio_path": "3.wav", "text": "say 3", "speaker": "ä", "num_tokens": 3, "audio_duration": 0.03,
    }  # fmt: skip
    assert [(line["id"], line["place"].rpartition(":")[2]) for line in lines(out / "errors.jsonl")] == [
        ("", "6"), ("r7", "7"),
    ]  # fmt: skip
    orders = [list(codes)]
    for values in ({"seed": 7}, {"random_shuffle": False}):
        write_codes(config_of(data, overwrite_output_dir=True, **values))
        orders.append(list(coded(out)))
    assert orders[2] == sorted(codes) and len({tuple(order) for order in orders}) == 3


@pytest.mark.proves("codec", "codec_centroids", "codec_fit_seconds")
def test_the_codec_computes_on_the_device_that_is_named(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []

    def opener(folder: Path, levels: int, device: str) -> Callable[[], Any]:
        devices.append(device)
        return partial(open_loudness, levels)

    monkeypatch.setattr("erniekit.runners.codes.codec_opener", opener)
    write_codes(config_of(data, device="cpu"))
    assert len(devices) == 2 and set(devices) == {"cpu"}


def test_codes_belong_to_the_data_that_they_were_made_of(data: Path) -> None:
    from erniekit.runners.codes import _request

    other = data / "data" / "other.jsonl"
    shutil.copy(data / "data/data.jsonl", other)
    requests = [_request(config_of(data, train_dataset_path=str(file))) for file in (data / "data/data.jsonl", other)]
    assert requests[0] != requests[1]


def test_what_is_told_of_the_codec(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("erniekit.runners.codes.fit_codec", lambda config, sounds, folder, asked: folder.mkdir())
    centroids = data / "centroids.npy"
    centroids.write_bytes(b"centroids")
    caplog.set_level(logging.INFO, "erniekit")
    own = {"codec_fit_seconds": 120.0, "codec_centroids": str(centroids)}  # which only k-means takes
    write_codes(config_of(data, codec="residual_kmeans", output_dir=str(data / "a"), **own))
    assert "fitting residual_kmeans on up to 2.0 minutes" in caplog.text and "with the centroids" not in caplog.text
    caplog.clear()
    write_codes(config_of(data, codec="kmeans", output_dir=str(data / "b"), **own))
    assert f"with the centroids of {centroids}" in caplog.text and "fitting" not in caplog.text
    write_codes(config_of(data, codec="kmeans", output_dir=str(data / "c")))
    assert "fitting kmeans on up to 10.0 minutes" in caplog.text
    with pytest.raises(ConfigurationError, match=f"codec is {data / 'loudness'}, and there is nothing to fit"):
        write_codes(config_of(data), fits_only=True)


@pytest.mark.proves("seed", "random_shuffle", "overwrite_output_dir")
def test_what_a_fitted_codec_and_its_codes_depend_on(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[int]] = []

    def fit(config: Config, sounds: Callable[[int], Iterator[np.ndarray]], folder: Path, asked: Any) -> None:
        orders.append([len(sound) for sound in sounds(RATE)])
        folder.mkdir()
        (folder / "fit.json").write_text(json.dumps(asked), encoding="utf-8")

    monkeypatch.setattr("erniekit.runners.codes.fit_codec", fit)
    own = {"codec": "residual_kmeans", "random_shuffle": False}
    write_codes(config_of(data, **own, seed=3))
    request = json.loads((data / "out/codes.json").read_text(encoding="utf-8"))["request"]
    assert (request["seed"], request["random_shuffle"]) == (3, False)
    with pytest.raises(ConfigurationError, match="seed"):
        write_codes(config_of(data, **own, seed=4))
    write_codes(config_of(data, **own, seed=4, overwrite_output_dir=True))
    assert len(orders) == 2 and sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
    write_codes(config_of(data, output_dir=str(data / "named"), random_shuffle=True, seed=3))
    request = json.loads((data / "named/codes.json").read_text(encoding="utf-8"))["request"]
    assert (request["seed"], request["random_shuffle"]) == (3, True)
    write_codes(config_of(data, output_dir=str(data / "in-order"), random_shuffle=False, seed=3))
    request = json.loads((data / "in-order/codes.json").read_text(encoding="utf-8"))["request"]
    assert "seed" not in request and not request["random_shuffle"]


@pytest.mark.proves("media_dir")
def test_recordings_lie_below_the_folders_that_are_named(data: Path) -> None:
    (data / "elsewhere").mkdir()
    (data / "data/3.wav").rename(data / "elsewhere/3.wav")
    folders = [str(data / "data"), str(data / "elsewhere")]
    assert "5 with a recording" in records_summary(config_of(data))
    assert "6 with a recording" in records_summary(config_of(data, media_dir=folders))
    write_codes(config_of(data, media_dir=folders))
    assert "r3" in coded(data / "out")
    with pytest.raises(ConfigurationError, match="train_dataset_path"):
        write_codes(config_of(data))


@pytest.mark.proves("media_dir")
def test_records_are_listed_again_where_recordings_lie_elsewhere(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("erniekit.runners.codes.fit_codec", interrupted)
    caplog.set_level(logging.INFO, "erniekit")
    listed = []
    for folders in ([], [], [str(data / "data"), str(data)]):
        caplog.clear()
        with pytest.raises(KeyboardInterrupt):
            write_codes(config_of(data, codec="residual_kmeans", media_dir=folders))
        listed.append("listing the records" in caplog.text)
    assert listed == [True, False, True]


@pytest.mark.proves("codes_format")
def test_units_know_nothing_of_shards(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = data / "data/data.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace('"r1"', '"r.1"'), encoding="utf-8")
    caplog.set_level(logging.INFO, "erniekit")
    write_codes(config_of(data, codes_format="jsonl", codec_levels=1))
    assert "%2E" not in caplog.text and f"-> {data / 'out/units.jsonl'}" in caplog.text
    assert "min_num_shards" not in json.loads((data / "out/codes.json").read_text(encoding="utf-8"))["request"]
    write_codes(config_of(data, output_dir=str(data / "shards")))
    assert "%2E" in caplog.text and "1 shard in" in caplog.text


@pytest.mark.proves("samples_per_shard", "min_num_shards")
@pytest.mark.parametrize(
    ("values", "shards"),
    [
        ({}, [5]), ({"samples_per_shard": 2}, [2, 2, 1]), ({"min_num_shards": 3}, [2, 2, 1]),
        ({"samples_per_shard": 1, "min_num_shards": 3}, [1] * 5), ({"min_num_shards": 100}, [1] * 5),
    ],
)  # fmt: skip
def test_how_many_recordings_are_in_a_shard(data: Path, values: dict[str, int], shards: list[int]) -> None:
    (data / "data/7.wav").unlink()  # then five records have a recording
    write_codes(config_of(data, random_shuffle=False, **values))
    assert [int(line.split()[2]) for line in (data / "out/data.lst").read_text().splitlines()] == shards


@pytest.mark.proves("codes_format", "codec_levels")
def test_units_are_written_in_the_order_of_the_data(data: Path) -> None:
    with pytest.raises(ConfigurationError, match="room for one level, and the codec has 2; write codec_levels: 1"):
        write_codes(config_of(data, codes_format="jsonl"))
    write_codes(config_of(data, codes_format="jsonl", codec_levels=1, samples_per_shard=2, random_shuffle=True))
    found = lines(data / "out/units.jsonl")
    assert [record["id"] for record in found] == ["r1", "r2", "r3", "r4", "r5"]
    assert found[1] == {
        "id": "r2", "audio_path": "2.wav", "text": "say 2", "speaker": "ä", "duration": 0.02,
        "units": found[1]["units"], "units_per_second": 100.0,
    }  # fmt: skip
    assert len(found[1]["units"]) == 2 and not (data / "out/data.lst").exists()


@pytest.mark.proves("duration_range", "audio_peak")
def test_recordings_that_are_too_long_are_listed_and_loudness_is_scaled(data: Path) -> None:
    with captured_log() as logged:
        write_codes(config_of(data, duration_range="0.02,0.04", audio_peak=1.0))
    assert sorted(coded(data / "out")) == ["r2", "r3", "r4"]
    assert [(line["id"], line["seconds"]) for line in sorted(lines(data / "out/skipped.jsonl"), key=str)] == [
        ("r1", 0.01), ("r5", 0.05),
    ]  # fmt: skip
    assert "2 are shorter or longer than duration_range" in "\n".join(logged)
    assert {max(codes[0]) for codes in coded(data / "out").values()} == {15}


@pytest.mark.proves("codes_part")
def test_parts_are_the_whole(data: Path) -> None:
    found: list[str] = []
    for part in ("1/3", "2/3", "3/3"):
        write_codes(config_of(data, codes_part=part))
        found += coded(data / "out" / f"part-{part[0]}-of-3")
    assert sorted(found) == ["r1", "r2", "r3", "r4", "r5"] == sorted(coded(data / "out"))
    told = list((data / "out").rglob("errors.jsonl"))
    assert sum(len(lines(path)) for path in told) == 2


class Killed(BaseException):
    """Stands for kill -9: nothing catches it to tidy up."""


@pytest.mark.parametrize("form", ["shards", "jsonl"])
def test_a_command_that_is_killed_anywhere_goes_on_to_the_same_files(
    data: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    values = {"codes_format": form, "samples_per_shard": 2} | ({"codec_levels": 1} if form == "jsonl" else {})
    write_codes(config_of(data, output_dir=str(data / "whole"), **values))
    real, kills = os.replace, 0
    for steps in range(1, 40):
        left = steps

        def replaced(source: Any, target: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            real(source, target)

        monkeypatch.setattr(os, "replace", replaced)
        try:
            write_codes(config_of(data, **values))
            break
        except Killed:
            kills += 1
    monkeypatch.undo()
    whole, out = files(data / "whole"), files(data / "out")
    assert kills >= 6 and out.keys() == whole.keys()
    index = whole.pop("data.lst", b"").replace(b"/whole/", b"/out/")
    assert out.pop("data.lst", b"") == index and out == whole


ENCODE = LoudnessCodec.encode


def stop_at_codes(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Stop where the codec encodes for the nth time; return the frames of what it was given so far."""
    encoded: list[str] = []

    def counted(self: LoudnessCodec, sound: np.ndarray) -> np.ndarray:
        encoded.append(str(len(sound) // FRAME))
        if len(encoded) == number:
            raise KeyboardInterrupt
        return ENCODE(self, sound)

    monkeypatch.setattr(LoudnessCodec, "encode", counted)
    return encoded


def test_a_command_goes_on_behind_the_last_complete_shard(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = stop_at_codes(monkeypatch, 4)
    values = {"samples_per_shard": 2, "random_shuffle": False}
    with pytest.raises(KeyboardInterrupt):
        write_codes(config_of(data, **values))
    assert list(coded(data / "out")) == ["r1", "r2"]  # the index lists what is complete
    with captured_log() as logged:
        write_codes(config_of(data, **values))
    assert encoded == ["1", "2", "3", "4", "3", "4", "5"] and list(coded(data / "out")) == [
        f"r{n}" for n in range(1, 6)
    ]
    assert "continuing: 1 of 3 blocks are complete" in logged
    encoded.clear()
    assert write_codes(config_of(data, **values)).errors == 2 and not encoded


def test_codes_of_another_request_are_protected(data: Path) -> None:
    write_codes(config_of(data))
    with pytest.raises(ConfigurationError, match=r"made with another audio_peak \(see codes.json"):
        write_codes(config_of(data, audio_peak=0.5))
    with pytest.raises(ConfigurationError, match="made with another codec_levels"):
        write_codes(config_of(data, codec_levels=1))
    before = files(data / "out")
    write_codes(config_of(data, audio_peak=0.5, overwrite_output_dir=True))
    assert files(data / "out")["codes.json"] != before["codes.json"]


@pytest.mark.parametrize("name", ["data.lst", "skipped.jsonl", "errors.jsonl", "units.jsonl"])
def test_files_of_others_are_protected(data: Path, name: str) -> None:
    (data / "out").mkdir()
    (data / "out" / name).write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=rf"has {name} already, without codes\.json"):
        write_codes(config_of(data))
    assert (data / "out" / name).read_text(encoding="utf-8") == "mine"


def change_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the folder has another codec, that gives other codes."""
    opener = lambda *_: lambda: LoudnessCodec(codebook_size=17, fingerprint="another")  # noqa: E731
    monkeypatch.setattr("erniekit.runners.codes.codec_opener", opener)


@pytest.mark.parametrize("ended", [True, False])
def test_codes_of_another_codec_are_protected(data: Path, monkeypatch: pytest.MonkeyPatch, ended: bool) -> None:
    write_codes(config_of(data, samples_per_shard=2))
    before = files(data / "out")
    if not ended:
        write_codes(config_of(data, output_dir=str(data / "cut"), samples_per_shard=2))
        stop_at_codes(monkeypatch, 3)
        with pytest.raises(KeyboardInterrupt):
            write_codes(config_of(data, samples_per_shard=2, overwrite_output_dir=True))
        monkeypatch.setattr(LoudnessCodec, "encode", ENCODE)
    change_codec(monkeypatch)
    with pytest.raises(ConfigurationError, match="made with another codec "):
        write_codes(config_of(data, samples_per_shard=2))
    write_codes(config_of(data, samples_per_shard=2, overwrite_output_dir=True))
    assert json.loads(files(data / "out")["codes.json"])["fingerprint"] == "another"
    assert coded(data / "out").keys() == {"r1", "r2", "r3", "r4", "r5"} and files(data / "out").keys() == before.keys()


def test_a_removal_that_is_killed_anywhere_goes_on(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_codes(config_of(data, output_dir=str(data / "whole"), audio_peak=0.5))
    for step in range(6):
        write_codes(config_of(data, samples_per_shard=2, overwrite_output_dir=True))
        with monkeypatch.context() as patched:
            kill_at_removal(patched, step)
            with suppress(Killed):
                write_codes(config_of(data, audio_peak=0.5, overwrite_output_dir=True))
                assert step >= 3
        write_codes(config_of(data, audio_peak=0.5, overwrite_output_dir=True))
        whole, out = files(data / "whole"), files(data / "out")
        assert whole.keys() == out.keys()
        assert all(whole[name] == out[name] for name in whole if name != "data.lst")


def kill_at_removal(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    left = step
    unlink, rmtree = Path.unlink, shutil.rmtree

    def counted(real: Callable[..., None]) -> Callable[..., None]:
        def removed(*values: Any, **options: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            real(*values, **options)

        return removed

    monkeypatch.setattr(Path, "unlink", counted(unlink))
    monkeypatch.setattr(shutil, "rmtree", counted(rmtree))


def test_two_commands_do_not_write_into_one_folder(data: Path) -> None:
    import fcntl

    (data / "out").mkdir()
    lock = os.open(data / "out", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(DataError, match="another `erniekit codes` is writing"):
        write_codes(config_of(data))
    os.close(lock)


def test_ids_that_tar_readers_would_cut_are_written_in_another_way(data: Path) -> None:
    record = {"id": "a.b/c", "audio_path": "1.wav"}
    (data / "data/data.jsonl").write_text(json.dumps(record), encoding="utf-8")
    with captured_log() as logged:
        write_codes(config_of(data))
    assert list(coded(data / "out")) == ["a%2Eb%2Fc"]
    assert any("id 'a.b/c' becomes 'a%2Eb%2Fc'" in line for line in logged)


@pytest.mark.parametrize("form", ["shards", "jsonl"])
def test_codes_become_sound_again(data: Path, form: str) -> None:
    write_codes(config_of(data, codes_format=form, codec_levels=1))
    assert decode_codes(data / "out", data / "wav") == 0
    assert sorted(path.name for path in (data / "wav").iterdir()) == [f"r{number}.wav" for number in range(1, 6)]
    sound, rate = soundfile.read(data / "wav/r4.wav", dtype="float32")
    expected = np.repeat(open_loudness(1).encode(tone(4 * FRAME / RATE, RATE))[0] / 16, FRAME)
    assert rate == 16_000 and np.abs(sound - expected).max() < 1e-4
    (data / "wav/r4.wav").write_bytes(b"mine")
    (data / "wav/r5.wav").unlink()
    with captured_log() as logged:
        assert decode_codes(data / "out", data / "wav") == 0
    assert (data / "wav/r4.wav").read_bytes() == b"mine" and (data / "wav/r5.wav").exists()
    assert "4 are there already and stay as they are" in logged[-1]


def test_codes_are_decoded_by_their_own_codec_only(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_codes(config_of(data))

    def opener(**values: Any) -> None:
        monkeypatch.setattr("erniekit.runners.decode.codec_opener", lambda *_: lambda: LoudnessCodec(**values))

    opener(fingerprint="other")
    with pytest.raises(ConfigurationError, match=r"not the codec of the codes in .*: its fingerprint is other"):
        decode_codes(data / "out", data / "wav")
    opener(fingerprint="loudness 2", can_decode=False)
    with pytest.raises(ConfigurationError, match="it has no decoder"):
        decode_codes(data / "out", data / "wav")
    with pytest.raises(DataError, match=r"there is no codes\.json"):
        decode_codes(data / "data", data / "wav")
    with pytest.raises(DataError, match=r"the codec .* does not exist; name its folder with --codec"):
        (data / "loudness").rename(data / "elsewhere")
        decode_codes(data / "out", data / "wav")


def test_damaged_shards_are_told_and_the_rest_is_decoded(data: Path) -> None:
    write_codes(config_of(data, samples_per_shard=1, random_shuffle=False))
    tar = data / "out/audios/shard-000001.tar"
    tar.write_bytes(tar.read_bytes()[:600])
    with captured_log() as logged:
        assert decode_codes(data / "out", data / "wav") == 3
    assert decode_codes(data / "out/audios/shard-000000.tar", data / "one") == 0
    assert [path.stem for path in (data / "one").iterdir()] == ["r1"]
    assert sorted(path.stem for path in (data / "wav").iterdir()) == ["r1", "r3", "r4", "r5"]
    assert sum("error: " in line and "shard-000001" in line for line in logged) == 3


@pytest.mark.parametrize("form", ["shards", "jsonl"])
def test_sound_of_parts_and_of_what_is_not_complete(data: Path, form: str) -> None:
    """Of three parts one has no recording, and one has not been made."""
    values = {"codes_format": form, "codec_levels": 1, "random_shuffle": False}
    for part in ("1/3", "3/3"):
        write_codes(config_of(data, codes_part=part, duration_range="0.015,1", **values))
    facts = data / "out/part-1-of-3/codes.json"
    facts.write_text(facts.read_text(encoding="utf-8").replace('"complete": true', '"complete": false'))
    with captured_log() as logged:
        assert decode_codes(data / "out", data / "wav") == 0
    assert sorted(path.name for path in (data / "wav").iterdir()) == ["r3.wav", "r4.wav"]
    assert any("part-1-of-3: these codes are not complete yet" in line for line in logged)
    for part in ("1/9", "9/9"):
        write_codes(config_of(data, output_dir=str(data / "few"), codes_part=part, **values))
    assert decode_codes(data / "few", data / "few/wav") == 0
    assert [path.name for path in (data / "few/wav").iterdir()] == ["r1.wav"]


def test_damaged_units_are_told_and_the_rest_is_decoded(data: Path) -> None:
    write_codes(config_of(data, codes_format="jsonl", codec_levels=1))
    units = data / "out/units.jsonl"
    with units.open("a", encoding="utf-8") as file:
        for record in (
            {"id": "r1", "units": [1]}, {"id": "", "units": [1]}, {"id": "a", "units": [10**30]}, ["b"],
            {"id": "c", "units": [True]}, {"id": "e", "units": []},
            {"id": "f" * 300, "units": [1]},
        ):  # fmt: skip
            file.write(json.dumps(record) + "\n")
    with captured_log() as logged:
        assert decode_codes(data / "out", data / "wav") == 7
    assert sorted(path.stem for path in (data / "wav").iterdir()) == [f"r{n}" for n in range(1, 6)]
    told = [line for line in logged if line.startswith("error: ")]
    expected = [
        "r1: expected a key that no other recording has", ".jsonl:7: id: expected a text", "units: expected a list",
        ".jsonl:9: id: expected a text", "units: expected a list", "units: expected a list", "at most 200 bytes",
    ]  # fmt: skip
    assert len(told) == 7 and all(part in line for part, line in zip(expected, told, strict=True)), told


def test_a_codec_is_fitted_on_no_recording(data: Path) -> None:
    values = {"codec": "residual_kmeans", "codebook_size": 4}
    with pytest.raises(DataError, match=r"one of 6: .*data\.jsonl:\d: .* seconds, outside of duration_range"):
        write_codes(config_of(data, duration_range="9,10", **values))
    for number in range(1, 6):
        (data / f"data/{number}.wav").write_bytes(b"no sound")
    with pytest.raises(DataError, match=r"no recording to fit a codec on; one of 6: .*wav: expected a recording in a"):
        write_codes(config_of(data, **values))
    assert sorted(path.name for path in (data / "out").iterdir()) == [".encoding"]


def test_fitting_leaves_nothing_else_in_a_complete_folder(data: Path) -> None:
    values = {"codec": "residual_kmeans", "codebook_size": 4, "samples_per_shard": 2}
    write_codes(config_of(data, **values), fits_only=True)
    assert [path.name for path in (data / "out").iterdir()] == ["codec"]
    write_codes(config_of(data, output_dir=str(data / "codes"), codec=str(data / "out/codec"), samples_per_shard=2))
    write_codes(config_of(data, output_dir=str(data / "codes"), **values, overwrite_output_dir=True), fits_only=True)
    assert not (data / "codes/.encoding").exists() and (data / "codes/codes.json").exists()


@pytest.mark.parametrize("arguments", [["codes"], ["codes", "--decode"]])
def test_a_folder_that_cannot_be_written_is_told(
    data: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_codes(config_of(data))
    (data / "file").touch()
    (data / "codes.json").write_text(
        json.dumps({"train_dataset_path": str(data / "data/data.jsonl"), "codec": str(data / "loudness")})
    )
    place = str(data / "file")
    if arguments == ["codes"]:
        arguments = ["codes", str(data / "codes.json"), f"output_dir={place}"]
    else:
        arguments = [*arguments, str(data / "out"), "--output", place]
    assert main(arguments) == 2
    assert f"error: {place}: cannot be written: File exists" in capsys.readouterr().err
