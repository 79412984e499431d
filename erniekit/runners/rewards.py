"""Score answers by the rewards of a configuration, without training: what `erniekit rewards` shows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from erniekit.build.sources import evaluation_sources, training_sources
from erniekit.config import Config
from erniekit.config.sections.rewards import read_reward
from erniekit.data.conversation import Conversation, Source
from erniekit.data.formats.files import parse_values, read_values
from erniekit.data.formats.media_paths import media_folders
from erniekit.data.formats.problems import RecordProblem
from erniekit.data.split import own_records
from erniekit.errors import ConfigurationError, DataError
from erniekit.inference.prompts import Prompt, prompt_of_record
from erniekit.rewards.references import reference_of
from erniekit.rewards.rewards import Answer, open_rewards
from erniekit.rollouts.advantages import weighted_rewards
from erniekit.terminal import escape_control_characters

SCORED = 100  # records whose own reference answers are scored, unless another number is asked for
_LONGEST_TEXT = 48  # characters of an answer in the table


@dataclass(frozen=True)
class ScoredAnswers:
    """Answers with what they are worth.

    Attributes:
        answers: A of them.
        names: of the rewards.
        scores: float64 [A, names].
        rewards: float64 [A], the weighted sums.
        seconds: that all of it took.
        references: whether they are the data's own reference answers.
    """

    answers: tuple[Answer, ...]
    names: tuple[str, ...]
    scores: np.ndarray
    rewards: np.ndarray
    seconds: float
    references: bool = False

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield each answer with its place and its rewards, as values of JSON."""
        for answer, scores, reward in zip(self.answers, self.scores.tolist(), self.rewards.tolist(), strict=True):
            yield {
                "place": answer.where,
                "answer": answer.text,
                "rewards": dict(zip(self.names, scores, strict=True)),
                "reward": reward,
            }


def needs_paddle(config: Config) -> bool:
    """Return whether one of the rewards is a model."""
    return any(read_reward(text).kind == "reward_model" for text in config.rewards.rewards)


def score_answers(config: Config, answers: Path | None = None, count: int = SCORED) -> ScoredAnswers:
    """Score answers by the rewards of a configuration.

    Args:
        answers: a file of answers to prompts of the data: `rollouts.jsonl`, what `erniekit generate --output` has
            written, or other JSON lines with `answer` and either `place` (FILE:LINE) or `prompt`; None: the first
            records' own reference answers.
        count: the records whose reference answers are scored.

    Raises:
        UserError: the configuration declares no rewards, a file cannot be read, or a reward cannot be computed.
    """
    if not config.applies("rewards"):
        what = f"stage {config.stage.name} has no rewards\n  Write `stage: GRPO`, or stage=GRPO on the command line."
        raise ConfigurationError(what)
    if not config.rewards.rewards:
        raise ConfigurationError("`rewards`: none is declared\n  Write which, such as `rewards: [exact_match]`.")
    found = _read_answers(config, answers) if answers else _references(config, count)
    begin = time.monotonic()
    rewards = open_rewards(config)
    try:
        scores = rewards.score(found)
    finally:
        rewards.close()
    return ScoredAnswers(
        tuple(found),
        rewards.names,
        scores,
        weighted_rewards(scores, rewards.weights),
        time.monotonic() - begin,
        not answers,
    )


def table(scored: ScoredAnswers, shown: int) -> str:
    """Return the first answers with their rewards, and what all of them got, as lines of text."""
    columns = ["reward", *scored.names]
    values = np.column_stack([scored.rewards, scored.scores])
    widths = [max(len(name), 8) for name in columns]
    places = [Path(answer.where).name for answer in scored.answers[:shown]]
    first = max(len(place) for place in (*places, "place"))

    def line(place: str, cells: Sequence[str], text: str = "") -> str:
        row = "  ".join([place.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
        return f"{row}  {text}".rstrip()

    lines = [line("place", columns, "answer")]
    for place, row, answer in zip(places, values, scored.answers, strict=False):
        lines.append(line(place, [f"{value:.4g}" for value in row], _shortened(answer.text)))
    if hidden := len(scored.answers) - len(places):
        lines.append(f"... and {hidden:,} more")
    least, most = values.min(0), values.max(0)
    deviation = np.where(least == most, 0.0, values.std(0))  # without what rounding leaves of equal numbers
    figures = {"mean": values.mean(0), "deviation": deviation, "least": least, "most": most}
    lines += ["", line("", columns)]
    lines += [line(name, [f"{value:.4g}" for value in row]) for name, row in figures.items()]
    lines += ["", f"{len(scored.answers):,} answers scored in {scored.seconds:.2g} s"]
    alike = [name for name, most, least in zip(scored.names, *_bounds(scored), strict=True) if most == least]
    if alike and len(scored.answers) > 1 and not scored.references:
        lines.append(
            f"the same for all answers: {', '.join(alike)}; what is the same for a whole group teaches nothing"
        )
    return escape_control_characters("\n".join(lines))


def _bounds(scored: ScoredAnswers) -> tuple[list[float], list[float]]:
    return scored.scores.max(0).tolist(), scored.scores.min(0).tolist()


def _shortened(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "...")


class _Asked(NamedTuple):
    """A record of the data: the messages of its prompt, its fields, its place."""

    messages: list[dict[str, Any]]
    record: Mapping[str, Any]
    where: str


def _references(config: Config, count: int) -> list[Answer]:
    """Return the reference answers of the first records."""
    answers = []
    for asked in islice(_asked(training_sources(config)), count):
        try:
            found = reference_of(asked.record, config.rewards.reference_field)
        except ValueError as error:
            raise DataError(
                f"{asked.where}: {error}\n  Name the field that has it, reference_field=NAME, or give answers to "
                "score: --answers FILE"
            ) from None
        answers.append(Answer(asked.messages, found if isinstance(found, str) else found[0], asked.record, asked.where))
    if not answers:
        raise DataError(f"{_named(training_sources(config))}: there is no record to score")
    return answers


def _read_answers(config: Config, file: Path) -> list[Answer]:
    """Return the answers of a file, each with the record of the data that it answers."""
    sources = training_sources(config) + evaluation_sources(config)
    by_place: dict[str, _Asked] = {}
    by_prompt: dict[str, _Asked] = {}
    for asked in _asked([source for source in sources if source.path.exists()]):
        by_place[asked.where] = asked
        by_prompt.setdefault(str(asked.messages[-1].get("content")), asked)
    answers = []
    for item in read_values(file):
        if isinstance(item, RecordProblem):
            raise DataError(str(item))
        line, value = item
        text = value.get("answer") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(text, str):
            raise DataError(f"{file}:{line}: expected an object with a text as `answer`, and `place` or `prompt`")
        if "place" in value:
            found, named = by_place.get(str(value["place"])), f"the place {value['place']}"
        else:
            messages = value.get("messages")
            last = messages[-1].get("content") if messages and isinstance(messages, list) else value.get("prompt")
            found, named = by_prompt.get(str(last)), f"the prompt {_shortened(str(last))}"
        if found is None:
            raise DataError(
                f"{file}:{line}: the data ({_named(sources)}) has no record of {named}\n  Name the data that it "
                "answers: train_dataset_path=FILE"
            )
        answers.append(Answer(found.messages, text, found.record, found.where))
    if not answers:
        raise DataError(f"{file}: has no answers")
    return answers


def _named(sources: Sequence[Source]) -> str:
    return ", ".join(str(source.path) for source in sources) or "none is named"


def _asked(sources: Sequence[Source]) -> Iterator[_Asked]:
    """Yield the records of files of dialogues with their prompts. Raises DataError for one that is malformed."""
    for source in sources:
        folders = media_folders(source.path, source.media_dir)

        def parse(line: int, value: Any, folders: Sequence[str] = folders) -> tuple[Prompt, Mapping[str, Any]]:
            return prompt_of_record(line, value, folders), value

        for item in own_records(parse_values(source.path, parse), source.split):
            if isinstance(item, RecordProblem):
                raise DataError(str(item))
            prompt, record = item
            yield _Asked(_messages(prompt.conversation), record, f"{source.path}:{prompt.line}")


def _messages(dialogue: Conversation) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": dialogue.system}] if dialogue.system else []
    return system + [{"role": turn.role, "content": turn.written()} for turn in dialogue.turns]
