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
@pytest.mark.parametrize(  # within the first rollout's updates, between two, within the second
    "saved", [3, *(pytest.param(step, marks=pytest.mark.exhaustive) for step in (4, 5))]
)
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


@pytest.mark.exhaustive
def test_a_rollout_of_other_rewards_is_not_gone_on_with(answer_prompts: Callable[..., Any]) -> None:
    from erniekit.errors import CheckpointError

    output = answer_prompts(**SEVERAL).output
    resumed = {"resume_from_checkpoint": str(output / "checkpoint-2"), "overwrite_output_dir": True}
    for other, told in [
        ({"rewards": ["short=length:1-12"]}, "rewards or dynamic_sampling"),
        ({"dynamic_sampling": True}, "rewards or dynamic_sampling"),
        ({"beta": 0.1}, "beta"),
    ]:
        with pytest.raises(CheckpointError, match=f"(?s)serves the steps 1 to 4, .*other values of {told}\n"):
            answer_prompts(**SEVERAL, **other, **resumed)
    resumed["resume_from_checkpoint"] = str(output / "checkpoint-4")  # between two rollouts
    again = answer_prompts(**SEVERAL, rewards=["short=length:1-12", "length:1-9"], beta=0.1, **resumed)
    assert [set(answer["rewards"]) for answer in rollouts(again.output)[::16]] == [{"length"}, {"short", "length"}]


def test_accumulation_changes_nothing(answer_prompts: Callable[..., Any], tmp_path: Path) -> None:
    shapes = [(8, 1), (2, 4)]
    runs = []
    for rows, passes in shapes:
        run = answer_prompts(
            per_device_train_batch_size=rows, gradient_accumulation_steps=passes, loss_type="dapo", max_steps=2,
            output_dir=str(tmp_path / f"run-{rows}"),
        )  # fmt: skip
        runs.append(run)
    for run in runs[1:]:
        assert compared(rollouts(run.output)) == compared(rollouts(runs[0].output))
        assert_equal_models(run.output, runs[0].output, atol=2e-5)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"gradient_accumulation_steps": 1},
        {  # rows of an odd number of tokens
            "tensor_parallel_degree": 2, "sequence_parallel": True, "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 8,
        },
    ],
    ids=["data", "tensor"],
)  # fmt: skip
def test_two_ranks_learn_as_one_process(
    answer_prompts: Callable[..., Any],
    train_on_ranks: Callable[..., Any],
    tiny_base: Path,
    prompts: Path,
    tmp_path: Path,
    layout: dict[str, int],
) -> None:
    opened, function = tmp_path / "opened", tmp_path / "counted.py"  # a byte whenever a process opens the function
    function.write_text(
        f"with open({str(opened)!r}, 'a') as file:\n    file.write('x')\n"
        "def counted(completions):\n    return [0.0] * len(completions)\n"
    )
    rewards = ["length:1-12", f"python:{function}:counted"]
    values = {
        "stage": "GRPO", "model_name_or_path": str(tiny_base), "continue_training": True,
        "train_dataset_path": str(prompts), "rewards": rewards, "num_generations": 4,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_completion_len": 8,
        "learning_rate": 1e-3, "max_steps": 3, "beta": 0.05, "loss_type": "grpo",
    }  # fmt: skip
    alone = answer_prompts(beta=0.05, max_steps=3, rewards=rewards)
    assert opened.read_text() == "x"
    divided = train_on_ranks(nproc=2, **{**values, **layout})
    assert opened.read_text() == "xx"  # of two ranks the first one scores
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
        max_completion_len=8,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"a rollout has 8 answers.*which are no whole groups"):
        preflight(config)


@pytest.mark.proves("rollout_workers")
@pytest.mark.parametrize(
    ("importable", "workers", "told"),
    [
        (
            False,
            2,
            r"config.yaml:\d+: `rollout_workers: 2`: .* not installed\n  Install it: pip install 'erniekit\[ray\]'",
        ),
        (True, 3, r"a rollout has 2 prompts, and a worker answers at least one of them\n  Write at most 2"),
    ],
    ids=["Ray", "prompts"],
)
def test_workers_need_ray_and_prompts(
    make_config: Callable[..., Any],
    tiny_base: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    importable: bool,
    workers: int,
    told: str,
) -> None:
    from erniekit.build import checks
    from erniekit.build.preflight import preflight
    from erniekit.errors import UserError

    monkeypatch.setattr(checks, "is_importable", lambda module: importable)
    config = make_config(
        stage="GRPO", model_name_or_path=str(tiny_base), continue_training=True, train_dataset_path=str(prompts),
        rewards=["exact_match"], num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        max_completion_len=8, rollout_workers=workers,
    )  # fmt: skip
    with pytest.raises(UserError, match=told):
        preflight(config)


STALE = {"num_iterations": 3, "max_steps": 3, "learning_rate": 3e-2}  # the third update has ratios far from 1
ACTS: list[
    tuple[str, Any, dict[str, Any], str, int]
] = [  # a parameter, another value, with what, a figure, at which step
    ("rollout_temperature", 0.5, {}, "entropy", 0),
    ("scale_rewards", False, {}, "grad_norm", 0),
    ("importance_sampling_level", "sequence", STALE, "grad_norm", 2),
    ("clip_ratio_low", 0.9, STALE, "clip_low", 2),
    ("clip_ratio_high", 1e6, STALE, "clip_high", 2),
    ("clip_ratio_max", 1.3, STALE, "grad_norm", 2),
    ("kl_estimator", "k2", {**STALE, "beta": 0.1}, "kl", 2),
    ("beta", 0.5, STALE, "grad_norm", 2),
    ("loss_type", "rloo", {}, "grad_norm", 0),
    ("max_completion_len", 4, {}, "completion_len", 0),
]

BEFORE: dict[str, Any] = {}  # the logs of runs without the other value


@pytest.mark.proves(
    "rollout_temperature", "scale_rewards", "importance_sampling_level", "clip_ratio_low", "clip_ratio_high",
    "clip_ratio_max", "kl_estimator", "beta", "loss_type", "max_completion_len",
)  # fmt: skip
@pytest.mark.parametrize(("name", "other", "parameters", "figure", "step"), ACTS, ids=[name for name, *_ in ACTS])
def test_a_parameter_changes_its_figure(
    answer_prompts: Callable[..., Any], name: str, other: Any, parameters: dict[str, Any], figure: str, step: int
) -> None:
    common = {"max_steps": 1, **parameters}
    if repr(common) not in BEFORE:
        BEFORE[repr(common)] = answer_prompts(**common).log
    after = answer_prompts(**common, **{name: other}).log
    before, changed = (
        [record for record in log if "loss" in record][step][figure] for log in (BEFORE[repr(common)], after)
    )
    assert before != pytest.approx(changed, rel=1e-4, abs=1e-9)


def test_answers_are_measured_at_the_temperature_that_drew_them(answer_prompts: Callable[..., Any]) -> None:
    """Else the ratio of the first update would not be 1."""
    log = answer_prompts(max_steps=2, num_iterations=2, rollout_temperature=0.5).log
    assert log[0]["sampling_gap"] < 1e-3


def test_answers_are_packed_into_rows_of_the_longest_length(
    answer_prompts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from erniekit.rollouts.steps import RolloutSteps

    lengths = []
    batch = RolloutSteps._batch
    monkeypatch.setattr(
        RolloutSteps, "_batch", lambda self, *given: lengths.append(self.row_length) or batch(self, *given)
    )
    answer_prompts(max_steps=1, max_seq_len=96)
    assert set(lengths) == {96}


def test_the_reference_follows_every_so_many_steps(
    answer_prompts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from erniekit.training.objectives.reference import FrozenReference

    updates = []
    update = FrozenReference.update
    monkeypatch.setattr(FrozenReference, "update", lambda self: updates.append(self) or update(self))
    answer_prompts(max_steps=5, beta=0.05, ref_model_update_steps=2)
    assert len(updates) == 2


def test_dr_grpo_divides_by_the_longest_answer_that_may_be(
    answer_prompts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And DAPO by the tokens that there are."""
    from erniekit.rollouts import steps

    sample = steps.sample_answers

    def shorter(*given: Any, **named: Any) -> list[Any]:
        lengths = range(1, 9)
        return [
            each._replace(tokens=each.tokens[:length], logps=each.logps[:length])
            for length, each in zip(lengths, sample(*given, **named), strict=True)
        ]

    monkeypatch.setattr(steps, "sample_answers", shorter)
    norms = {}
    for loss in ("dr_grpo", "dapo"):
        run = answer_prompts(max_steps=1, loss_type=loss, scale_rewards=False, overwrite_output_dir=True)
        norms[loss] = run.log[0]["grad_norm"]
    assert norms["dr_grpo"] * 8 * 8 == pytest.approx(norms["dapo"] * sum(range(1, 9)), rel=1e-4)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"num_generations": 1}, "one answer has no others to be compared with"),
        ({"loss_type": "sigmoid"}, "`sigmoid` is no loss of stage GRPO"),
        ({"loss_type": "gspo", "importance_sampling_level": "token"}, "gspo has the ratio of whole answers"),
        ({"beta": 0.1, "kl_estimator": "k1"}, "its gradient is 0 on average"),
        ({"clip_ratio_max": 1.1}, "lies inside of the clip"),
        ({"hidden_dropout_prob": 0.1}, "answers are sampled from the model without dropout"),
        ({"sharding": "stage3", "sharding_parallel_degree": 2}, "whole weights for one layer at a time"),
        ({"pipeline_parallel_degree": 2}, "most of them idle"),
        ({"max_completion_len": 128}, "leaves no room for a prompt"),
        ({"overlong_handling": "soft", "overlong_buffer": 9}, "is above max_completion_len 8"),
        ({"reference_model": "precomputed", "beta": 0.1}, "answers are not known before they are sampled"),
        ({"train_dataset_type": "asr"}, "stage GRPO reads prompts, not asr"),
        ({"rollout_workers": 2, "tensor_parallel_degree": 2}, "a rank has a slice of each weight to send"),
        ({"rollout_workers": 2, "weight_quantize_algo": "fp8_linear"}, "ranges of activations that training measures"),
        ({"rollout_workers": 2, "device": "gpu"}, "workers compute on CPUs only"),
        ({"rollout_workers": 2, "ray_address": "ray://10.0.0.1:10001"}, "is no `HOST:PORT`"),
    ],
)
def test_what_cannot_be_is_refused(answer_prompts: Callable[..., Any], parameters: dict[str, Any], told: str) -> None:
    from erniekit.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match=told):
        answer_prompts(**parameters)


def test_there_is_nothing_to_overfit_pack_or_preview(make_config: Callable[..., Any], tmp_path: Path) -> None:
    from erniekit.errors import ConfigurationError
    from erniekit.runners.overfit_check import overfit_check
    from erniekit.runners.pack import pack_data
    from erniekit.runners.preview import preview

    config = make_config(stage="GRPO", rewards=["exact_match"], max_completion_len=8, num_generations=2)
    for run in (overfit_check, preview, lambda config: pack_data(config, tmp_path / "packed")):
        with pytest.raises(ConfigurationError, match="its samples are answers of the model"):
            run(config)


def test_a_ratio_that_is_not_1_ends_the_run(
    answer_prompts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities of other weights, as where an engine has a stale copy."""
    from erniekit.errors import TrainingError
    from erniekit.rollouts.steps import RolloutSteps

    found = RolloutSteps._over_ranks
    monkeypatch.setattr(RolloutSteps, "_over_ranks", lambda self, values: found(self, values) + np.float32(0.01))
    with pytest.raises(TrainingError, match="the ratio of the first update must be 1"):
        answer_prompts(num_iterations=2)


def test_answers_of_other_weights_end_the_run(
    answer_prompts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens whose probability was another one where they were sampled."""
    from erniekit.errors import TrainingError
    from erniekit.rollouts import steps

    def stale(*given: Any, **named: Any) -> list[Any]:
        found = steps_sample(*given, **named)
        return [answer._replace(logps=[value - 0.5 for value in answer.logps]) for answer in found]

    steps_sample = steps.sample_answers
    monkeypatch.setattr(steps, "sample_answers", stale)
    with pytest.raises(TrainingError, match=r"differs by 0.5 on average .*the answers are not those of the weights"):
        answer_prompts()


def test_a_model_is_evaluated_by_rewards_without_training(
    make_config: Callable[..., Any], tiny_base: Path, prompts: Path
) -> None:
    from erniekit.runners.evaluate import run_evaluation

    config = make_config(
        stage="GRPO", do_train=False, do_eval=True, model_name_or_path=str(tiny_base), continue_training=True,
        eval_dataset_path=str(prompts), rewards=["length:1-12"], max_completion_len=8, train_dataset_path=None,
    )  # fmt: skip
    result = run_evaluation(config)
    assert result.metrics["reward"] == result.metrics["reward_length"] > 0 and result.units == len(PROMPTS)
    written = json.loads((config.output_dir / "eval_results.json").read_text())
    assert written["eval_reward"] == pytest.approx(result.metrics["reward"]) and "eval_loss" not in written
