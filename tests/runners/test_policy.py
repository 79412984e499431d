"""Runs of stage GRPO: they answer prompts, score the answers, and learn from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROMPTS = [("What is 1 + 2?", "3"), ("Reverse a b.", "b a"), ("Sort 3, 1.", "1, 3"), ("What is 2 + 2?", "4")]


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records = [{"prompt": question, "answer": answer} for question, answer in PROMPTS]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def answer_prompts(train: Callable[..., Any], tiny_base: Path, prompts: Path) -> Callable[..., Any]:
    """A short run: two prompts a rollout, four answers each, rewarded for being short."""

    def run(**parameters: Any) -> Any:
        values = {
            "stage": "GRPO", "model_name_or_path": str(tiny_base), "continue_training": True,
            "train_dataset_path": str(prompts), "rewards": ["length:1-12"], "num_generations": 4,
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_completion_len": 8,
            "learning_rate": 1e-3, "max_steps": 4,
        }  # fmt: skip
        return train(**{**values, **parameters})

    return run


def rollouts(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()]


def test_every_answer_is_kept_with_its_rewards_and_weights(answer_prompts: Callable[..., Any]) -> None:
    run = answer_prompts()
    answers = rollouts(run.output)
    assert len(answers) == 4 * 8 and [answer["rollout"] for answer in answers[::8]] == [0, 1, 2, 3]
    assert len({answer["weights"] for answer in answers}) == 4  # each rollout has weights of its own
    first = answers[:4]
    assert len({answer["place"] for answer in first}) == 1
    rewards = np.array([answer["rewards"]["length"] for answer in first])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    np.testing.assert_allclose([answer["advantage"] for answer in first], expected, atol=1e-4)
    assert run.log[0]["reward"] == pytest.approx(np.mean([answer["reward"] for answer in answers[:8]]), abs=1e-5)
    assert run.log[0]["completion_len"] == pytest.approx(np.mean([answer["tokens"] for answer in answers[:8]]))
    assert run.log[0]["sampling_gap"] < 1e-3


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce++"])
def test_every_loss_trains(answer_prompts: Callable[..., Any], loss: str) -> None:
    run = answer_prompts(loss_type=loss, max_steps=3, beta=0.05, steps_per_generation=2, num_iterations=2)
    assert all(np.isfinite(record["grad_norm"]) for record in run.log if "loss" in record)
    assert run.log[0]["kl"] == pytest.approx(0.0, abs=1e-6) and "kl" in run.log[2]


def tensors(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return {
        name: value for path in sorted(folder.glob("model*.safetensors")) for name, value in load_file(path).items()
    }


def assert_equal_models(one: Path, other: Path, atol: float = 0.0) -> None:
    expected = tensors(other)
    for name, values in tensors(one).items():
        np.testing.assert_allclose(values, expected[name], atol=atol, rtol=0, err_msg=name)


def compared(answers: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(answer["rollout"], answer["place"], answer["answer"], answer["rewards"]) for answer in answers]


SEVERAL = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 6, "save_strategy": "steps", "save_steps": 1}


@pytest.mark.proves("steps_per_generation", "num_iterations")
@pytest.mark.parametrize("saved", [3, 4, 5])  # within the first rollout's updates, between two, within the second
def test_a_run_resumes_bit_for_bit_within_a_rollout(answer_prompts: Callable[..., Any], saved: int) -> None:
    whole = answer_prompts(**SEVERAL, beta=0.05)
    expected = rollouts(whole.output)
    assert [answer["rollout"] for answer in expected[::16]] == [0, 1] and expected[16]["step"] == 4
    weights = tensors(whole.output)
    again = answer_prompts(
        **SEVERAL,
        beta=0.05,
        resume_from_checkpoint=str(whole.output / f"checkpoint-{saved}"),
        overwrite_output_dir=True,
    )
    for name, values in tensors(again.output).items():
        np.testing.assert_array_equal(values, weights[name], err_msg=name)
    assert rollouts(again.output) == expected


def test_a_rollout_of_another_size_is_not_gone_on_with(answer_prompts: Callable[..., Any]) -> None:
    from erniekit.errors import CheckpointError

    output = answer_prompts(**SEVERAL).output
    changed = {**SEVERAL, "num_iterations": 3}
    with pytest.raises(CheckpointError, match="serves 4 steps, and the configuration asks for 16 and 6"):
        answer_prompts(**changed, resume_from_checkpoint=str(output / "checkpoint-2"), overwrite_output_dir=True)


def test_accumulation_changes_nothing(answer_prompts: Callable[..., Any], tmp_path: Path) -> None:
    shapes = [(8, 1), (2, 4), (1, 8)]
    runs = []
    for rows, passes in shapes:
        run = answer_prompts(
            per_device_train_batch_size=rows, gradient_accumulation_steps=passes, loss_type="dapo", max_steps=3,
            output_dir=str(tmp_path / f"run-{rows}"),
        )  # fmt: skip
        runs.append(run)
    for run in runs[1:]:
        assert compared(rollouts(run.output)) == compared(rollouts(runs[0].output))
        assert_equal_models(run.output, runs[0].output, atol=2e-5)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{"gradient_accumulation_steps": 1}, {"tensor_parallel_degree": 2}], ids=["data", "tensor"]
)
def test_two_ranks_learn_as_one_process(
    answer_prompts: Callable[..., Any],
    train_on_ranks: Callable[..., Any],
    tiny_base: Path,
    prompts: Path,
    layout: dict[str, int],
) -> None:
    values = {
        "stage": "GRPO", "model_name_or_path": str(tiny_base), "continue_training": True,
        "train_dataset_path": str(prompts), "rewards": ["length:1-12"], "num_generations": 4,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_completion_len": 8,
        "learning_rate": 1e-3, "max_steps": 3, "beta": 0.05, "loss_type": "grpo",
    }  # fmt: skip
    alone = answer_prompts(beta=0.05, max_steps=3)
    divided = train_on_ranks(nproc=2, **{**values, **layout})
    assert compared(rollouts(divided.output)) == compared(rollouts(alone.output))
    assert_equal_models(divided.output, alone.output, atol=5e-5)


@pytest.mark.proves("dynamic_sampling", "max_sampling_rounds")
def test_groups_of_equal_rewards_are_sampled_again(answer_prompts: Callable[..., Any]) -> None:
    """A reward that no answer gets: every group is equal, and after the last round the run says so."""
    parameters = {"rewards": ["regex:^never$"], "max_steps": 1}
    plain = answer_prompts(**parameters)
    assert plain.log[0]["groups_equal"] == 1.0 and plain.log[0]["grad_norm"] == 0.0 and len(rollouts(plain.output)) == 8
    again = answer_prompts(**parameters, dynamic_sampling=True, max_sampling_rounds=3)
    assert "after 3 rounds of dynamic sampling 2 of 2 groups still have equal rewards" in again.said
    assert again.log[0]["groups_dropped"] == 2.0 and "groups_dropped" not in plain.log[0]


@pytest.mark.proves("overlong_handling", "overlong_buffer", "max_completion_len")
def test_answers_that_are_cut_are_masked_or_cost_something(answer_prompts: Callable[..., Any]) -> None:
    kept = answer_prompts(max_steps=1)
    cut = [answer for answer in rollouts(kept.output) if answer.get("cut")]
    assert cut and all(answer["tokens"] == 8 for answer in cut)
    masked = answer_prompts(max_steps=1, overlong_handling="mask")
    assert sum("masked" in answer for answer in rollouts(masked.output)) == len(cut)
    soft = rollouts(answer_prompts(max_steps=1, overlong_handling="soft", overlong_buffer=4).output)
    for answer in soft:
        penalty = min(1.0, max(0.0, (answer["tokens"] - 4) / 4))
        assert answer["reward"] == pytest.approx(answer["rewards"]["length"] - penalty, abs=1e-5)


def test_prompts_that_are_too_long_are_told(answer_prompts: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "Hi.", "answer": "x"}) + "\n" + json.dumps({"prompt": "a b " * 90}) + "\n")
    run = answer_prompts(train_dataset_path=str(path), max_steps=1, max_prompt_len=60)
    assert f"1 prompts of more than 60 tokens are left out: {path}:2 (" in run.said
    from erniekit.errors import DataError

    with pytest.raises(DataError, match=r"a prompt may have 60 tokens \(max_prompt_len\)"):
        answer_prompts(train_dataset_path=str(path), max_prompt_len=60, over_length_policy="error")


def test_held_out_prompts_are_answered_and_scored(answer_prompts: Callable[..., Any], prompts: Path) -> None:
    run = answer_prompts(
        do_eval=True, eval_dataset_path=str(prompts), eval_steps=2, rewards=["exact_match", "length:1-12"]
    )
    found = [record for record in run.log if "eval_reward" in record]
    assert [record["step"] for record in found] == [2, 4] and found[0]["eval_batches"] == len(PROMPTS)
    assert found[0]["eval_reward"] == pytest.approx(
        found[0]["eval_reward_exact_match"] + found[0]["eval_reward_length"], abs=1e-6
    )
    samples = [json.loads(line) for line in (run.output / "eval_samples.jsonl").read_text().splitlines()]
    assert [sample["messages"][-1]["content"] for sample in samples] == [question for question, _ in PROMPTS]


def test_adapters_learn_beside_their_base(answer_prompts: Callable[..., Any]) -> None:
    run = answer_prompts(lora=True, lora_rank=4, beta=0.1, max_steps=3)
    assert "reference: the same model with its adapters disabled" in run.said
    assert len({answer["weights"] for answer in rollouts(run.output)}) == 3


@pytest.mark.proves("num_generations")
def test_a_rollout_is_of_whole_groups(make_config: Callable[..., Any], tiny_base: Path, prompts: Path) -> None:
    from erniekit.build.preflight import preflight
    from erniekit.errors import UserError

    config = make_config(
        stage="GRPO", model_name_or_path=str(tiny_base), continue_training=True, train_dataset_path=str(prompts),
        rewards=["exact_match"], num_generations=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"a rollout has 8 answers.*which are no whole groups"):
        preflight(config)
