"""On-policy distillation: which steps, which prompts, and what becomes of the answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.build.data import training_dataset, training_plan
from erniekit.build.model import open_model, open_tokenizer
from erniekit.config import Config
from erniekit.data.batch import Batch
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample
from erniekit.inference.engine import Sampling
from erniekit.inference.generation import generate
from erniekit.runners.on_policy import is_on_policy, prompt_length, with_own_answers
from tests.tiny_runs import save_random_model


@dataclass(frozen=True)
class Run:
    """What a run reads its steps from, and the tokens that end answers."""

    config: Config
    model: Any
    plan: Any
    stops: Sequence[int]

    def steps(self, stop: int, multiple_of: int = 1) -> list[Sequence[Batch]]:
        def read(first: int, stop: int) -> Generator[Sequence[Batch], None, None]:
            yield from (self.plan.micro_batches(step) for step in range(first, stop))

        return list(with_own_answers(self.config, self.model, self.plan, self.stops, multiple_of, read)(0, stop))


@pytest.fixture
def make_run(make_config: Callable[..., Config], tiny_base: Path) -> Callable[..., Run]:
    def make(**parameters: Any) -> Run:
        values = {
            "stage": "DISTILL", "teacher_model_name_or_path": str(tiny_base), "model_name_or_path": str(tiny_base),
            "on_policy_ratio": 1.0, "on_policy_max_new_tokens": 6, "on_policy_temperature": 0.0,
        }  # fmt: skip
        config = make_config(**{**values, **parameters})
        tokenizer, template = open_tokenizer(config)
        plan = training_plan(config, training_dataset(config, tokenizer, template))
        assert template is not None
        return Run(config, open_model(config, tiny_base), plan, template.stop_token_ids)

    return make


def test_the_share_of_steps_is_the_ratio_and_follows_from_the_seed() -> None:
    drawn = [is_on_policy(5, step, 0.3) for step in range(2000)]
    assert 0.26 < np.mean(drawn) < 0.34
    assert drawn == [is_on_policy(5, step, 0.3) for step in range(2000)]
    assert drawn != [is_on_policy(6, step, 0.3) for step in range(2000)]
    assert not any(is_on_policy(5, step, 0.0) for step in range(50))
    assert all(is_on_policy(5, step, 1.0) for step in range(50))


@pytest.mark.parametrize(
    ("labels", "length"),
    [([-100, -100, 7, 8], 3), ([7, 8, 9], 1), ([-100, 4, 5, -100, -100, 6, 7], 6)],
    ids=["one answer", "no prompt but the first token", "the last of two"],
)
def test_the_prompt_ends_before_the_last_answer(labels: list[int], length: int) -> None:
    assert prompt_length(Sample(np.arange(len(labels)), np.array(labels))) == length


def test_the_seed_of_the_run_draws_the_steps(make_run: Callable[..., Run]) -> None:
    run = make_run(seed=7, on_policy_ratio=0.5, on_policy_max_new_tokens=1)
    expected = [is_on_policy(7, step, 0.5) for step in range(8)]
    own = []
    for step, batches in enumerate(run.steps(8)):
        read = run.plan.micro_batches(step)
        own.append(any(not np.array_equal(a.labels, b.labels) for a, b in zip(batches, read, strict=True)))
    assert own == expected != [is_on_policy(42, step, 0.5) for step in range(8)]


def test_answers_end_where_a_row_does(make_run: Callable[..., Run]) -> None:
    run = make_run(max_seq_len=48, on_policy_max_new_tokens=100)
    batches = [batch for step in run.steps(2) for batch in step]
    answered = max(int((row != IGNORE_INDEX).sum()) for batch in batches for row in batch.labels)
    assert max(batch.shape[1] for batch in batches) <= 48 and answered > 6


def test_batches_hold_the_prompts_with_the_answers_of_the_engine(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.model.train()
    (batches,) = run.steps(1, multiple_of=8)
    (offline,) = [run.plan.micro_batches(0)]
    assert [sorted(sum(each.samples, ())) for each in batches] == [sorted(sum(each.samples, ())) for each in offline]
    for batch in batches:
        assert batch.shape[1] % 8 == 0 and batch.shape[1] <= 128
        for row, samples in enumerate(batch.samples):
            start = 0
            for index in samples:
                sample = run.plan.dataset.sample(index)
                prompt = sample.input_ids[: prompt_length(sample)].tolist()
                (answer,) = generate(run.model, [prompt], Sampling(6, stop_token_ids=run.stops, max_length=128))
                ended = len(answer) < min(6, 128 - len(prompt))
                written = [*answer, *([int(sample.labels[-1])] if ended else [])]
                ids = [*prompt, *written]
                end = start + len(ids) - 1
                assert batch.input_ids[row, start:end].tolist() == ids[:-1]
                expected = [IGNORE_INDEX] * (len(prompt) - 1) + written
                assert batch.labels[row, start:end].tolist() == expected
                assert batch.position_ids[row, start:end].tolist() == list(range(end - start))
                start = end
    assert run.model.training


def test_answers_are_those_of_the_weights_of_the_step(make_run: Callable[..., Run]) -> None:
    run = make_run()
    before = run.steps(1)[0][0].labels
    for parameter in run.model.parameters():
        parameter.set_value(parameter * -0.7)
    after = run.steps(1)[0][0].labels
    assert before.shape != after.shape or (before != after).any()


def test_four_at_once_are_four_one_by_one(train: Callable[..., Any], tiny_base: Path, tmp_path: Path) -> None:
    teacher = save_random_model(tiny_base, tmp_path / "teacher", seed=11)
    values = {
        "stage": "DISTILL", "teacher_model_name_or_path": str(teacher), "on_policy_ratio": 1.0, "max_steps": 3,
        "on_policy_max_new_tokens": 6, "packing": False, "distill_divergence": "jsd",
    }  # fmt: skip
    whole = train(**values, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    parts = train(**values, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-4)
    shutil.rmtree(teacher)
