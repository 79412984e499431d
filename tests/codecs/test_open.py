"""Which codec a folder has, and what is no codec."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest

from erniekit.codecs.open import CODECS, open_codec
from erniekit.errors import ModelFileError
from erniekit.model.storage.model_folder import PUBLISHING
from tests.codecs.codec_cases import RECORDED, write_codec
from tests.codecs.seeded_folders import write_folder


@pytest.mark.parametrize(("model_type", "name"), [("encodec", "Encodec"), ("dac", "Dac")])
def test_the_model_type_chooses_the_codec(tmp_path, model_type, name):
    codec = open_codec(str(write_codec(tmp_path, model_type, 0)), levels=2)
    assert type(codec).__name__ == name and codec.levels == 2


def test_mimi_and_the_tokenizer_of_higgs_audio_are_codecs(tmp_path):
    for file, name in (("mimi", "Mimi"), ("higgs", "Higgs")):
        with np.load(RECORDED.parent / f"{file}.npz") as recorded:
            facts = json.loads(bytes(recorded["0/facts"]))
        codec = open_codec(write_folder(tmp_path / file, facts["config"], facts["shapes"]), levels=2)
        assert type(codec).__name__ == name and codec.levels == 2


def test_what_is_listed_is_there():
    for module, name in CODECS.values():
        assert callable(getattr(import_module(module), name))


@pytest.mark.parametrize("model_type", ["llama", None, ["dac"]])
def test_a_folder_of_something_else_is_refused(tmp_path, model_type):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelFileError, match=r"config\.json: model_type is .* no codec; codecs are dac, encodec, "):
        open_codec(tmp_path)


def test_a_missing_or_damaged_folder_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="nowhere: no such folder"):
        open_codec(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ModelFileError, match="file: is a file; name its folder"):
        open_codec(tmp_path / "file")
    with pytest.raises(ModelFileError, match=r"config\.json: cannot be read as JSON"):
        open_codec(tmp_path)
    folder = write_codec(tmp_path / "dac", "dac", 0)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-5])
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        open_codec(folder)
    weights.unlink()
    with pytest.raises(ModelFileError, match=r"contains neither model\.safetensors"):
        open_codec(folder)
    (folder / PUBLISHING).touch()
    with pytest.raises(ModelFileError, match="half-written"):
        open_codec(folder)


def test_a_speech_model_is_named_as_features(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "hubert"}')
    with pytest.raises(ModelFileError, match=r"no codec; .*codec: kmeans with this folder as codec_features"):
        open_codec(tmp_path)


def test_recordings_are_not_read_at_an_absurd_rate(tmp_path):
    folder = write_codec(tmp_path, "dac", 0, sampling_rate=2_000_000_000)
    with pytest.raises(ModelFileError, match="a sampling rate of 2,000,000,000 Hz: recordings have at most 1,536,000"):
        open_codec(folder)


def test_no_codec_is_imported_before_it_is_asked_for():
    program = "import sys, erniekit.codecs.open; sys.exit('paddle' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
