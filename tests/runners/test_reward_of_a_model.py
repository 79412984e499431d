"""A reward model as a reward of stage GRPO."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.cli import main
from erniekit.inference.reward_model import open_reward_model
from erniekit.rewards.rewards import Answer, RewardError
from tests.rewards.asking import opened

Train = Callable[..., Any]


@pytest.fixture
def judge(train: Train, tiny_base: Path, pairs: Path) -> Path:
    """The folder of a reward model."""
    run = train(
        stage="RM", model_name_or_path=str(tiny_base), continue_training=True, train_dataset_path=str(pairs),
        per_device_train_batch_size=2, max_steps=2, learning_rate=1e-3,
    )  # fmt: skip
    return Path(run.output)


def test_it_gives_the_scores_of_its_model(judge: Path, tiny_base: Path) -> None:
    question = {"role": "user", "content": "What is 2 + 3?"}
    dialogues = [
        [question],
        [{"role": "system", "content": "Be brief."}, question],
        [question, {"role": "assistant", "content": "5"}, {"role": "user", "content": "And 2 + 2?"}],
    ]
    answers = [Answer(messages, "It is 5.", {}, f"data.jsonl:{line}") for line, messages in enumerate(dialogues, 1)]
    rewards = opened(f"reward_model:{judge}", "length:9")
    assert rewards.names == ("reward_model", "length")
    scores = rewards.score(answers)
    said = [[*messages, {"role": "assistant", "content": "It is 5."}] for messages in dialogues]
    np.testing.assert_allclose(scores[:, 0], open_reward_model(judge).score_messages(said), rtol=1e-6)
    assert len(set(scores[:, 0].tolist())) == 3
    odd = [Answer([question], text, {}, "data.jsonl:1") for text in ("", " ", "\n5 ", "<think>", "x" * 50)]
    assert np.isfinite(rewards.score(odd)).all()  # whatever a model may say is scored
    with pytest.raises(RewardError, match=r"reward right: .*data\.jsonl:7"):
        opened(f"right=reward_model:{judge}").score([Answer([question], "5 " * 5000, {}, "data.jsonl:7")])
    rewards.close()


def test_a_model_that_gives_no_score_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"reward reward_model: .* gives no score"):
        opened(f"reward_model:{tiny_base}")
    with pytest.raises(RewardError, match=r"reward reward_model: .*none"):
        opened(f"reward_model:{tmp_path}/none")


@pytest.mark.proves("rewards")
def test_a_run_learns_from_it(
    train: Train, judge: Path, tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"messages": [{"role": "user", "content": f"{n}?"}]}) + "\n" for n in "1234"))
    run = train(
        stage="GRPO", model_name_or_path=str(tiny_base), continue_training=True, train_dataset_path=str(prompts),
        rewards=[f"reward_model:{judge}"], max_steps=2, num_generations=2, per_device_train_batch_size=4,
        max_completion_len=4, max_seq_len=64, output_dir=str(tmp_path / "policy"),
    )  # fmt: skip
    lines = [json.loads(line) for line in (Path(run.output) / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    file = tmp_path / "grpo.yaml"  # `erniekit rewards` gives the same
    file.write_text(
        f"stage: GRPO\ntrain_dataset_path: {prompts}\nmodel_name_or_path: {tiny_base}\ndevice: cpu\n"
        f"rewards: ['reward_model:{judge}']\n"
    )
    answers = str(Path(run.output) / "rollouts.jsonl")
    capsys.readouterr()
    assert main(["rewards", str(file), "--answers", answers, "--json"]) == 0
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [each["reward"] for each in again] == pytest.approx([line["reward"] for line in lines], abs=1e-5)
    said = [[*line["messages"], {"role": "assistant", "content": line["answer"] or "-"}] for line in lines]
    expected = open_reward_model(judge).score_messages(said)
    for line, messages, score in zip(lines, said, expected, strict=True):
        if messages[-1]["content"] == line["answer"] == line["answer"].strip():
            assert line["rewards"]["reward_model"] == pytest.approx(score, abs=1e-5)
