"""The distribution that answers are drawn from, against transformers' logits processors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from erniekit.inference.sampling import Sampling, penalise, token_probabilities

pytestmark = pytest.mark.parity
SETTINGS = list(itertools.product((0.3, 1.0, 2.5), (0, 1, 7, 200), (0.05, 0.6, 0.95, 1.0), (1.0, 1.7, 0.8)))


@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_probabilities_are_those_of_transformers(spread):
    rng = np.random.default_rng(0)
    for temperature, top_k, top_p, penalty in SETTINGS:
        logits = rng.standard_normal(150) * spread
        seen = rng.integers(0, 150, 20).tolist()
        processors = LogitsProcessorList()
        if penalty != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(penalty))
        processors.append(TemperatureLogitsWarper(temperature))
        if top_k:
            processors.append(TopKLogitsWarper(min(top_k, 150)))
        if top_p < 1.0:
            processors.append(TopPLogitsWarper(top_p))
        scores = processors(torch.tensor([seen]), torch.tensor(logits)[None])
        expected = torch.softmax(scores, -1)[0].numpy()
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=penalty)
        found = token_probabilities(penalise(logits, seen, penalty), sampling)
        np.testing.assert_allclose(found, expected, atol=1e-12)
        assert ((found > 0) == (expected > 0)).all()
