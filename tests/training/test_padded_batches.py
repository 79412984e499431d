"""Padding changes no loss: neither rows nor positions that hold nothing count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.config.sections.dpo import DpoParameters
from erniekit.data.batch import Batch
from erniekit.data.collate import collate
from erniekit.data.pairs import EncodedAnswer, join_pair
from erniekit.data.templates.ernie import Sample
from erniekit.model.weights import named_weights
from erniekit.training.objectives.objective import Objective, supervised
from erniekit.training.objectives.preference import preference

from ..model.tiny import EXPERTS, tiny_model

SHAPES = {
    "dense": {},
    "experts and predictions": {**EXPERTS, "num_nextn_predict_layers": 1},
}


def batch_of(seed: int, pairs: bool) -> Batch:
    """Two rows of two samples, and one without any."""
    random = np.random.default_rng(seed)

    def sample() -> Sample:
        prompt, one, other = (random.integers(1, 53, int(size)).tolist() for size in random.integers(2, 9, 3))
        if pairs:
            return join_pair(prompt, EncodedAnswer(one, one), EncodedAnswer(other, other), 1.0)
        return Sample(np.array(prompt, np.int32), np.array(prompt, np.int32))

    return collate([[sample(), sample()], [sample(), sample()], []], [[0, 1], [2, 3], []], 0, pairs=pairs)


def loss_and_gradients(model, objective: Objective, batch: Batch) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    model.clear_gradients()
    model.begin_micro_batch(step=0, micro_batch=0)
    result = objective.loss(model, batch)
    (result.loss_sum / objective.units(batch)).backward()
    weights = {name: weight.grad.numpy() for name, weight in named_weights(model).items() if weight.grad is not None}
    return {name: float(tensor) for name, tensor in result.named_tensors().items()}, weights


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pairs", [False, True], ids=["documents", "pairs"])
@settings(max_examples=5, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), more_rows=st.integers(0, 2), more_length=st.integers(0, 40))
def test_a_padded_batch_has_the_same_loss_and_gradients(
    shape: str, pairs: bool, seed: int, more_rows: int, more_length: int
) -> None:
    model, batch = tiny_model(**SHAPES[shape]), batch_of(seed, pairs)
    model.train()
    settings = DpoParameters(loss_type="simpo", beta=0.3, sft_loss_ratio=0.2)
    objective = preference(settings) if pairs else supervised(multi_token_pred_lambda=0.3)
    rows, length = batch.shape
    expected, expected_gradients = loss_and_gradients(model, objective, batch)
    found, gradients = loss_and_gradients(model, objective, batch.padded(rows + more_rows, length + more_length))
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        np.testing.assert_allclose(
            gradients[name], gradient, atol=1e-5 * max(1.0, np.abs(gradient).max()), err_msg=name
        )
