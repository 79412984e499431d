"""A model that listens is saved and exported with the files from which other programs make its features."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from erniekit.config import Config
from erniekit.export.export import export_model
from erniekit.manifest import problems
from tests.data.vocabularies import write_tekken
from tests.model.tiny import config_file

TEXT = {
    "vocab_size": 340, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
ENCODER = {
    "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_mel_bins": 8,
    "max_source_positions": 100,
}  # fmt: skip


def test_a_trained_and_an_exported_folder_have_them(train: Callable[..., Any], tmp_path: Path) -> None:
    base = write_tekken(tmp_path / "base")
    values = config_file({"model_type": "voxtral", **TEXT}) | {"audio_config": ENCODER, "audio_token_id": 24}
    (base / "config.json").write_text(json.dumps(values))
    soundfile.write(tmp_path / "a.wav", np.sin(np.arange(16000) / 20), 16000)
    data = tmp_path / "asr.jsonl"
    data.write_text(json.dumps({"audio_path": "a.wav", "text": "six", "language": "en"}))
    paths = {"model_name_or_path": str(base), "train_dataset_path": str(data), "train_dataset_type": "asr"}
    folder = train(**paths, max_seq_len=64, max_steps=1).output
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    assert (settings["feature_size"], settings["chunk_length"], settings["nb_max_frames"]) == (8, 2, 200)
    assert (folder / "tekken.json").read_bytes() == (base / "tekken.json").read_bytes()
    own = {**settings, "processor_class": "VoxtralProcessor"}  # which an export keeps
    (folder / "preprocessor_config.json").write_text(json.dumps(own))
    (folder / "manifest.json").unlink()
    export_model(folder, tmp_path / "exported", Config.load(None, (), verb="export"))
    assert json.loads((tmp_path / "exported" / "preprocessor_config.json").read_text()) == own
    assert (tmp_path / "exported" / "tekken.json").is_file()
    assert problems(tmp_path / "exported", hashes=True) == []
