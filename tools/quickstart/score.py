"""Exact match of a model's greedy answers on a held-out file, by task.

    python tools/quickstart/score.py MODEL [--data examples/data/sft-eval.jsonl] [--random]

`--random` scores the model with random weights, which is where the quickstart starts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

from erniekit.environment import import_paddle


def score(model_folder: Path, data: Path, *, random_weights: bool) -> dict[str, tuple[int, int]]:
    """Task -> (exactly right answers, questions)."""
    from erniekit.inference.engine import ChatModel, Sampling

    model = ChatModel.load(model_folder, random_weights=random_weights)
    records = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    answers = model.answer([record["src"][0] for record in records], Sampling(max_new_tokens=64))
    results: dict[str, list[bool]] = defaultdict(list)
    for record, answer in zip(records, answers, strict=True):
        results[record["task"]].append(answer.strip() == record["tgt"][0])
    return {task: (sum(right), len(right)) for task, right in sorted(results.items())}


def total(results: dict[str, tuple[int, int]]) -> str:
    right, asked = (sum(column) for column in zip(*results.values(), strict=True))
    return f"{right / asked:.1%} ({right} of {asked})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, default=Path("examples/data/sft-eval.jsonl"))
    parser.add_argument("--random", action="store_true")
    arguments = parser.parse_args()
    import_paddle()
    results = score(arguments.model, arguments.data, random_weights=arguments.random)
    for task, (right, asked) in results.items():
        print(f"  {task:<12} {right:>3} of {asked}")
    print(f"exact match on {arguments.data}: {total(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
