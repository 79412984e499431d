"""What a codec's config.json says of its codes is what the codec says once it is open."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from erniekit.codecs.facts import code_facts
from erniekit.codecs.open import CODECS, open_codec
from erniekit.codecs.residual_kmeans import ResidualKMeans, ResidualKMeansConfig
from erniekit.codecs.spectrogram import MelFrames
from erniekit.errors import ConfigurationError, ModelFileError
from tests.codecs.codec_cases import RECORDED, write_codec
from tests.codecs.seeded_folders import write_folder


def folder_of(kind, path):
    if kind in ("mimi", "higgs_audio_v2_tokenizer"):
        with np.load(RECORDED.parent / f"{kind.partition('_')[0]}.npz") as recorded:
            facts = json.loads(bytes(recorded["0/facts"]))
        return write_folder(path, facts["config"], facts["shapes"])
    if kind == "residual_kmeans":
        config = ResidualKMeansConfig(frames=MelFrames(hop_length=256), levels=3, codebook_size=8)
        ResidualKMeans(config, np.zeros(80, np.float32), np.zeros((3, 8, 80), np.float32)).save(path)
        return path
    name, _, number = kind.partition("/")
    return write_codec(path, name, int(number))


@pytest.mark.parametrize(
    "kind", ["encodec/0", "encodec/1", "encodec/4", "dac/0", "mimi", "higgs_audio_v2_tokenizer", "residual_kmeans"]
)
def test_facts_are_those_of_the_open_codec(kind, tmp_path):
    folder = folder_of(kind, tmp_path)
    for levels in (None, 2):
        found, codec = code_facts(folder, levels), open_codec(folder, levels=levels)
        assert found == (codec.levels, codec.codebook_size, codec.frame_rate, codec.sampling_rate)
    with pytest.raises(ConfigurationError, match="99 levels"):
        code_facts(folder, 99)


def test_every_codec_of_sound_is_known(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none"}))
    with pytest.raises(ModelFileError, match="no codec of sound; such are") as refused:
        code_facts(tmp_path)
    assert all(kind in str(refused.value) for kind in CODECS if kind != "kmeans")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kmeans"}))
    with pytest.raises(ConfigurationError, match="units of k-means cannot become sound"):
        code_facts(tmp_path)
    with pytest.raises(ModelFileError, match="no such folder"):
        code_facts(tmp_path / "nowhere")


def test_neither_paddle_nor_numpy_is_imported():
    code = "import sys, erniekit.codecs.facts; print({'paddle', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"
