"""Preference losses, their gradients and log-probabilities beside trl 0.21 and transformers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
import torch
import trl

from erniekit.config.sections.dpo import DpoParameters
from erniekit.data.collate import collate
from erniekit.data.pairs import EncodedAnswer, join_pair
from erniekit.model.weights import named_weights, save_model_folder
from erniekit.training.objectives.preference import answer_log_probabilities, preference
from erniekit.training.objectives.preference_losses import LOSSES

from ..model.tiny import tiny_model
from ..training.test_recorded_preferences import CASES, LOG_PROBABILITIES, RECORDED, ours

pytestmark = pytest.mark.parity


def trl_losses(name, beta, smoothing, chosen, rejected, ref_chosen, ref_rejected):
    """trl's own functions, called on what they read of a trainer."""
    fake = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"), reference_free=False, f_divergence_type="reverse_kl",
        beta=beta, label_smoothing=smoothing, loss_type=name, simpo_gamma=0.7,
    )  # fmt: skip
    if name == "simpo":
        return trl.CPOTrainer.cpo_loss(fake, chosen, rejected)[0]
    if name == "orpo":
        return -trl.ORPOTrainer.odds_ratio_loss(fake, chosen, rejected)[0]
    return trl.DPOTrainer.dpo_loss(fake, chosen, rejected, ref_chosen, ref_rejected, name)[0]


def theirs(name, beta, smoothing):
    """Losses and gradients of trl for the chosen and rejected log-probabilities."""
    chosen, rejected, *reference = (torch.tensor(row, dtype=torch.float32) for row in LOG_PROBABILITIES)
    chosen.requires_grad_(), rejected.requires_grad_()
    losses = trl_losses(name, beta, smoothing, chosen, rejected, *reference)
    losses.sum().backward()
    return [losses.detach().numpy(), chosen.grad.numpy(), rejected.grad.numpy()]


@pytest.mark.parametrize(("name", "beta", "smoothing"), CASES)
def test_values_and_gradients_are_those_of_trl(name, beta, smoothing):
    for own, other in zip(ours(name, beta, smoothing), theirs(name, beta, smoothing), strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-5, atol=1e-6)


def test_the_recorded_values_are_those_of_trl():
    """`python -m tests.parity.test_preference_losses` records them anew."""
    for case, recorded in json.loads(RECORDED.read_text())["cases"].items():
        name, beta, smoothing = case.split()
        for values, other in zip(recorded, theirs(name, float(beta), float(smoothing)), strict=True):
            np.testing.assert_allclose(values, other, rtol=1e-6, atol=1e-7)


def test_losses_without_a_counterpart_are_known():
    """trl 0.21 has no kto_pair and no dpop any more, and takes IPO's log-probabilities as means over tokens."""
    assert set(LOSSES) - {name for name, _, _ in CASES} == {"kto_pair", "dpop"}


def three_pairs(rng, window=None):
    """Prompts with two answers each, and the batch of two rows in which they are packed."""
    tokens = [
        [rng.integers(1, 53, length).tolist() for length in lengths] for lengths in [(9, 4, 6), (3, 11, 2), (1, 5, 5)]
    ]
    samples = [join_pair(prompt, EncodedAnswer(a, a), EncodedAnswer(b, b), window=window) for prompt, a, b in tokens]
    return tokens, collate([samples[:2], samples[2:]], [[0, 1], [2]], 0, pairs=True)


@pytest.mark.parametrize("shape", [{}, {"model_type": "mistral", "sliding_window": 6}], ids=["full", "window"])
def test_log_probabilities_of_packed_pairs_are_those_of_transformers(shape, tmp_path):
    import transformers

    decoder = tiny_model(**shape)
    save_model_folder(decoder, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    rng = np.random.default_rng(3)
    tokens, batch = three_pairs(rng, window=shape.get("sliding_window"))
    found = answer_log_probabilities(fused_head=True)(decoder, batch)
    for number, (prompt, *answers) in enumerate(tokens):
        for answer, value in zip(answers, (found.chosen[number], found.rejected[number]), strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            logps = trl.trainer.utils.selective_log_softmax(logits, torch.tensor(answer))
            assert float(value) == pytest.approx(float(logps.sum()), abs=1e-5 * len(answer))


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _, _ in CASES))
def test_gradients_of_packed_pairs_are_those_of_transformers_and_trl(name, tmp_path):
    """Of every weight: two rows of packed pairs here, whole dialogues one by one there."""
    import transformers

    decoder, beta, smoothing = tiny_model(tie_word_embeddings=False), 0.3, 0.1 if name == "robust" else 0.0
    save_model_folder(decoder, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    rng = np.random.default_rng(4)
    tokens, batch = three_pairs(rng)
    constants = rng.normal(-20, 3, (2, 3)).astype(np.float32)
    settings = DpoParameters(loss_type=name, beta=beta, label_smoothing=smoothing, simpo_gamma=0.7)
    objective = preference(settings, lambda batches: [tuple(map(paddle.to_tensor, constants))] * len(batches))
    found = objective.loss(decoder, batch)
    found.loss_sum.backward()

    sums, lengths = [], []
    for prompt, *answers in tokens:
        for answer in answers:
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            sums.append(trl.trainer.utils.selective_log_softmax(logits, torch.tensor(answer)).sum())
            lengths.append(len(answer))
    sums, lengths = torch.stack(sums), torch.tensor(lengths)
    answers = (sums / lengths if LOSSES[name].length_normalized else sums).reshape(-1, 2)
    loss = trl_losses(name, beta, smoothing, answers[:, 0], answers[:, 1], *map(torch.tensor, constants)).sum()
    if name == "orpo":
        loss = loss - answers[:, 0].sum()
    loss.backward()
    assert float(found.loss_sum) == pytest.approx(loss.item(), rel=1e-5)
    theirs_by_name = {key: weight.grad.numpy() for key, weight in model.named_parameters()}
    for key, weight in named_weights(decoder).items():
        expected = theirs_by_name[key].T if key.endswith("_proj.weight") else theirs_by_name[key]
        scale = np.abs(expected).max()
        assert scale > 0
        np.testing.assert_allclose(weight.grad.numpy(), expected, atol=1e-4 * scale, err_msg=key)


def record():
    versions = {"trl": trl.__version__, "torch": torch.__version__}
    cases = {
        f"{name} {beta} {noise}": [part.tolist() for part in theirs(name, beta, noise)] for name, beta, noise in CASES
    }
    RECORDED.write_text(json.dumps({"versions": versions, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    record()
