"""Proofs of section 2.5: losses of routers, balance without a loss, and multi-token prediction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.config.observing import tensors

Train = Callable[..., Any]
ROUTER = "model.layers.1.mlp.gate.weight"


@pytest.fixture
def train_experts(train: Train, moe_model: Path) -> Train:
    return lambda **values: train(**{"model_name_or_path": str(moe_model)} | values)


@pytest.mark.proves("moe_aux_loss_lambda", "moe_z_loss_lambda", "moe_orthogonal_loss_lambda")
@pytest.mark.parametrize("kind", ["aux", "z", "orthogonal"])
def test_a_loss_of_routers_falls_with_its_weight(kind: str, train_experts: Train) -> None:
    """It reaches the router, is shown on its own, and leaves the loss shown that of the target tokens."""
    name, figure = f"moe_{kind}_loss_lambda", f"router_{kind}_loss"
    runs, routers = {}, {}
    for weight in (0.0, 1e-9, 1.0):
        runs[weight] = train_experts(**{name: weight})
        routers[weight] = tensors(runs[weight].output)[ROUTER]
    assert figure not in runs[0.0].log[0]
    assert runs[1.0].losses[0] == pytest.approx(runs[0.0].losses[0], rel=1e-6)
    assert runs[1.0].log[-1][figure] < runs[1e-9].log[-1][figure]
    assert np.abs(routers[1.0] - routers[0.0]).max() > 1e-3


@pytest.mark.proves("moe_router_bias_update_rate")
def test_the_bias_of_experts_moves_by_the_rate(train_experts: Train) -> None:
    for rate in (0.0, 0.05):
        weights = tensors(train_experts(moe_router_bias_update_rate=rate, max_steps=1).output)
        (bias,) = [values for name, values in weights.items() if "e_score_correction_bias" in name]
        np.testing.assert_allclose(np.abs(bias[bias != 0]), rate, rtol=1e-6)
        assert bias.any() == bool(rate)


@pytest.mark.proves("moe_use_aux_free")
def test_the_bias_of_experts_is_left_out(train_experts: Train, tmp_path: Path) -> None:
    """A model with a bias, trained on without it: experts are chosen otherwise, and the saved bias is zero."""
    biased = train_experts(moe_router_bias_update_rate=0.5, max_steps=1, output_dir=str(tmp_path / "biased")).output
    losses = {}
    for kept in (True, False):
        run = train_experts(model_name_or_path=str(biased), continue_training=True, moe_use_aux_free=kept, max_steps=1)
        (bias,) = [values for name, values in tensors(run.output).items() if "e_score_correction_bias" in name]
        assert bool(bias.any()) == kept
        losses[kept] = run.losses[0]
    assert losses[True] != losses[False]


@pytest.mark.proves("multi_token_pred_lambda")
def test_the_weight_of_predictions_is_that_of_their_gradient(train_experts: Train) -> None:
    predicting = {"num_nextn_predict_layers": 1, "moe_aux_loss_lambda": 0.0, "max_steps": 1}
    without = train_experts(**predicting, multi_token_pred_lambda=0.0)
    some, twice = (train_experts(**predicting, multi_token_pred_lambda=weight) for weight in (3.0, 6.0))
    assert some.losses[0] == pytest.approx(without.losses[0], rel=1e-6)
    norms = [run.log[0]["grad_norm"] for run in (without, some, twice)]
    assert norms[0] < norms[1] < norms[2] < 2 * norms[1]
