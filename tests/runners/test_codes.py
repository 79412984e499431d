"""`erniekit codes`: what is written, how it goes on after an interruption, what is refused, and sound again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.codecs.workers import Reading, Result, encode_clip
from erniekit.config import Config
from erniekit.data.media.clip import Clip
from erniekit.data.media.code_shard_reader import ShardProblem, read_shards
from erniekit.data.media.code_shards import CodedRecording
from erniekit.errors import ConfigurationError, DataError
from erniekit.runners.codes import write_codes
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


def test_a_command_goes_on_behind_the_last_complete_shard(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode = LoudnessCodec.encode

    def counted(self: LoudnessCodec, sound: np.ndarray) -> np.ndarray:
        encoded.append(str(len(sound) // FRAME))
        if len(encoded) == 4:
            raise KeyboardInterrupt
        return encode(self, sound)

    monkeypatch.setattr(LoudnessCodec, "encode", counted)
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


def test_codes_of_a_codec_that_was_replaced_are_not_continued(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = LoudnessCodec.encode

    def interrupted(self: LoudnessCodec, sound: np.ndarray) -> np.ndarray:
        if len(sound) == 4 * FRAME:
            raise KeyboardInterrupt
        return encode(self, sound)

    values = {"samples_per_shard": 2, "random_shuffle": False}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LoudnessCodec, "encode", interrupted)
        write_codes(config_of(data, **values))
    opener = lambda folder, levels, device: partial(LoudnessCodec, fingerprint="another")  # noqa: E731
    monkeypatch.setattr("erniekit.runners.codes.codec_opener", opener)
    with pytest.raises(ConfigurationError, match="not complete, that were made with another codec"):
        write_codes(config_of(data, **values))
    summary = write_codes(config_of(data, **values, overwrite_output_dir=True))
    assert (summary.recordings, summary.errors) == (5, 2)
    assert list(coded(data / "out")) == [f"r{number}" for number in range(1, 6)]


def test_files_of_others_are_protected(data: Path) -> None:
    (data / "out").mkdir()
    (data / "out/data.lst").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"has data\.lst already, without codes\.json"):
        write_codes(config_of(data))
    assert (data / "out/data.lst").read_text(encoding="utf-8") == "mine"


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
    soundfile = pytest.importorskip("soundfile")
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
    assert sorted(path.stem for path in (data / "wav").iterdir()) == ["r1", "r3", "r4", "r5"]
    assert sum("error: " in line and "shard-000001" in line for line in logged) == 3
