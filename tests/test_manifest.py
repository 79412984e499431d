"""A model is what its files say: every reader of a folder with a manifest compares, whichever verb asks."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit import manifest
from erniekit.build.checks import read_generation_config
from erniekit.cli import main
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import ModelFileError
from erniekit.export.static_program import open_program
from erniekit.export.trained_model import find_trained_model
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.lora.folder import base_model_of, settings_from_peft
from erniekit.model.lora.peft_files import SafetensorsFile
from erniekit.model.quantization.fp8 import read_averages
from erniekit.model.storage.safetensors import write_safetensors
from erniekit.model.storage.shards import open_weight_files
from erniekit.training.checkpoint.manifest import seal
from erniekit.training.checkpoint.tensors import open_tensors

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SMALL = {
    "config.json": {"model_type": "ernie4_5"},
    "generation_config.json": {"eos_token_id": 2},
    "tokenizer.json": {},
    "tokenizer_config.json": {},
    "adapter_config.json": {"base_model_name_or_path": "base", "r": 1},
    "activation_scales.json": {},
    "model.safetensors.index.json": {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}},
}
READERS: dict[str, Callable[[Path], Any]] = {
    "configuration": ModelConfig.from_folder,
    "ids of special tokens": read_generation_config,
    "tokenizer": load_tokenizer,
    "weights": open_weight_files,
    "a shard": lambda folder: SafetensorsFile(folder / SHARDS[0]).read("a"),
    "bytes of a shard": lambda folder: list(SafetensorsFile(folder / SHARDS[0]).blocks("a")),
    "tensors of a checkpoint": lambda folder: open_tensors(folder, "model"),
    "base of adapters": base_model_of,
    "settings of adapters": lambda folder: settings_from_peft(folder, []),
    "FP8": read_averages,
    "a program": open_program,
    "the model of a run": lambda folder: find_trained_model(folder, None),
}


def read_weights(folder: Path) -> dict[str, float]:
    return {name: float(file.read(name).sum()) for name, file in open_weight_files(folder).items()}


WORD = "does not have the content that was written"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of everything that can be read, with a manifest."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in SMALL.items():
        (folder / name).write_text(json.dumps(content))
    for name, tensor in zip(SHARDS, "ab", strict=True):
        write_safetensors(folder / name, {tensor: (4,)}, [(tensor, np.arange(4, dtype=np.float32))], {"format": "pt"})
    for name in ("README.md", "model.json", "model.pdiparams"):
        (folder / name).write_text("text")
    seal(folder)
    return folder


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "config.json"])
def test_every_reader_refuses_a_folder_whose_small_files_changed(folder: Path, reader: str, name: str) -> None:
    flip_a_bit(folder / name)
    with pytest.raises(Exception, match=rf"{name} {WORD}.*(?s:.)*remove .*manifest\.json") as refused:
        READERS[reader](folder)
    assert refused.type.__module__ == "erniekit.errors"


@pytest.mark.parametrize("name", SHARDS)
def test_weights_are_compared_before_the_first_value_is_read(folder: Path, name: str) -> None:
    assert read_weights(folder) == {"a": 6.0, "b": 6.0}
    flip_a_bit(folder / name)
    files = open_weight_files(folder)  # `validate` reads headers, and does not wait for gigabytes
    for tensor, file in files.items():  # whichever shard comes first
        with pytest.raises(ModelFileError, match=f"{name} {WORD}"):
            file.read(tensor)
        with pytest.raises(ModelFileError, match=f"{name} {WORD}"):
            next(file.blocks(tensor))
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    with pytest.raises(ModelFileError, match=f"{name} has .* bytes instead of"):
        open_weight_files(folder)


def test_what_is_missing_or_was_added_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json is missing"):
        ModelConfig.from_folder(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    shutil.copyfile(folder / SHARDS[0], folder / "model.safetensors")  # would be taken instead of the shards
    with pytest.raises(ModelFileError, match=r"model\.safetensors is not in manifest\.json"):
        open_weight_files(folder)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format": 2, "files": {}}', b'{"format": 2, "files": 3}'])
def test_a_damaged_manifest_is_refused(folder: Path, damage: bytes) -> None:
    (folder / "manifest.json").write_bytes(damage)
    with pytest.raises(ModelFileError, match="missing or unreadable"):
        read_generation_config(folder)
    (folder / "manifest.json").unlink()
    assert read_generation_config(folder) == {"eos_token_id": 2}


def test_a_manifest_of_another_program_and_an_edited_model_card_say_nothing(folder: Path) -> None:
    (folder / "README.md").write_text("edited")
    assert read_generation_config(folder) == {"eos_token_id": 2}
    (folder / "manifest.json").write_text('{"name": "a web page", "icons": []}')
    flip_a_bit(folder / SHARDS[0])
    assert list(read_weights(folder)) == ["a", "b"]


def test_a_newer_format_is_named(folder: Path) -> None:
    stored = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(stored | {"format": 99}))
    with pytest.raises(ModelFileError, match="format 99 of another version"):
        open_weight_files(folder)


def test_a_file_is_read_once_and_again_when_it_was_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    sha256 = manifest.sha256
    monkeypatch.setattr(manifest, "sha256", lambda path: (read.append(path.name), sha256(path))[1])
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    monkeypatch.setattr(manifest.time, "time_ns", lambda: 2**62)  # long after the files were written
    for _ in range(3):
        read_weights(folder)
    assert sorted(read) == sorted([*SMALL, *SHARDS, "model.json", "model.pdiparams"])
    flip_a_bit(folder / SHARDS[1])
    os.utime(folder / SHARDS[1], (1, 1))  # as `cp -p` leaves it
    with pytest.raises(ModelFileError, match=SHARDS[1]):
        read_weights(folder)


def test_the_first_rank_of_a_machine_compares_for_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_a_bit(folder / SHARDS[0])
    monkeypatch.setenv("PADDLE_LOCAL_RANK", "1")
    assert list(read_weights(folder)) == ["a", "b"]
    monkeypatch.setenv("PADDLE_LOCAL_RANK", "0")
    with pytest.raises(ModelFileError, match=SHARDS[0]):
        read_weights(folder)


@pytest.mark.parametrize(
    "words",
    ["generate FOLDER --prompt 1", "chat FOLDER", "split FOLDER --output NEW", "export FOLDER --output NEW"],
)
def test_verbs_refuse_it(folder: Path, capsys: pytest.CaptureFixture[str], words: str) -> None:
    (folder / "adapter_config.json").unlink()
    seal(folder)
    flip_a_bit(folder / "generation_config.json")
    line = words.replace("FOLDER", str(folder)).replace("NEW", str(folder.with_name("new")))
    assert main(line.split()) == 2
    assert f"generation_config.json {WORD}" in capsys.readouterr().err
    assert not folder.with_name("new").exists()
