"""Let a reward model score the answers of a data file, and write the scores as JSON lines."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from erniekit.data.conversation import ASSISTANT, Conversation, Preference
from erniekit.data.formats.problems import RecordProblem
from erniekit.data.formats.registry import KINDS, read_records, recognise
from erniekit.errors import DataError, UserError
from erniekit.inference.batch import check_output
from erniekit.inference.reward_model import RewardModel, open_reward_model
from erniekit.progress import Progress

logger = logging.getLogger(__name__)
RECORDS_AT_ONCE = 64
_KINDS = tuple(kind for kind in KINDS if kind not in ("text", "asr", "aligned_units", "token_ids", "codes"))


class ScoredRecord(NamedTuple):
    """A record with the answers to be scored, by the field of the output that gets the score of each."""

    line: int
    answers: dict[str, Conversation]


def score_file(model: Path, data: Path, output: Path | None) -> None:
    """Score the answers of a file; print JSON lines, or write them to `output`.

    A dialogue has the `score` of its last answer; a pair those of both answers, as `chosen` and `rejected`; of a
    ranking there is a line for each of its pairs.

    Raises:
        UserError: the model gives no score, a record cannot be read, or `output` exists or cannot be written.
    """
    if output is not None:
        check_output(output)
    kind = _kind_of(data)
    scorer = open_reward_model(model)
    lines = _scored_lines(scorer, data, kind)
    if output is None:
        for line in lines:
            print(line)
        return
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        temporary.rename(output)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    logger.info(f"scores: {output}")


def _kind_of(data: Path) -> str:
    """Return the format of a file, judged by its first records."""
    for kind in ("erniekit", "erniekit preferences", "erniekit verdicts"):
        found = recognise(data, kind)
        if isinstance(found, str) and found in _KINDS:
            return found
    raise DataError(
        f"{data}: its records are no dialogues, pairs of answers or answers with a verdict\n"
        "  docs/data.md shows the formats."
    )


def _scored_lines(scorer: RewardModel, data: Path, kind: str) -> Iterator[str]:
    records = _records(data, kind)
    progress = Progress("scoring", None, "records")
    every: list[dict[str, float]] = []
    try:
        while some := list(islice(records, RECORDS_AT_ONCE)):
            dialogues = [dialogue for record in some for dialogue in record.answers.values()]
            where = [f"{data}:{record.line}" for record in some for _ in record.answers]
            scores = iter(scorer.score(dialogues, where).tolist())
            for record in some:
                found = {name: next(scores) for name in record.answers}
                every.append(found)
                yield json.dumps({"line": record.line, **found})
            progress.advance(len(some))
    finally:
        progress.close()
    if not every:
        raise DataError(f"{data}: there is no answer to score")
    logger.info(_summary(every))


def _summary(scores: list[dict[str, float]]) -> str:
    """Return the mean scores, and of pairs how often the chosen answer has the higher one."""
    means = ", ".join(f"mean {name} {np.mean([each[name] for each in scores]):.4f}" for name in scores[0])
    if "chosen" not in scores[0]:
        return f"{len(scores):,} answers, {means}"
    right = np.mean([each["chosen"] > each["rejected"] for each in scores])
    return f"{len(scores):,} pairs, accuracy {right:.4f}, {means}"


def _records(data: Path, kind: str) -> Iterator[ScoredRecord]:
    for item in read_records(data, kind):
        if isinstance(item, RecordProblem):
            raise DataError(str(item))
        line, record = item
        if isinstance(record, Conversation):
            last = max(number for number, turn in enumerate(record.turns) if turn.role == ASSISTANT)
            yield ScoredRecord(line, {"score": _ending(record, last)})
        elif isinstance(record, Preference) and not record.rejected:  # with a verdict
            yield ScoredRecord(line, {"score": _joined(record.prompt, record.chosen)})
        elif isinstance(record, Preference):
            for pair in (record, *record.others):
                answers = {"chosen": pair.chosen, "rejected": pair.rejected}
                yield ScoredRecord(line, {name: _joined(pair.prompt, answer) for name, answer in answers.items()})


def _ending(dialogue: Conversation, last: int) -> Conversation:
    """Return a dialogue up to an answer, with that answer as its one target."""
    turns = dialogue.untrained().turns[:last]
    return replace(dialogue, turns=(*turns, replace(dialogue.turns[last], trained=True)))


def _joined(prompt: Conversation, answer: tuple) -> Conversation:
    return replace(prompt, turns=prompt.turns + answer)
