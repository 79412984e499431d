"""Model folders of paddlenlp's Llama and Qwen2, written by paddlenlp itself in another process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from erniekit.errors import ModelFileError
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.weights import save_model_folder

from ..model.tiny import logits_of

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(importlib.util.find_spec("paddlenlp") is None, reason="paddlenlp is not installed"),
]
ROOT = Path(__file__).parents[2]
NAMES = ["llama", "llama-tied", "llama-square", "qwen2", "qwen2-tied", "qwen2-fused", "qwen2-fused, all key heads"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    target = tmp_path_factory.mktemp("paddlenlp")
    subprocess.run(
        [sys.executable, "-m", "tests.parity.write_paddlenlp", str(target)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        timeout=300,
    )
    return target


def loaded(folder):
    return build_model(ModelConfig.from_folder(folder), folder)


def assert_equal_logits(decoder, folder):
    with np.load(folder / "logits.npz") as recorded:
        assert recorded["logits"].std() > 1.0
        np.testing.assert_allclose(logits_of(decoder, recorded["ids"][0]), recorded["logits"][0], atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_logits_agree(name, folders):
    assert (folders / name / "model.safetensors.index.json").is_file() == (name == "llama")  # it was cut into shards
    assert_equal_logits(loaded(folders / name), folders / name)


@pytest.mark.parametrize("name", ["llama", "qwen2-fused"])
def test_what_was_loaded_is_saved_in_hugging_faces_layout(name, folders, tmp_path):
    import torch
    import transformers

    save_model_folder(loaded(folders / name), tmp_path)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    with np.load(folders / name / "logits.npz") as recorded, torch.no_grad():
        logits = theirs(input_ids=torch.tensor(recorded["ids"])).logits.numpy()
        np.testing.assert_allclose(logits, recorded["logits"], atol=1e-4)


def test_the_command_for_pickled_folders_converts_them(folders):
    folder = folders / "pickled"
    with pytest.raises(ModelFileError) as error:
        loaded(folder)
    (command,) = [line.strip() for line in str(error.value).splitlines() if line.strip().startswith("python -c")]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(command, shell=True, check=True, capture_output=True, timeout=300, env=environment)
    assert_equal_logits(loaded(folders / "pickled-safetensors"), folder)
