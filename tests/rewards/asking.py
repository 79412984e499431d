"""What tests of rewards share: rewards opened from words, and answers to score."""

from __future__ import annotations

from typing import Any

from erniekit.config import Config
from erniekit.rewards.rewards import Answer, Rewards, open_rewards

GIVEN = {"stage": "GRPO", "model_name_or_path": "base", "train_dataset_path": "data.jsonl", "output_dir": "out"}


def configured(*rewards: str, **values: Any) -> Config:
    return Config.from_mapping({**GIVEN, "rewards": list(rewards), **values})


def opened(*rewards: str, **values: Any) -> Rewards:
    return open_rewards(configured(*rewards, **values))


def answer(text: str, number: int = 1, **record: Any) -> Answer:
    return Answer([{"role": "user", "content": "2 + 3"}], text, record, f"data.jsonl:{number}")
