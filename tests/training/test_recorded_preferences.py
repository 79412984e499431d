"""Preference losses beside values and gradients that trl 0.21 gave (tests/parity/test_preference_losses.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from erniekit.config.sections.dpo import DpoParameters
from erniekit.training.objectives.preference_losses import LOSSES, LossContext

RECORDED = Path(__file__).parent / "recorded" / "preference_losses.json"
# chosen, rejected, and both under the reference: means where the loss takes means, sums elsewhere
LOG_PROBABILITIES = [
    [-0.5, -1.7, -3.0, -0.01, -2.2, -8.0],
    [-1.5, -0.4, -3.0, -4.0, -0.3, -2.5],
    [-0.7, -1.1, -2.0, -0.9, -2.9, -5.0],
    [-1.1, -0.9, -2.0, -2.0, -1.3, -1.5],
]
CASES = [
    ("sigmoid", 0.1, 0.0), ("sigmoid", 0.5, 0.2), ("robust", 0.3, 0.1), ("hinge", 0.7, 0.0), ("ipo", 0.2, 0.0),
    ("sppo_hard", 0.4, 0.0), ("nca_pair", 0.6, 0.0), ("simpo", 2.0, 0.0), ("simpo", 1.5, 0.1), ("orpo", 0.1, 0.0),
]  # fmt: skip


def ours(name, beta, smoothing):
    """Losses, and their gradients by both log-probabilities."""
    chosen, rejected, *reference = (paddle.to_tensor(np.array(row, np.float32)) for row in LOG_PROBABILITIES)
    chosen.stop_gradient = rejected.stop_gradient = False
    settings = DpoParameters(loss_type=name, beta=beta, label_smoothing=smoothing, simpo_gamma=0.7)
    answers = (chosen, rejected) if LOSSES[name].length_normalized else (chosen - reference[0], rejected - reference[1])
    losses = LOSSES[name].function(*answers, LossContext(settings))
    losses.sum().backward()
    return [losses.numpy(), chosen.grad.numpy(), rejected.grad.numpy()]


@pytest.mark.parametrize(("name", "beta", "smoothing"), CASES)
def test_values_and_gradients_are_those_recorded_from_trl(name, beta, smoothing):
    recorded = json.loads(RECORDED.read_text())["cases"][f"{name} {beta} {smoothing}"]
    for own, other in zip(ours(name, beta, smoothing), recorded, strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-5, atol=1e-6)
