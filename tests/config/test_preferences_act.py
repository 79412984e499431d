"""Proofs of section 2.3: the loss over pairs, and its reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import exp, log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.config.samples import load, problems

Train = Callable[..., Any]
LN2 = log(2)
# A model that is its own reference finds both answers equally likely: every difference in the first loss is 0. Each
# loss has then a value of its own, by its formula.
FIRST_LOSS = {
    "sigmoid": LN2, "robust": LN2, "hinge": 1.0, "ipo": 1 / (2 * 0.1) ** 2, "kto_pair": 0.5, "dpop": LN2,
    "sppo_hard": 2 * (0.5 / 0.1) ** 2, "nca_pair": 2 * LN2,
}  # fmt: skip


@pytest.fixture
def first_loss(prefer: Train) -> Callable[..., float]:
    """The loss of the first step."""
    return lambda **values: prefer(max_steps=1, **values).losses[0]


@pytest.mark.proves("loss_type")
@pytest.mark.parametrize("name", FIRST_LOSS)
def test_the_first_loss_is_that_of_no_difference(name: str, first_loss: Callable[..., float]) -> None:
    needed = {"label_smoothing": 0.1} if name == "robust" else {}
    assert first_loss(loss_type=name, **needed) == pytest.approx(FIRST_LOSS[name], rel=1e-4)


@pytest.mark.proves("loss_type", "simpo_gamma")
def test_losses_without_a_reference(prefer: Train) -> None:
    """simpo is -log sigmoid(beta x difference - gamma): between the losses of differences below and above gamma."""
    plain, wide = prefer(max_steps=1, loss_type="simpo"), prefer(max_steps=1, loss_type="simpo", simpo_gamma=2.0)
    assert "reference:" not in plain.said
    assert plain.losses[0] == pytest.approx(log(1 + exp(0.5)), rel=0.05)
    assert wide.losses[0] == pytest.approx(log(1 + exp(2.0)), rel=0.05)
    orpo = prefer(max_steps=1, loss_type="orpo")
    assert "reference:" not in orpo.said and orpo.losses[0] > 3  # with the SFT loss of a model that knows nothing


@pytest.mark.proves("beta")
def test_beta_is_the_factor_of_the_difference(first_loss: Callable[..., float]) -> None:
    for beta in (0.1, 0.5):
        assert first_loss(loss_type="ipo", beta=beta) == pytest.approx(1 / (2 * beta) ** 2, rel=1e-3)


@pytest.mark.proves("offset_alpha")
def test_scores_ask_for_a_margin(first_loss: Callable[..., float], pairs: Path, tmp_path: Path) -> None:
    """-log sigmoid(beta (0 - alpha / beta x log(score difference)))."""
    records = [json.loads(line) | {"sort": [4, 1]} for line in pairs.read_text().splitlines()]
    scored = tmp_path / "scored.jsonl"
    scored.write_text("".join(json.dumps(record) + "\n" for record in records))
    for alpha in (0.0, 0.05, 0.2):
        loss = first_loss(offset_alpha=alpha, train_dataset_path=str(scored))
        assert loss == pytest.approx(log(1 + exp(alpha * log(3))), rel=1e-4)


@pytest.mark.proves("label_smoothing")
def test_the_share_of_exchanged_labels(prefer: Train) -> None:
    """-(1 - s) log sigmoid(x) - s log sigmoid(-x): the same at x = 0, with a gradient smaller by 1 - 2 s."""
    plain, smooth = prefer(max_steps=1), prefer(max_steps=1, label_smoothing=0.25)
    assert smooth.losses[0] == pytest.approx(plain.losses[0], rel=1e-5)
    assert smooth.log[0]["grad_norm"] == pytest.approx(plain.log[0]["grad_norm"] * 0.5, rel=1e-3)


@pytest.mark.proves("pref_loss_ratio", "sft_loss_ratio")
def test_the_weights_of_both_losses(first_loss: Callable[..., float]) -> None:
    assert first_loss(pref_loss_ratio=0.5) == pytest.approx(LN2 / 2, rel=1e-5)
    sft = first_loss(pref_loss_ratio=0.0, sft_loss_ratio=1.0)
    assert first_loss(sft_loss_ratio=0.5) == pytest.approx(LN2 + sft / 2, rel=1e-5) and sft > 3


@pytest.mark.proves("normalize_logps")
def test_answers_may_count_by_the_mean_of_their_lengths(first_loss: Callable[..., float]) -> None:
    """Without a reference, whose difference would be 0 either way."""
    free = {"reference_free": True}
    assert first_loss(**free, normalize_logps=True) != pytest.approx(first_loss(**free), rel=1e-3)
    assert "normalize_logps" in "".join(load(stage="DPO", loss_type="simpo", normalize_logps=True).messages)


@pytest.mark.proves("dpop_lambda")
def test_the_penalty_of_less_likely_answers(prefer: Train) -> None:
    losses = {weight: prefer(loss_type="dpop", dpop_lambda=weight, max_steps=3).losses for weight in (0.0, 50.0)}
    plain = prefer(max_steps=3).losses
    np.testing.assert_allclose(losses[0.0], plain, rtol=1e-5)  # a penalty of no weight leaves DPO
    assert losses[50.0][0] == pytest.approx(plain[0], rel=1e-5) and losses[50.0][1:] != losses[0.0][1:]


@pytest.mark.proves("max_prompt_len")
def test_prompts_lose_their_oldest_turns(read_epoch: Callable[..., SimpleNamespace], pairs: Path) -> None:
    values = {"stage": "DPO", "train_dataset_path": str(pairs)}
    whole, cut = read_epoch(**values), read_epoch(**values, max_prompt_len=30)
    shortened = (cut.lengths < whole.lengths).sum()
    assert shortened > 2 and f"{shortened} shortened" in cut.reported and "shortened" not in whole.reported
    changed = load(stage="DPO", max_seq_len=128, max_prompt_len=200)
    assert changed["max_prompt_len"] == 118 and "changed max_prompt_len 200 -> 118" in "".join(changed.messages)


@pytest.mark.proves("reference_free")
def test_without_a_reference_its_log_probabilities_count_as_zero(prefer: Train) -> None:
    free, plain = prefer(max_steps=1, reference_free=True), prefer(max_steps=1)
    assert "reference:" in plain.said and "reference:" not in free.said
    assert abs(free.losses[0] - LN2) > 1e-3 and plain.losses[0] == pytest.approx(LN2, rel=1e-5)


@pytest.mark.proves("ref_model_name_or_path")
def test_another_model_can_be_the_reference(prefer: Train, tmp_path: Path) -> None:
    other = prefer(max_steps=2, output_dir=str(tmp_path / "other"))
    apart = prefer(max_steps=1, ref_model_name_or_path=str(other.output))
    assert abs(apart.losses[0] - LN2) > 1e-3


@pytest.mark.proves("reference_model")
def test_the_reference_is_found_in_the_way_asked_for(prefer: Train) -> None:
    copied, measured = prefer(reference_model="copy"), prefer(reference_model="precomputed")
    assert "reference: a frozen copy" in copied.said and "pairs computed" in measured.said
    np.testing.assert_allclose(measured.losses, copied.losses, rtol=2e-4)
    assert "pairs computed" not in prefer(reference_model="adapters", lora=True).said
    assert "no adapters to disable" in problems(stage="DPO", reference_model="adapters")


@pytest.mark.proves("ref_model_update_steps")
def test_the_reference_follows_the_model(prefer: Train) -> None:
    losses = prefer(ref_model_update_steps=3, max_steps=5).losses
    assert losses[0] == pytest.approx(LN2, rel=1e-5) == losses[3]  # after step 3 the model was its reference again
    assert abs(losses[1] - LN2) > 1e-4 and abs(losses[4] - LN2) > 1e-4
    assert abs(prefer(max_steps=5).losses[3] - LN2) > 1e-4
