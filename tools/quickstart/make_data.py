"""Generate the data that ERNIEKit ships: small tasks whose answers can be checked.

    python tools/quickstart/make_data.py [--output examples/data] [--check]

Writes, in ERNIEKit's own record format (one JSON object a line):
    sft-train.jsonl, sft-eval.jsonl              instructions; no prompt of the held-out file is in the training file
    preference-train.jsonl, preference-eval.jsonl  the same tasks with a right (chosen) and a wrong (rejected) answer
    verdict-train.jsonl, verdict-eval.jsonl      the same tasks with one answer, and whether it is right
    text-train.jsonl                             plain text for `stage: PT`

The same seed gives the same bytes; CI checks with --check that the shipped files are the generated ones.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from generated import write_or_check

SEED = 20
TRAIN_PER_TASK = 1500
EVAL_PER_TASK = 40
REWARDED_EVAL = 200  # further additions, which no other file has
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = {
    "January": 31, "February": 28, "March": 31, "April": 30, "May": 31, "June": 30,
    "July": 31, "August": 31, "September": 30, "October": 31, "November": 30, "December": 31,
}  # fmt: skip
UNITS = {"km": ("m", 3), "kg": ("g", 3), "m": ("cm", 2), "cm": ("mm", 1), "l": ("ml", 3), "dm": ("cm", 1)}


@dataclass(frozen=True)
class Question:
    """One checkable task: `wrong` is a plausible but false answer, for preference pairs."""

    task: str
    prompt: str
    answer: str
    wrong: str


def addition(draw: random.Random) -> Question:
    """Tens, ones, then both: written out, because a small model has to be shown the way to a carry."""
    first, second = draw.randint(0, 59), draw.randint(0, 39)
    tens, ones = first // 10 * 10 + second // 10 * 10, first % 10 + second % 10

    def steps(total: int) -> str:
        return (
            f"{first // 10 * 10} + {second // 10 * 10} = {tens}, {first % 10} + {second % 10} = {ones}, "
            f"{tens} + {ones} = {total}"
        )

    return Question(
        "addition",
        f"What is {first} + {second}?",
        steps(first + second),
        steps(tens + ones + draw.choice((-10, -1, 1, 10))),
    )


def sorting(draw: random.Random) -> Question:
    numbers = draw.sample(range(10), draw.randint(4, 5))
    up = draw.random() < 0.5
    ordered = sorted(numbers, reverse=not up)
    wrong = ordered[:]
    swap = draw.randrange(len(wrong) - 1)
    wrong[swap], wrong[swap + 1] = wrong[swap + 1], wrong[swap]
    order = "ascending" if up else "descending"
    return Question("sorting", f"Sort {_list(numbers)} in {order} order.", _list(ordered), _list(wrong))


def counting(draw: random.Random) -> Question:
    start, step = draw.randint(50, 449), draw.choice((1, 10))
    direction = draw.choice((1, -1))
    numbers = [start + direction * step * index for index in range(5)]
    word = "up" if direction > 0 else "down"
    wrong = [*numbers[:3], numbers[3] + draw.choice((-1, 1)), numbers[4]]
    return Question("counting", f"Count {word} from {start} by {step}, five numbers.", _list(numbers), _list(wrong))


def conversion(draw: random.Random) -> Question:
    unit = draw.choice(tuple(UNITS))
    smaller, zeros = UNITS[unit]
    amount = draw.randint(1, 299)
    wrong_zeros = zeros + draw.choice((-1, 1))
    return Question(
        "conversion",
        f"Convert {amount} {unit} to {smaller}.",
        f"{amount}{'0' * zeros} {smaller}",
        f"{amount}{'0' * wrong_zeros} {smaller}",
    )


def dates(draw: random.Random) -> Question:
    month = draw.choice(tuple(MONTHS))
    day = draw.randint(1, MONTHS[month])
    weekday = draw.randrange(7)
    if day < MONTHS[month]:
        next_day, next_month = day + 1, month
    else:
        names = tuple(MONTHS)
        next_day, next_month = 1, names[(names.index(month) + 1) % 12]
    tomorrow = f"{DAYS[(weekday + 1) % 7]}, {next_day} {next_month}"
    wrong = f"{DAYS[(weekday + 2) % 7]}, {next_day} {next_month}"
    return Question("dates", f"Today is {DAYS[weekday]}, {day} {month}. What is tomorrow?", tomorrow, wrong)


def comparison(draw: random.Random) -> Question:
    numbers = draw.sample(range(10), draw.randint(4, 5))
    kind, answer = ("largest", max(numbers)) if draw.random() < 0.5 else ("smallest", min(numbers))
    wrong = draw.choice([number for number in numbers if number != answer])
    return Question("comparison", f"Which is the {kind} of {_list(numbers)}?", str(answer), str(wrong))


def reversing(draw: random.Random) -> Question:
    letters = [draw.choice("abcdefgh") for _ in range(draw.randint(3, 5))]
    backwards = letters[::-1]
    wrong = letters if letters != backwards else [*letters, letters[0]]
    return Question("reversing", f"Reverse {' '.join(letters)}.", " ".join(backwards), " ".join(wrong))


TASKS: tuple[Callable[[random.Random], Question], ...] = (
    addition, sorting, counting, conversion, dates, comparison, reversing,
)  # fmt: skip


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def distinct_questions(task: Callable[[random.Random], Question], count: int, seed: str) -> list[Question]:
    """`count` questions of one task with different prompts, the same for the same seed."""
    draw = random.Random(seed)
    questions: dict[str, Question] = {}
    while len(questions) < count:
        question = task(draw)
        questions.setdefault(question.prompt, question)
    return list(questions.values())


def sft_record(question: Question) -> dict[str, object]:
    return {"src": [question.prompt], "tgt": [question.answer], "task": question.task}


def preference_record(question: Question) -> dict[str, object]:
    return {
        "src": [question.prompt],
        "tgt": [],
        "response": [[question.answer], [question.wrong]],
        "sort": [1, 0],
        "task": question.task,
    }


def verdict_record(question: Question, *, right: bool) -> dict[str, object]:
    answer = question.answer if right else question.wrong
    return {"src": [question.prompt], "tgt": [answer], "label": right, "task": question.task}


def two_turn_record(first: Question, second: Question) -> dict[str, object]:
    return {
        "src": [first.prompt, second.prompt],
        "tgt": [first.answer, second.answer],
        "system": "Answer briefly.",
        "task": f"{first.task}+{second.task}",
    }


def text_record(question: Question) -> dict[str, str]:
    return {"text": f"{question.prompt} The answer is {question.answer}."}


def build() -> dict[str, list[dict[str, object]]]:
    """All shipped files, name -> records."""
    draw = random.Random(SEED)
    train: list[Question] = []
    held_out: list[Question] = []
    for task in TASKS:
        questions = distinct_questions(task, TRAIN_PER_TASK + EVAL_PER_TASK, f"{SEED}/{task.__name__}")
        held_out += questions[:EVAL_PER_TASK]
        train += questions[EVAL_PER_TASK:]
    draw.shuffle(train)
    draw.shuffle(held_out)
    turns = [two_turn_record(first, second) for first, second in zip(train[:400], train[400:800], strict=True)]
    records: list[dict[str, object]] = [sft_record(question) for question in train] + turns
    further = _further_additions(REWARDED_EVAL)
    rewarded = [question for question in train if question.task == "addition"]
    draw.shuffle(records)
    return {
        "sft-train.jsonl": records,
        "sft-eval.jsonl": [sft_record(question) for question in held_out],
        "grpo-train.jsonl": [sft_record(question) for question in rewarded],
        "grpo-eval.jsonl": [sft_record(question) for question in further],
        "preference-train.jsonl": [preference_record(question) for question in train[:2000]],
        "preference-eval.jsonl": [preference_record(question) for question in held_out],
        "verdict-train.jsonl": _verdicts(train[2000:4000], "train"),
        "verdict-eval.jsonl": _verdicts(held_out, "eval"),
        "text-train.jsonl": [dict(text_record(question)) for question in train[:3000]],
    }


def unseen_additions(count: int) -> list[dict[str, object]]:
    """Return records of additions that are in none of the files."""
    return [sft_record(question) for question in _further_additions(REWARDED_EVAL + count)[REWARDED_EVAL:]]


def _further_additions(count: int) -> list[Question]:
    """Additions that are in none of the files of SFT."""
    known = EVAL_PER_TASK + TRAIN_PER_TASK
    return distinct_questions(addition, known + count, f"{SEED}/addition")[known:]


def _verdicts(questions: list[Question], part: str) -> list[dict[str, object]]:
    """One answer to each question: the right one to about three of five, a wrong one to the others."""
    draw = random.Random(f"{SEED}/verdicts/{part}")
    return [verdict_record(question, right=draw.random() < 0.6) for question in questions]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("examples/data"))
    parser.add_argument("--check", action="store_true", help="only check that the files are up to date")
    arguments = parser.parse_args()
    files = {
        arguments.output / name: "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        for name, records in build().items()
    }
    return write_or_check(files, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
