"""Folders as transformers 5 saves them, against what it computes of them (tools/parity/record_transformers5.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.registry import ARCHITECTURES
from erniekit.model.architectures.stacked_experts import place_of
from erniekit.model.builder import build_model
from erniekit.model.head import token_loss
from erniekit.model.storage.safetensors import StoredTensor, write_safetensors
from erniekit.model.storage.stacked_tensors import stacked_specs
from erniekit.model.weights import named_weights, save_model_folder

from .seeded_weights import seeded_weight
from .tiny import audio_arrays, pack

FOLDER = Path(__file__).parent / "transformers5"
NOT_COMPARED = {"transformers_version", "architectures"}


def recorded_cases() -> dict[str, dict]:
    """Every case by its name, FAMILY: WHAT."""
    cases = {}
    for path in sorted(FOLDER.glob("*.npz")):
        arrays = np.load(path, allow_pickle=False)
        for number in sorted({name.partition("/")[0] for name in arrays}, key=int):
            case = {name.partition("/")[2]: arrays[name] for name in arrays if name.startswith(f"{number}/")}
            facts = json.loads(case.pop("facts").tobytes())
            cases[f"{path.stem}: {facts['name']}"] = {**case, **facts, "config": json.loads(case["config"].tobytes())}
    return cases


CASES = recorded_cases()
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def write_folder(case, folder):
    """Write the folder that transformers 5 saved: its `config.json`, and the weights of the seed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case["config"]))
    shapes = {name: tuple(shape) for name, shape in case["shapes"].items()}
    weights = ((name, seeded_weight(name, shape, case["seed"])) for name, shape in shapes.items())
    write_safetensors(folder / "model.safetensors", shapes, weights)
    return folder


def stored_shapes(config):
    """The name and shape of every tensor of a file that holds the model."""
    weights = {name: StoredTensor("F32", shape) for name, shape in config.weight_shapes().items()}
    return {name: spec.shape for name, spec in stacked_specs(weights, config.architecture.stacked_experts).items()}


def features_of(case):
    """The log-mel features of a case with recordings, float32 [windows, mel bins, frames]."""
    audio = case["config"]["audio_config"]
    shape = (len(case["frames"]), audio["num_mel_bins"], 2 * audio["max_source_positions"])
    return seeded_weight(f"{case['name']} features", shape, case["seed"])


def our_hidden(decoder, case):
    ids = case["ids"].astype(np.int64)
    audio = audio_arrays(decoder.config, ids, features_of(case), case["frames"]) if "frames" in case else {}
    return decoder(*pack(ids, [len(ids)]), **audio)


def our_logits(decoder, case):
    return decoder.head(our_hidden(decoder, case)).numpy()[0]


def test_every_family_was_recorded():
    assert {name.partition(":")[0] for name in CASES} == set(ARCHITECTURES)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 300_000


@every_case
def test_the_decoder_computes_what_transformers_5_does(case, tmp_path):
    write_folder(case, tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    assert stored_shapes(config) == {name: tuple(shape) for name, shape in case["shapes"].items()}
    decoder = build_model(config, tmp_path)

    hidden = our_hidden(decoder, case)
    np.testing.assert_allclose(decoder.head(hidden).numpy()[0], case["logits"], atol=5e-5)
    loss_sum = token_loss(decoder, hidden, paddle.to_tensor(case["labels"][None].astype(np.int64))).loss_sum
    assert float(loss_sum) == pytest.approx(float(case["loss"]), rel=1e-5)
    loss_sum.backward()
    expected = dict(zip(sorted(case["shapes"]), case["gradient_norms"], strict=True))
    squares = dict.fromkeys(expected, 0.0)
    for name, weight in named_weights(decoder).items():
        place = place_of(name, config.architecture.stacked_experts)
        norm = 0.0 if weight.grad is None else float(np.linalg.norm(weight.grad.numpy().astype(np.float64)))
        squares[name if place is None else place.stored] += norm**2
    for name, square in squares.items():
        assert square**0.5 == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@every_case
def test_what_we_save_says_the_same_to_transformers_5(case, tmp_path):
    decoder = build_model(ModelConfig.from_json(case["config"]), None)
    save_model_folder(decoder, tmp_path)
    ours = json.loads((tmp_path / "config.json").read_text())
    theirs = {key: value for key, value in case["config"].items() if key not in NOT_COMPARED}
    for name in {"text_config", "audio_config"} & set(theirs):
        _compare(ours.pop(name), theirs.pop(name))
    _compare(ours, theirs)
    assert ModelConfig.from_folder(tmp_path) == decoder.config


def _compare(ours, theirs):
    """All that theirs says ours says as well."""
    rope, their_rope = ours.get("rope_parameters"), theirs.get("rope_parameters")
    if their_rope and their_rope.get("original_max_position_embeddings") == theirs["max_position_embeddings"]:
        rope["original_max_position_embeddings"] = theirs["max_position_embeddings"]  # which it adds when it reads
    assert {key: ours.get(key) for key in theirs} == theirs


@every_case
def test_what_we_save_says_the_same_to_transformers_4(case):
    ours = ModelConfig.from_json(case["config"]).to_json()
    without = {key: value for key, value in ours.items() if key not in ("dtype", "rope_parameters", *_aliases(case))}
    if "text_config" in ours:
        text = ours["text_config"]
        without["text_config"] = {key: value for key, value in text.items() if key != "rope_parameters"}
    assert ModelConfig.from_json(without).to_json() == ours
    assert ours["torch_dtype"] == ours["dtype"] == "float32"


def _aliases(case):
    return ARCHITECTURES[case["config"]["model_type"]].aliases
