"""KTO's losses and gradients beside trl 0.21's trainer, on equal log-probabilities."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
import torch
import trl

from erniekit.training.objectives.verdicts import kto_losses

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.33, 0.5)])
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_losses_and_gradients_are_those_of_trl(weights, shift):
    """Half of the answers are desirable, and the divergence is cut at 0 in one of two cases."""
    rng = np.random.default_rng(4)
    own, reference, other, other_reference = rng.normal(-20, 3, (4, 12)).astype(np.float32)
    other += np.float32(shift) - (other - other_reference).mean()
    desirable = np.arange(12) < 6
    fake = SimpleNamespace(
        calculate_KL=True, beta=0.2, loss_type="kto", desirable_weight=weights[0], undesirable_weight=weights[1],
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda value: value),
    )  # fmt: skip
    theirs = torch.tensor(own, requires_grad=True)
    ours = [torch.tensor(values) for values in (reference, other, other_reference)]
    losses, chosen_rewards, _, divergence = trl.KTOTrainer.kto_loss(
        fake, theirs[desirable], theirs[~desirable], ours[1], ours[0][desirable], ours[0][~desirable], ours[2]
    )
    losses.nanmean().backward()

    given = paddle.to_tensor(own)
    given.stop_gradient = False
    ratios = given - paddle.to_tensor(reference)
    mean = float((other.astype(np.float64) - other_reference).mean())
    assert float(divergence) == pytest.approx(max(0.0, mean), abs=2e-6)
    found = kto_losses(ratios, paddle.to_tensor(desirable.astype(np.float32)), max(0.0, mean), 0.2, weights)
    found.mean().backward()
    np.testing.assert_allclose(found.numpy()[desirable], losses.detach().numpy()[:6], atol=1e-6)
    np.testing.assert_allclose(found.numpy()[~desirable], losses.detach().numpy()[6:], atol=1e-6)
    np.testing.assert_allclose(given.grad.numpy(), theirs.grad.numpy(), atol=1e-6)
    np.testing.assert_allclose(0.2 * ratios.numpy()[desirable], chosen_rewards.numpy(), rtol=1e-6)
