"""Losses, gradients and advantages of policy gradients beside trl 0.21's GRPOTrainer and RLOOTrainer."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
import torch
import trl

from erniekit.rollouts.advantages import group_advantages, leave_one_out_advantages
from erniekit.training.objectives.policy_losses import KL_ESTIMATORS, LOSSES, Clip, clipped_losses, token_weights

pytestmark = pytest.mark.parity
LENGTHS, LONGEST = [5, 2, 7, 1], 8


def inputs(seed: int = 0) -> dict[str, np.ndarray]:
    """Log-probabilities of four answers under three models, float64 [4, 7], and their advantages."""
    rng = np.random.default_rng(seed)
    old = -rng.gamma(2.0, 0.6, (4, 7))
    return {
        "old": old,
        "new": old + rng.normal(0, 0.25, old.shape),
        "reference": old + rng.normal(0, 0.3, old.shape),
        "advantages": rng.normal(0, 1, 4),
        "mask": np.arange(7)[None] < np.array(LENGTHS)[:, None],
    }


def of_trl(name: str, level: str, beta: float, delta: float | None) -> tuple[float, np.ndarray]:
    """`GRPOTrainer._compute_loss`, called on what it reads of a trainer; the loss and its gradient."""
    values = {key: torch.tensor(value) for key, value in inputs().items()}
    new = values["new"].requires_grad_()
    mask = values["mask"].int()
    fake = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new)),
        top_entropy_quantile=1.0, beta=beta, importance_sampling_level=level, epsilon_low=0.2, epsilon_high=0.28,
        args=SimpleNamespace(delta=delta), loss_type=name, max_completion_length=LONGEST,
        model=SimpleNamespace(training=True), accelerator=SimpleNamespace(gather=lambda value: value.reshape(1)),
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    ids = torch.zeros(4, 7, dtype=torch.long)
    given = {
        "prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1], "completion_ids": ids, "completion_mask": mask,
        "advantages": values["advantages"], "old_per_token_logps": values["old"],
        "ref_per_token_logps": values["reference"],
    }  # fmt: skip
    loss = trl.GRPOTrainer._compute_loss(fake, None, given)
    loss.backward()
    return float(loss.detach()), new.grad.numpy()


def own(name: str, beta: float, maximum: float = 0.0) -> tuple[float, np.ndarray]:
    """The same from packed tokens."""
    values, form = inputs(), LOSSES[name]
    mask = values["mask"]
    new = paddle.to_tensor(values["new"][mask], stop_gradient=False)
    answers = paddle.to_tensor(np.repeat(np.arange(4), LENGTHS))
    old, reference = (paddle.to_tensor(values[key][mask]) for key in ("old", "reference"))
    advantages = paddle.to_tensor(np.repeat(values["advantages"], LENGTHS))
    clip = Clip(0.2, 0.28, maximum)
    tokens = clipped_losses(new, old, advantages, answers, clip=clip, level=form.level).losses
    if beta:
        tokens = tokens + beta * KL_ESTIMATORS["k3"](new, reference)
    units = sum(LENGTHS) if form.weight == "token" else 4
    loss = (tokens * token_weights(answers, form.weight, LONGEST, "float64")).sum() / units
    loss.backward()
    gradient = np.zeros(mask.shape)
    assert new.grad is not None
    gradient[mask] = new.grad.numpy()
    return float(loss), gradient


# trl 0.21 calls the mean over tokens, which DAPO has, `bnpo`, and GSPO the loss `grpo` with ratios of sequences.
THEIRS = {"grpo": ("grpo", "token"), "dr_grpo": ("dr_grpo", "token"), "dapo": ("bnpo", "token"),
          "gspo": ("grpo", "sequence")}  # fmt: skip


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("name", THEIRS)
def test_losses_and_gradients_are_those_of_trl(name: str, beta: float) -> None:
    loss, gradient = own(name, beta)
    expected, expected_gradient = of_trl(*THEIRS[name], beta, None)
    assert loss == pytest.approx(expected, abs=1e-6, rel=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-9, rtol=1e-6)


def test_the_second_side_of_the_clip_is_that_of_trl() -> None:
    loss, gradient = own("grpo", 0.0, maximum=1.3)
    expected, expected_gradient = of_trl("grpo", "token", 0.0, 1.3)
    assert loss == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-9, rtol=1e-6)


def lines_of_rloo(first: str, last: str) -> str:
    """The statements of `RLOOTrainer.train` from the first line that begins so to the last one, as they stand there."""
    lines = inspect.getsource(trl.RLOOTrainer.train).splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip().startswith(first))
    stop = next(number for number in range(start, len(lines)) if lines[number].strip().startswith(last))
    return textwrap.dedent("\n".join(lines[start : stop + 1]))


def test_advantages_are_those_of_trl() -> None:
    rewards = np.random.default_rng(1).normal(size=(3, 4))
    flat = torch.tensor(rewards.T.copy()).flatten()  # trl repeats the prompts: answer k of all prompts stand together
    scope = {"rlhf_reward": flat, "args": SimpleNamespace(rloo_k=4)}
    exec(lines_of_rloo("rlhf_reward = rlhf_reward.reshape", "advantages = advantages.flatten"), scope)
    np.testing.assert_allclose(
        leave_one_out_advantages(rewards), scope["advantages"].reshape(4, 3).T.numpy(), rtol=1e-6, atol=1e-9
    )
    source = inspect.getsource(trl.GRPOTrainer._generate_and_score_completions)
    body = source[source.index("mean_grouped_rewards = rewards.view") : source.index("# Slice to keep only")]
    body = re.sub(r"^.*(logger|warn).*$", "", body, flags=re.MULTILINE)
    for scale in (True, False):
        scope = {
            "rewards": torch.tensor(rewards).flatten(), "torch": torch,
            "self": SimpleNamespace(num_generations=4, scale_rewards=scale),
        }  # fmt: skip
        exec(textwrap.dedent("        " + body), scope)
        found = group_advantages(rewards, scale=scale)
        np.testing.assert_allclose(found, scope["advantages"].reshape(3, 4).numpy(), rtol=1e-6, atol=1e-9)


def test_the_loss_of_rloo_is_that_of_trl() -> None:
    values = {key: torch.tensor(value) for key, value in inputs().items()}
    new, mask = values["new"].requires_grad_(), values["mask"]
    scope = {
        "torch": torch, "args": SimpleNamespace(cliprange=0.2), "mb_advantage": values["advantages"],
        "new_logprobs": torch.where(mask, new, 1.0), "mb_logprobs": torch.where(mask, values["old"], 1.0),
    }  # fmt: skip
    exec(lines_of_rloo("new_ratio =", "pg_loss = pg_loss_max.mean"), scope)
    scope["pg_loss"].backward()
    flat = inputs()
    own_new = paddle.to_tensor(flat["new"][flat["mask"]], stop_gradient=False)
    answers = paddle.to_tensor(np.repeat(np.arange(4), LENGTHS))
    advantages = paddle.to_tensor(np.repeat(flat["advantages"], LENGTHS))
    tokens = clipped_losses(
        own_new, paddle.to_tensor(flat["old"][flat["mask"]]), advantages, answers, clip=Clip(0.2, 0.2), level="sum"
    ).losses
    loss = (tokens * token_weights(answers, "answer", LONGEST, "float64")).sum() / 4
    loss.backward()
    assert float(loss) == pytest.approx(float(scope["pg_loss"].detach()), rel=1e-6)
    assert own_new.grad is not None
    np.testing.assert_allclose(own_new.grad.numpy(), new.grad.numpy()[flat["mask"]], rtol=1e-6, atol=1e-9)
