"""Runs that train a model to listen, from recordings on disk: full, frozen, with adapters, on pairs, and resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.config.observing import tensors
from tests.data.recordings import write_recording
from tests.data.vocabularies import write_tekken
from tests.model.tiny_audio import VOXTRAL

Train = Callable[..., Any]
WORDS = ("six apples", "left", "twelve", "the day after")
ENCODER, PROJECTOR = "audio_tower.layers.0.fc1.weight", "multi_modal_projector.linear_1.weight"
DECODER = "language_model.model.layers.0.self_attn.q_proj.weight"
SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Voxtral with windows of 0.4 s, 10 tokens each, with random weights."""
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.builder import build_model
    from erniekit.model.weights import save_model_folder

    folder = write_tekken(tmp_path_factory.mktemp("listener"))
    shape = {
        **VOXTRAL,
        "text_config": {**VOXTRAL["text_config"], "vocab_size": 360, "initializer_range": 0.1},
        "audio_config": {**VOXTRAL["audio_config"], "max_source_positions": 20},
    }
    save_model_folder(build_model(ModelConfig.from_json(shape), None, seed=3), folder)
    return folder


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Tones of 0.1 to 0.9 s as records of speech, as dialogues some of which have none, and as pairs."""
    folder = tmp_path_factory.mktemp("speech")
    asr, dialogues, pairs = [], [], []
    for number in range(24):
        seconds = 0.1 + 0.1 * (number % 9)
        path = write_recording(folder / f"{number}.wav", seconds, pitch=200.0 + 40 * number)
        text = WORDS[number % len(WORDS)]
        asr.append({"audio_path": path.name, "text": text})
        heard = {"audios": [path.name]} if number % 3 else {}
        question = {"role": "user", "content": "<audio>What is it?" if heard else "What is it?"}
        answers = [{"role": "assistant", "content": WORDS[(number + shift) % len(WORDS)]} for shift in (0, 1)]
        dialogues.append({"messages": [question, answers[0]], **heard})
        pairs.append({"prompt": [question], "chosen": answers[:1], "rejected": answers[1:], **heard})
    for name, records in (("asr", asr), ("dialogues", dialogues), ("pairs", pairs)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return SimpleNamespace(
        asr={"train_dataset_path": str(folder / "asr.jsonl"), "train_dataset_type": "asr"},
        dialogues={"train_dataset_path": str(folder / "dialogues.jsonl"), "train_dataset_type": "messages"},
        pairs={"train_dataset_path": str(folder / "pairs.jsonl"), "train_dataset_type": "messages", "stage": "DPO"},
    )


@pytest.fixture
def listen(train: Train, listener: Path, speech: SimpleNamespace) -> Train:
    def run(**values: Any) -> Any:
        base = {"model_name_or_path": str(listener), "continue_training": True, "weight_decay": 0.1}
        return train(**{**base, **speech.asr, **values})

    return run


def test_a_step_is_the_same_however_it_is_divided(listen: Train, speech: SimpleNamespace) -> None:
    """(batch 4, accumulation 1) = (1, 4), where some of the micro-batches have no recording."""
    ways = [(4, 1), (1, 4)]
    runs = [
        listen(**speech.dialogues, per_device_train_batch_size=size, gradient_accumulation_steps=count, packing=False)
        for size, count in ways
    ]
    np.testing.assert_allclose(runs[1].losses, runs[0].losses, atol=1e-5)
    assert runs[0].losses[-1] < runs[0].losses[0]


ADAPTERS = {"lora": True, "lora_target_modules": "audio_tower q_proj"}


@pytest.mark.parametrize("values", [{}, pytest.param(ADAPTERS, marks=pytest.mark.slow)], ids=["all", "adapters"])
def test_a_run_goes_on_to_the_same_bits(listen: Train, speech: SimpleNamespace, values: dict[str, Any]) -> None:
    values = {**speech.dialogues, **SAVING, "audio_lr_ratio": 0.5, "gradient_accumulation_steps": 2, **values}
    first = listen(**values)
    expected = {path.name: path.read_bytes() for path in first.output.glob("*.safetensors")}
    shutil.rmtree(first.output / "checkpoint-4")
    again = listen(**values, resume_from_checkpoint=True)
    assert again.losses == first.losses
    assert {path.name: path.read_bytes() for path in again.output.glob("*.safetensors")} == expected


@pytest.mark.proves("freeze_config")
@pytest.mark.parametrize(
    ("words", "kept"),
    [("freeze_llm", {DECODER}), ("freeze_audio freeze_aligner", {ENCODER, PROJECTOR})],
)
def test_frozen_parts_stay_as_they_are(listen: Train, listener: Path, words: str, kept: set[str]) -> None:
    run = listen(freeze_config=words, **SAVING)
    before, after = tensors(listener), tensors(run.output)
    state = tensors(run.output / "checkpoint-4", "optimizer*.safetensors")
    for name in (ENCODER, PROJECTOR, DECODER):
        assert (after[name] == before[name]).all() == (name in kept), name
        assert any(key.startswith(name) for key in state) == (name not in kept), name
    assert "trained: " in run.said and "; frozen: " in run.said


@pytest.mark.proves("audio_lr_ratio")
def test_the_encoder_moves_by_its_own_rate(listen: Train, listener: Path) -> None:
    before, moved = tensors(listener), []
    for ratio in (1.0, 0.1):
        run = listen(max_steps=1, lr_scheduler_type="constant", weight_decay=0, audio_lr_ratio=ratio)
        after = tensors(run.output)
        moved.append([float(np.abs(after[name] - before[name]).max()) for name in (ENCODER, PROJECTOR, DECODER)])
    np.testing.assert_allclose(moved[0], 1e-2, rtol=1e-2)
    np.testing.assert_allclose(moved[1], [1e-3, 1e-2, 1e-2], rtol=1e-2)
    assert run.log[0]["audio_learning_rate"] == pytest.approx(1e-3)
    assert "audio lr 0.001" in run.said and "audio s/s" in run.said


def test_seconds_that_were_heard_are_counted(listen: Train, listener: Path) -> None:
    """Each recording counts once, by its own length: the frames of 10 ms that hold sound."""
    run = listen(max_steps=-1, num_train_epochs=1, packing=False, per_device_train_batch_size=1)
    results = json.loads((run.output / "train_results.json").read_text())
    total = sum(0.1 + 0.1 * (number % 9) for number in range(24))
    assert results["train_audio_seconds"] == pytest.approx(total, abs=0.01)
    assert results["train_audio_seconds_per_second"] > 0


@pytest.mark.parametrize(
    "values",
    [{"lora": True}, *(pytest.param(way, marks=pytest.mark.slow) for way in ({}, {"reference_model": "copy"}))],
    ids=str,
)
def test_pairs_of_answers_to_a_recording(listen: Train, speech: SimpleNamespace, values: dict[str, Any]) -> None:
    """Before the first update the model is its reference, so the loss is log 2; (2, 1) = (1, 2)."""
    values = {**speech.pairs, "packing": False, "max_steps": 2, **values}
    runs = [
        listen(**values, per_device_train_batch_size=2),
        listen(**values, per_device_train_batch_size=1, gradient_accumulation_steps=2),
    ]
    np.testing.assert_allclose(runs[1].losses, runs[0].losses, atol=1e-5)
    assert runs[0].losses[0] == pytest.approx(np.log(2), abs=1e-6)


def test_the_loss_of_a_pair_is_that_of_its_rewards(listen: Train, speech: SimpleNamespace) -> None:
    """-log sigmoid(beta (log-ratio of the chosen answer - of the rejected one)), of one pair a step."""
    run = listen(**speech.pairs, packing=False, lora=True, max_steps=6, per_device_train_batch_size=1)
    margins = [entry["reward_chosen"] - entry["reward_rejected"] for entry in run.log]
    np.testing.assert_allclose(run.losses, np.log1p(np.exp(-np.array(margins))), rtol=1e-5)
    assert np.abs(margins[1:]).max() > 0.01


def test_a_trained_model_is_a_start(listen: Train, tmp_path: Path) -> None:
    run = listen(max_steps=2)
    start = shutil.copytree(run.output, tmp_path / "start")
    again = listen(max_steps=1, init_from_checkpoint=str(start), learning_rate=0.0)
    for name, values in tensors(start).items():
        np.testing.assert_array_equal(tensors(again.output)[name], values, err_msg=name)


def test_a_quantized_decoder_listens_through_its_own_encoder(listen: Train) -> None:
    run = listen(**ADAPTERS, weight_quantize_algo="weight_only_int8")
    assert run.losses[-1] < run.losses[0] and "14 linear weights" in run.said


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"nproc": 2},
    "tp2 + sp": {"tensor_parallel_degree": 2, "sequence_parallel": True, "distributed_dataloader": True},
    "pp2": {"pipeline_parallel_degree": 2, "distributed_dataloader": True},
    "sharding3": {"sharding_parallel_degree": 2, "sharding": "stage3", "unified_checkpoint": False},
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_on_ranks(
    listen: Train, train_on_ranks: Train, listener: Path, speech: SimpleNamespace, layout: str
) -> None:
    """Loaded by each rank or sent to it, saved and gone on from: the losses are those of one process."""
    values = {
        **speech.dialogues, "model_name_or_path": str(listener), "continue_training": True, "weight_decay": 0.1,
        "per_device_train_batch_size": 1, "audio_lr_ratio": 0.5, "do_eval": True, "eval_steps": 4,
        "eval_dataset_path": speech.dialogues["train_dataset_path"], "eval_dataset_type": "messages", **SAVING,
    }  # fmt: skip
    alone = listen(**values, gradient_accumulation_steps=4)
    divided = 2 if layout in ("dp2", "sharding3") else 1
    ranks = train_on_ranks(**values, **LAYOUTS[layout], gradient_accumulation_steps=4 // divided)
    np.testing.assert_allclose(ranks.losses, alone.losses, atol=1e-4)
    shutil.rmtree(ranks.output / "checkpoint-4")
    again = train_on_ranks(
        **values, **LAYOUTS[layout], gradient_accumulation_steps=4 // divided, resume_from_checkpoint=True
    )
    assert again.losses == ranks.losses
