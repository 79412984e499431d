"""Reward models beside transformers' class for sequence classification, and trl 0.21's loss."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
import torch
import trl

from erniekit.data.collate import collate
from erniekit.data.pairs import EncodedAnswer, join_scored
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.weights import named_weights, save_model_folder
from erniekit.training.objectives.reward_model import answer_scores, reward_losses

from ..model.tiny import tiny_model

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize("centering", [None, 0.05])
def test_losses_are_those_of_trl(margin, centering):
    rng = np.random.default_rng(1)
    scores, margins = rng.normal(0, 2, (2, 9)).astype(np.float32), rng.random(9).astype(np.float32)
    theirs = [torch.tensor(row.reshape(-1, 1), requires_grad=True) for row in scores]
    answers = iter(theirs)
    fake = SimpleNamespace(args=SimpleNamespace(center_rewards_coefficient=centering))
    names = ("input_ids_chosen", "attention_mask_chosen", "input_ids_rejected", "attention_mask_rejected")
    inputs = dict.fromkeys(names) | ({"margin": torch.tensor(margins.reshape(-1, 1))} if margin else {})
    loss = trl.RewardTrainer.compute_loss(fake, lambda **given: {"logits": next(answers)}, inputs)
    loss.backward()

    ours = [paddle.to_tensor(row) for row in scores]
    for tensor in ours:
        tensor.stop_gradient = False
    found = reward_losses(*ours, paddle.to_tensor(margins) if margin else 0.0, centering or 0.0).mean()
    found.backward()
    assert float(found) == pytest.approx(loss.item(), abs=1e-6)
    for own, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(own.grad.numpy(), other.grad.numpy().ravel(), atol=1e-6)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_saved_model_opens_in_transformers_with_the_same_scores_and_gradients(model_type, tmp_path):
    import transformers

    shape = tiny_model(model_type=model_type, num_key_value_heads=4).config
    decoder = build_model(replace(shape, scored=True), None, seed=3)
    save_model_folder(decoder, tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, attn_implementation="eager"
    ).eval()
    assert model.config.num_labels == 1 and type(model).__name__.endswith("ForSequenceClassification")
    rng = np.random.default_rng(2)
    tokens = [[rng.integers(1, 53, length).tolist() for length in (5, 3, 4)] for _ in range(3)]
    samples = [join_scored(prompt, EncodedAnswer(a, a), EncodedAnswer(b, b)) for prompt, a, b in tokens]
    found = answer_scores()(decoder, collate([samples], [[0, 1, 2]], 0, pairs=True))
    reward_losses(*found).sum().backward()
    scores = torch.stack([
        torch.stack([model(torch.tensor([prompt + answer])).logits[0, 0] for answer in answers])
        for prompt, *answers in tokens
    ])  # fmt: skip
    (-torch.nn.functional.logsigmoid(scores[:, 0] - scores[:, 1])).sum().backward()
    np.testing.assert_allclose(np.stack([found.chosen.numpy(), found.rejected.numpy()], 1), scores.detach(), atol=2e-6)
    theirs = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
    for name, weight in named_weights(decoder).items():
        expected = theirs[name].T if name.endswith("_proj.weight") else theirs[name]
        np.testing.assert_allclose(weight.grad.numpy(), expected, atol=1e-4 * np.abs(expected).max(), err_msg=name)


def test_a_model_that_transformers_saved_opens_here(tmp_path):
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=53, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_labels=1, tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    found = ModelConfig.from_folder(tmp_path)
    assert found.scored
    decoder = build_model(found, tmp_path)
    np.testing.assert_array_equal(named_weights(decoder)["score.weight"].numpy(), model.score.weight.detach().numpy())
