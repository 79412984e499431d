"""Proofs of section 2.2: which matrices get adapters, how large they are, how they begin and how they learn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.config import Config
from tests.config.observing import tensors
from tests.config.samples import load

Train = Callable[..., Any]
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")


def adapter_config(run: Any) -> dict[str, Any]:
    return json.loads((run.output / "adapter_config.json").read_text())


@pytest.mark.proves("lora")
def test_adapters_are_trained_and_left_without_the_model(train: Train, train_adapters: Train, tiny_base: Path) -> None:
    base = (tiny_base / "model.safetensors").read_bytes()
    for run, left in ((train_adapters, "adapter_model.safetensors"), (train, "model.safetensors")):
        assert [path.name for path in run().output.glob("*model*.safetensors")] == [left]
    assert (tiny_base / "model.safetensors").read_bytes() == base


@pytest.mark.proves("lora_rank")
def test_the_rank_is_the_inner_size(train_adapters: Train) -> None:
    for rank in (2, 8):
        run = train_adapters(lora_rank=rank)
        assert tensors(run.output)[A].shape == (rank, 32) and tensors(run.output)[B].shape == (32, rank)
        assert adapter_config(run)["r"] == rank


@pytest.mark.proves("lora_alpha", "rslora", "rslora_plus")
def test_the_scale_of_an_update(train_adapters: Train, make_config: Callable[..., Config]) -> None:
    """alpha / r, or alpha / sqrt(r) with rsLoRA; without an alpha 2 r, or 4. The gradient of B = 0 grows with it."""
    from erniekit.build.adapters import lora_settings

    def scale(**values: Any) -> float:
        return lora_settings(load(lora=True, lora_rank=16, **values)).scaling_of("q_proj")

    assert scale() == 2 and scale(lora_alpha=8) == 0.5
    assert scale(rslora=True) == 1 and scale(rslora=True, lora_alpha=8) == 2
    assert scale(rslora_plus=True) == 1 and load(lora=True, rslora_plus=True)["lora_plus_scale"] == 4

    def norm(**values: Any) -> float:
        return train_adapters(max_steps=1, lora_rank=16, **values).log[0]["grad_norm"]

    assert norm(lora_alpha=64) == pytest.approx(8 * norm(lora_alpha=8), rel=1e-4)
    assert norm(rslora=True, lora_alpha=8) == pytest.approx(4 * norm(lora_alpha=8), rel=1e-4)
    run = train_adapters(lora_rank=16, rslora_plus=True)
    assert (adapter_config(run)["use_rslora"], adapter_config(run)["lora_alpha"]) == (True, 4)


@pytest.mark.proves("lora_plus_scale")
def test_b_learns_at_a_multiple_of_the_rate(train_adapters: Train) -> None:
    """The first step of AdamW moves each weight by its learning rate, and B begins at zero."""
    for scale in (1.0, 4.0):
        run = train_adapters(max_steps=1, learning_rate=1e-3, lora_plus_scale=scale)
        assert np.median(np.abs(tensors(run.output)[B])) == pytest.approx(1e-3 * scale, rel=1e-2)


@pytest.mark.proves("lora_target_modules")
def test_the_layers_named_have_adapters(train_adapters: Train) -> None:
    def layers(run: Any) -> set[str]:
        return {name.partition("layers.")[2].rpartition(".lora_")[0] for name in tensors(run.output)}

    assert len(layers(train_adapters())) == 14
    assert layers(train_adapters(lora_target_modules="q_proj v_proj")) == {
        f"{layer}.self_attn.{name}" for layer in (0, 1) for name in ("q_proj", "v_proj")
    }
    assert {name[0] for name in layers(train_adapters(lora_target_modules="model.layers.1.*"))} == {"1"}


@pytest.mark.proves("lora_dropout")
def test_entries_of_an_adapters_input_are_dropped(train_adapters: Train, tiny_base: Path) -> None:
    """B = 0 hides them from the first loss, not from its gradient."""
    plain, dropped = train_adapters(max_steps=2), train_adapters(max_steps=2, lora_dropout=0.5)
    assert dropped.losses[0] == plain.losses[0]
    assert dropped.log[0]["grad_norm"] != plain.log[0]["grad_norm"] and dropped.losses[1] != plain.losses[1]


@pytest.mark.proves("dora")
def test_lengths_are_learnt_apart(train_adapters: Train) -> None:
    for dora in (False, True):
        run = train_adapters(dora=dora)
        assert any("lora_magnitude_vector" in name for name in tensors(run.output)) == dora
        assert adapter_config(run)["use_dora"] == dora


@pytest.mark.proves("lora_init")
def test_how_adapters_begin(train_adapters: Train) -> None:
    """What began with singular values is saved as the difference from them, with twice the rank."""
    kaiming = train_adapters(learning_rate=0.0)
    left = tensors(kaiming.output)
    assert left[A].shape == (8, 32) and left[A].any() and not left[B].any()
    pissa = train_adapters(lora_init="pissa", learning_rate=0.0)
    left = tensors(pissa.output)
    assert left[A].shape == (16, 32) and left[B].any()
    np.testing.assert_allclose(left[B] @ left[A], 0, atol=1e-5)  # nothing was learnt
    assert pissa.losses[0] == pytest.approx(kaiming.losses[0], rel=1e-5)


@pytest.mark.proves("lora_path")
def test_training_goes_on_from_adapters(train_adapters: Train, tmp_path: Path) -> None:
    first = train_adapters(output_dir=str(tmp_path / "first"))
    again = train_adapters(learning_rate=0.0, lora_path=str(first.output))
    np.testing.assert_equal(tensors(again.output), tensors(first.output))
    assert again.losses[0] < first.losses[0]
