"""The divergences of distillation beside trl 0.21's `GKDTrainer.generalized_jsd_loss`, on equal logits."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
import trl

from erniekit.model.divergence import Divergence, log_softmax, row_divergences
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL

pytestmark = pytest.mark.parity

ROWS, VOCABULARY = 6, 40
CASES = [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.1), ("jsd", 0.5), ("jsd", 0.9)]  # trl's beta of each


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize(("kind", "beta"), CASES)
def test_values_and_gradients_are_those_of_trl(kind: str, beta: float, temperature: float) -> None:
    random = np.random.default_rng(3)
    student, teacher = (random.normal(size=(ROWS, VOCABULARY)) * 3 for _ in range(2))
    labels = np.array([1, -100, 3, 4, -100, 6])
    theirs = torch.tensor(student[None], requires_grad=True)
    loss = trl.GKDTrainer.generalized_jsd_loss(
        theirs, torch.tensor(teacher[None]), torch.tensor(labels[None]), beta, temperature
    )
    loss.backward()
    trained = labels != -100
    p, q = (
        log_softmax(paddle.to_tensor(each[trained]), NO_TENSOR_PARALLEL, temperature) for each in (student, teacher)
    )
    settings = Divergence(kind, beta if kind == "jsd" else 0.5, temperature)
    values, gradient = row_divergences(p, q, settings, NO_TENSOR_PARALLEL)
    scale = trained.sum() * temperature**2  # theirs is not multiplied by the temperature squared
    np.testing.assert_allclose(float(values.sum()) / scale, float(loss.detach()), rtol=1e-6)
    np.testing.assert_allclose(gradient.numpy() / scale, theirs.grad.numpy()[0][trained], rtol=1e-6, atol=1e-9)
