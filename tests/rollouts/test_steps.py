"""What the steps of a run are made of: the answers of a rollout, divided among its updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from erniekit.errors import CheckpointError
from erniekit.rollouts import steps as steps_module
from erniekit.rollouts.records import RolloutRecords
from erniekit.rollouts.rollout import Rollout, Sizes
from erniekit.rollouts.steps import RolloutSteps
from erniekit.training.checkpoint.tensors import TensorFiles
from tests.runners.test_policy import answer_prompts, prompts, rollouts  # noqa: F401 (fixtures)
from tests.tiny_runs import save_random_model

Run = Callable[..., Any]
SEVERAL = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 4}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The answers of each micro-batch that is made, in order."""
    found: list[list[int]] = []
    make = Rollout.batch

    def batch(self: Rollout, chosen: Sequence[int], *given: Any, **named: Any) -> Any:
        found.append(list(chosen))
        return make(self, chosen, *given, **named)

    monkeypatch.setattr(Rollout, "batch", batch)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_micro_batches_have_the_size_that_is_asked_for(answer_prompts: Run, asked: list[list[int]], size: int) -> None:  # noqa: F811
    answer_prompts(**SEVERAL, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size)
    assert {len(chosen) for chosen in asked} == {size}


def test_the_seed_draws_answers_and_their_order(answer_prompts: Run, asked: list[list[int]]) -> None:  # noqa: F811
    """The first update of a rollout is checked to have the ratio 1, whatever the order is."""
    answers, orders = [], []
    for seed in (7, 8):
        asked.clear()
        run = answer_prompts(**SEVERAL, seed=seed, random_shuffle=False, overwrite_output_dir=True)
        answers.append([each["answer"] for each in rollouts(run.output)[:16]])
        orders.append(list(asked))
    assert answers[0] != answers[1] and orders[0] != orders[1]


def test_the_divergence_is_taken_from_the_reward(answer_prompts: Run) -> None:  # noqa: F811
    """RLOO's, once the weights have left the reference: without it an advantage is the rewards' alone."""
    gaps = {}
    for beta in (1e-9, 5.0):
        run = answer_prompts(loss_type="rloo", beta=beta, learning_rate=1e-2, overwrite_output_dir=True)
        last = rollouts(run.output)[-4:]
        rewards = np.array([each["reward"] for each in last])
        expected = rewards - (rewards.sum() - rewards) / 3
        gaps[beta] = np.abs(expected - [each["advantage"] for each in last]).max()
    assert gaps[1e-9] < 1e-4 < 1e-3 < gaps[5.0]


def test_the_divergence_is_estimated_as_the_run_says(answer_prompts: Run) -> None:  # noqa: F811
    advantages = {}
    for estimator in ("k1", "k2", "k3"):
        values = {"loss_type": "rloo", "beta": 5.0, "learning_rate": 1e-2, "max_steps": 2}
        run = answer_prompts(**values, kl_estimator=estimator, overwrite_output_dir=True)
        advantages[estimator] = [each["advantage"] for each in rollouts(run.output)[-4:]]
    assert not any(
        np.allclose(advantages[one], advantages[other], atol=1e-6) for one, other in combinations(advantages, 2)
    )


def test_the_last_tokens_before_the_limit_cost_something(answer_prompts: Run, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    sample = steps_module.sample_answers

    def shorter(*given: Any, **named: Any) -> list[Any]:
        found = sample(*given, **named)
        return [
            each._replace(tokens=each.tokens[:length], logps=each.logps[:length])
            for length, each in zip(range(1, 9), found, strict=True)
        ]

    monkeypatch.setattr(steps_module, "sample_answers", shorter)
    run = answer_prompts(max_steps=1, overlong_handling="soft", overlong_buffer=5)
    costs = [each["reward"] - sum(each["rewards"].values()) for each in rollouts(run.output)]
    np.testing.assert_allclose(costs, [0, 0, 0, -0.2, -0.4, -0.6, -0.8, -1.0], atol=1e-6)


def test_others_are_compared_with_what_masked_answers_are_worth(
    answer_prompts: Run,  # noqa: F811
    tiny_base: Path,
    tmp_path: Path,
) -> None:
    """Their divergence from the reference is taken from their reward, though nothing is learned from them."""
    other = save_random_model(tiny_base, tmp_path / "reference", seed=11)
    values = {"loss_type": "rloo", "beta": 0.1, "ref_model_name_or_path": str(other), "max_steps": 1}
    advantages = []
    for handling in ("keep", "mask"):
        run = answer_prompts(**values, overlong_handling=handling, overwrite_output_dir=True)
        lines = rollouts(run.output)
        advantages.append([line["advantage"] for line in lines])
        assert any(line.get("masked") for line in lines) == (handling == "mask")
    assert advantages[0] == advantages[1]


def steps_of(names: Sequence[str], *, dynamic: bool = False, reference: Any = None) -> RolloutSteps:
    config = SimpleNamespace(grpo=SimpleNamespace(dynamic_sampling=dynamic))
    rewards, plan, records = SimpleNamespace(names=names), SimpleNamespace(taken=0), SimpleNamespace()
    sizes = Sizes(per_update=2, updates=2, passes=1, group=2)
    given: list[Any] = [config, None, plan, sizes, rewards, None, None, reference, records, None]
    return RolloutSteps(*given)


@pytest.mark.parametrize(
    ("own", "told"),
    [
        (steps_of(["length"], dynamic=True), "rewards or dynamic_sampling"),
        (steps_of(["length", "numeric"]), "rewards or dynamic_sampling"),
        (steps_of(["size"]), "rewards or dynamic_sampling"),
        (steps_of(["length"], reference="another model"), "beta"),
        (steps_of(["size"], reference="another model"), "rewards or dynamic_sampling, beta"),
    ],
)
def test_a_rollout_is_gone_on_with_by_what_has_scored_it(
    own: RolloutSteps, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = steps_of(["length"])
    before._rollout = Rollout.of([0], [[1, 2]], [[3]], [[-0.5]], [False])
    held = {name: value.numpy() for name, value in before.tensors().items()}
    saved = TensorFiles(tuple(held), held.__getitem__)
    again = steps_of(["length"])
    again.restore(saved, 1)
    assert again._rollout is not None and again._rollout.tokens.tolist() == [1, 2, 3]
    with caplog.at_level(logging.WARNING, "erniekit"):
        own.restore(saved, 2)  # behind the rollout
    assert ("from now on answers are scored by" in caplog.text) == ("rewards" in told)
    with pytest.raises(CheckpointError, match=rf"(?s)serves the steps 1 to 2, .*with other values of {told}\n"):
        own.restore(saved, 1)


def test_records_are_cut_when_the_run_begins_and_not_before() -> None:
    """What refuses a run that goes on comes between the two, and then nothing may be lost."""
    kept: list[int] = []
    before, own = steps_of(["length"]), steps_of(["length"])
    before.number, before._rollout = 3, Rollout.of([0], [[1, 2]], [[3]], [[-0.5]], [False])
    own.records = cast(RolloutRecords, SimpleNamespace(keep=kept.append))
    held = {name: value.numpy() for name, value in before.tensors().items()}
    own.restore(TensorFiles(tuple(held), held.__getitem__), 1)
    assert not kept
    assert list(own.read(1, 1)) == [] and kept == [3]


@pytest.mark.parametrize(("windows", "positions"), [({}, 8), ({64}, 8), ({4, 64}, 10)])
def test_a_window_of_attention_counts_each_prompt(windows: set[int], positions: int) -> None:
    """In a row that answers share, the second would stand further from the prompt than it does."""
    steps = steps_of(["length"])
    model = SimpleNamespace(config=SimpleNamespace(windows=frozenset(windows)))
    steps.model, steps.row_length, steps.texts = cast(Any, model), 16, cast(Any, SimpleNamespace(pad_id=0))
    rollout = Rollout.of([0, 0], [[1, 2, 3]] * 2, [[4, 5, 6]] * 2, [[-0.5] * 3] * 2, [False] * 2)
    assert steps._batch(rollout, [0, 1]).token_count == positions
