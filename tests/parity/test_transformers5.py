"""What we save, opened by transformers 4 and 5: equal logits, and weights in the type that was saved.

transformers 5 cannot be installed beside transformers 4: its part runs in the environment that `make oracle-5` makes.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.weights import save_model_folder
from tests.model.test_transformers5 import CASES, every_case, features_of, our_logits, write_folder

pytestmark = pytest.mark.parity
ROOT = Path(__file__).parents[2]
PYTHON_5 = Path(os.environ.get("ERNIEKIT_TRANSFORMERS5", ROOT / ".venv-transformers5/bin/python"))


def save_case(case, folder):
    """Open what transformers 5 saved, save it as a run does, and return our logits."""
    written = write_folder(case, folder / "theirs")
    decoder = build_model(ModelConfig.from_folder(written), written)
    save_model_folder(decoder, folder / "ours")
    return our_logits(decoder, case)


def their_audio(case):
    """What a model of transformers takes of recordings."""
    if "frames" not in case:
        return {}
    features = features_of(case)
    inputs = {"input_features": torch.tensor(features), "attention_mask": torch.ones(1, len(case["ids"])).long()}
    if case["config"]["model_type"] == "qwen2_audio":
        is_sound = np.arange(features.shape[-1])[None] < case["frames"][:, None]
        inputs["feature_attention_mask"] = torch.tensor(is_sound).long()
    return inputs


@every_case
def test_transformers_4_opens_what_we_save(case, tmp_path):
    ours = save_case(case, tmp_path)
    name = case["config"]["architectures"][0]
    opens = getattr(transformers, name) if "frames" in case else transformers.AutoModelForCausalLM
    model, info = opens.from_pretrained(tmp_path / "ours", torch_dtype="auto", output_loading_info=True)
    assert not any(info.values()) and model.dtype == torch.float32
    remarks = ModelConfig.from_json(case["config"]).remarks
    with torch.no_grad():
        ids = torch.tensor(case["ids"].astype(np.int64)[None])
        theirs = model.eval()(input_ids=ids, **their_audio(case)).logits[0].numpy()
    if any("transformers 4 takes" in remark for remark in remarks):  # told, because it computes another model
        assert np.abs(theirs - ours).max() > 1e-2
    else:
        np.testing.assert_allclose(theirs, ours, atol=5e-5)


@pytest.mark.skipif(not PYTHON_5.exists(), reason=f"{PYTHON_5}: no such file; `make oracle-5` makes it")
def test_transformers_5_opens_what_we_save(tmp_path):
    ours, folders = {}, []
    for number, case in enumerate(CASES.values()):
        ours[f"case{number}"] = save_case(case, tmp_path / str(number))
        folder = (tmp_path / str(number) / "ours").rename(tmp_path / f"case{number}")
        (folder / "ids.json").write_text(json.dumps(case["ids"].tolist()))
        if "frames" in case:
            np.savez(folder / "audio.npz", features=features_of(case), frames=case["frames"])
        folders.append(str(folder))
    tool = ROOT / "tools/parity/record_transformers5.py"
    command = [str(PYTHON_5), str(tool), "--open", *folders, "--output", str(tmp_path / "logits.npz")]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    theirs = np.load(tmp_path / "logits.npz")
    for name, logits in ours.items():
        assert str(theirs[f"{name}/dtype"]) == "torch.float32"
        np.testing.assert_allclose(theirs[f"{name}/logits"], logits, atol=5e-5)
