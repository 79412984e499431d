"""Greedy generation against transformers, token by token, alone and in a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from erniekit.inference.generation import generate
from erniekit.inference.sampling import Sampling

from .families import CASES, CLASSES
from .families import random_model as random_family_model
from .test_decoder import VOCABULARY, ours_from, random_model

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_greedy_answers_agree(penalty, tmp_path):
    theirs = random_model()
    ours = ours_from(theirs, tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, length).tolist() for length in (1, 7, 30)]
    expected = []
    for prompt in prompts:
        out = theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=40,
            do_sample=False,
            repetition_penalty=penalty,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(out[0, len(prompt) :].tolist())
    assert len(set(map(tuple, expected))) == 3
    sampling = Sampling(max_new_tokens=40, repetition_penalty=penalty)
    assert generate(ours, prompts, sampling) == expected


@pytest.mark.parametrize("family", CLASSES)
def test_every_family_agrees_with_a_repetition_penalty_and_a_stop_token(family, tmp_path):
    shapes = dict(CASES.values())
    theirs = random_family_model(family, **shapes[family])
    ours = ours_from(theirs, tmp_path)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, VOCABULARY, length).tolist() for length in (2, 11, 25)]

    def expected(**settings):
        settings = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "repetition_penalty": 1.4, **settings}
        return [theirs.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() for prompt in prompts]

    free = expected(eos_token_id=None)
    assert generate(ours, prompts, Sampling(max_new_tokens=30, repetition_penalty=1.4)) == free
    stop = free[1][9]
    sampling = Sampling(max_new_tokens=30, repetition_penalty=1.4, stop_token_ids=(stop,))
    cut = [answer[: answer.index(stop)] if stop in answer else answer for answer in expected(eos_token_id=stop)]
    assert generate(ours, prompts, sampling) == cut != free
