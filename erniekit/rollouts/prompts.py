"""Prompts that the model answers while it is trained, with their records, which tell what a right answer is."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from erniekit.build.sources import evaluation_sources, training_sources
from erniekit.config import Config
from erniekit.data.conversation import Conversation, Source
from erniekit.data.eval_sampler import source_names
from erniekit.data.formats.files import parse_values
from erniekit.data.formats.media_paths import media_folders
from erniekit.data.formats.problems import RecordProblem
from erniekit.data.mixing import epoch_order
from erniekit.data.placeholders import encode_prompt_with_clips
from erniekit.data.split import own_records
from erniekit.data.templates.ernie import Template
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.errors import DataError
from erniekit.inference.prompts import Prompt, prompt_of_record
from erniekit.rewards.rewards import Answer

logger = logging.getLogger(__name__)

_SHOWN = 10  # of bad records, and of prompts that are too long


@dataclass(frozen=True)
class SampledPrompt:
    """A prompt.

    Attributes:
        where: the place of its record, such as "data.jsonl:12".
        messages: the dialogue that the model answers, with `role` and `content`.
        record: the whole data record.
        ids: its tokens, ending with the header of the answer.
    """

    where: str
    messages: list[dict[str, Any]]
    record: Mapping[str, Any]
    ids: list[int]

    def answered(self, text: str) -> Answer:
        """Return an answer to it, to be scored."""
        return Answer(self.messages, text, self.record, self.where)


class PromptReport(NamedTuple):
    """What became of the records of the files."""

    prompts: int
    skipped: int
    too_long: int
    cut: int
    limit: int
    longest: int

    def __str__(self) -> str:
        more = [f"{self.skipped:,} malformed records skipped"] if self.skipped else []
        if self.cut:
            more.append(f"{self.cut:,} that lost their oldest turns")
        if self.too_long:
            more.append(f"{self.too_long:,} left out, of more than {self.limit:,} tokens")
        rest = f"; {', '.join(more)}" if more else ""
        return f"prompts: {self.prompts:,}, the longest of {self.longest:,} tokens{rest}"


class PromptDataset:
    """The prompts of all files, in their order.

    Attributes:
        prompts: of all sources.
        source_of: int16 [n], the file of each.
        probabilities: of the files.
        report: what became of their records.
        names: of the files.
        fingerprint: changes with any prompt or record.
    """

    def __init__(
        self,
        prompts: Sequence[SampledPrompt],
        source_of: Sequence[int],
        probabilities: Sequence[float],
        names: Sequence[str],
        report: PromptReport,
    ) -> None:
        self.names = tuple(names)
        self.prompts, self.probabilities, self.report = tuple(prompts), list(probabilities), report
        self.source_of = np.array(source_of, np.int16)
        digest = hashlib.blake2b(repr(self.probabilities).encode(), digest_size=16)
        for prompt in self.prompts:
            digest.update(repr(prompt.ids).encode())
            digest.update(json.dumps(prompt.record, sort_keys=True, default=str).encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.prompts)

    def location(self, index: int) -> str:
        """Return the place of a prompt's record."""
        return self.prompts[index].where


def training_prompts(config: Config, tokenizer: Tokenizer, template: Template) -> PromptDataset:
    """Read the prompts of `train_dataset_path`. Raises DataError."""
    kinds_given = config.is_set("train_dataset_type")
    return read_prompt_dataset(config, training_sources(config), tokenizer, template, kinds_given=kinds_given)


def evaluation_prompts(config: Config, tokenizer: Tokenizer, template: Template) -> PromptDataset:
    """Read the held-out prompts. Raises DataError."""
    given = "train_dataset_type" if config.evaluation.eval_split else "eval_dataset_type"
    sources = [source for source in evaluation_sources(config) if source.probability > 0]
    return read_prompt_dataset(config, sources, tokenizer, template, kinds_given=config.is_set(given))


def read_prompt_dataset(
    config: Config, sources: Sequence[Source], tokenizer: Tokenizer, template: Template, *, kinds_given: bool
) -> PromptDataset:
    """Read the prompts of files, and tell of those that are too long.

    Args:
        kinds_given: whether the user has named the formats; otherwise each record tells its own.

    Raises:
        DataError: a file cannot be read, a record is malformed, has recordings or is too long where that stops the run,
            or nothing is left.
    """
    limit = config.dpo.max_prompt_len  # with room for an answer, see `answers_have_room`
    policy, skips = config.sft.over_length_policy, config.sft.on_bad_record == "skip"
    prompts: list[SampledPrompt] = []
    source_of: list[int] = []
    problems: list[str] = []
    too_long: list[str] = []
    skipped = cut = 0
    for number, source in enumerate(sources):
        if source.probability <= 0:
            continue
        folders = media_folders(source.path, source.media_dir)
        kind = source.kind if kinds_given else ""

        def parse(
            line: int, value: Any, kind: str = kind, folders: Sequence[str] = folders
        ) -> tuple[Prompt, Mapping[str, Any]]:
            return prompt_of_record(line, value, folders, kind), value

        for item in own_records(parse_values(source.path, parse), source.split):
            if isinstance(item, RecordProblem):
                if skips and item.line:
                    skipped += 1
                    if skipped <= _SHOWN:
                        logger.warning(f"skipped: {item}")
                else:
                    problems.append(str(item))
                continue
            prompt, record = item
            where = f"{source.path}:{prompt.line}"
            dialogue = prompt.conversation
            if dialogue.clips:
                problems.append(f"{where}: the record has a recording, and stage GRPO reads prompts of text only")
                continue
            ids = encode_prompt_with_clips(template, tokenizer, dialogue, None).ids
            whole = dialogue
            while len(ids) > limit and policy == "truncate_turns" and dialogue.rounds > 1:
                dialogue = dialogue.drop_oldest_rounds(1)
                ids = encode_prompt_with_clips(template, tokenizer, dialogue, None).ids
            if len(ids) > limit:
                too_long.append(f"{where} ({len(ids):,} tokens)")
                continue
            cut += dialogue is not whole
            prompts.append(SampledPrompt(where, _messages(dialogue), record, ids))
            source_of.append(number)
    if too_long and policy == "error":
        problems += [f"{each}: a prompt may have {limit:,} tokens (max_prompt_len)" for each in too_long]
    if problems:
        more = [f"and {len(problems) - 2 * _SHOWN:,} more"] if len(problems) > 2 * _SHOWN else []
        raise DataError("\n".join([*problems[: 2 * _SHOWN], *more]))
    if too_long:
        more = [f"and {len(too_long) - _SHOWN:,} more"] if len(too_long) > _SHOWN else []
        logger.warning(
            f"{len(too_long):,} prompts of more than {limit:,} tokens are left out: "
            f"{', '.join([*too_long[:_SHOWN], *more])}; raise max_prompt_len, or max_seq_len"
        )
    if not prompts:
        named = ", ".join(str(source.path) for source in sources)
        raise DataError(f"{named}: there is no prompt of at most {limit:,} tokens to answer")
    names = source_names([str(source.path) for source in sources])
    longest = max(len(prompt.ids) for prompt in prompts)
    report = PromptReport(len(prompts), skipped, len(too_long), cut, limit, longest)
    return PromptDataset(prompts, source_of, [source.probability for source in sources], names, report)


def _messages(dialogue: Conversation) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": dialogue.system}] if dialogue.system else []
    return system + [{"role": turn.role, "content": turn.written()} for turn in dialogue.turns]


class PromptPlan:
    """Which prompts a run takes, one after another: the epochs of `mixing.epoch_order`, without a border.

    Attributes:
        dataset: the prompts.
        taken: how many have been taken.
    """

    def __init__(self, config: Config, dataset: PromptDataset) -> None:
        self.dataset, self.taken = dataset, 0
        self._config = config
        self._orders: dict[int, np.ndarray] = {}

    @property
    def epoch_size(self) -> int:
        """The prompts of an epoch."""
        return len(self._order(0))

    def take(self, count: int) -> list[int]:
        """Return the next prompts, as indices of the dataset."""
        size = self.epoch_size
        places = range(self.taken, self.taken + count)
        found = [int(self._order(place // size)[place % size]) for place in places]
        self.taken += count
        return found

    def epoch_of(self, step: int) -> float:
        """Return how many epochs the prompts make that have been taken so far."""
        del step  # the answers of a rollout serve several
        return self.taken / self.epoch_size

    def total_steps(self, config: Config, prompts: int, steps: int) -> int:
        """Return the steps of a run whose rollouts have so many prompts, and serve so many steps."""
        if config.training.max_steps > 0:
            return config.training.max_steps
        return math.ceil(config.training.num_train_epochs * self.epoch_size / prompts) * steps

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            section, training = self._config.sft, self._config.training
            repeats = section.num_samples_each_epoch != type(section).num_samples_each_epoch
            while (
                len(self._orders) > 2
            ):  # the first tells the size of all; a rollout may begin in one and end in the next
                del self._orders[min(number for number in self._orders if number)]
            self._orders[epoch] = epoch_order(
                self.dataset.source_of,
                self.dataset.probabilities,
                section.mix_strategy,
                seed=training.seed,
                epoch=epoch,
                shuffle=training.random_shuffle,
                num_samples=section.num_samples_each_epoch,
                repeat=repeats,
            )
        return self._orders[epoch]
