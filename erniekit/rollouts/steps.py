"""The steps of a run that learns from its own answers: a rollout, then the updates that it serves, and again.

What a rollout is depends on nothing but the weights, the seed and the prompts that were taken before: answers draw from
streams of their own, numbered over the run, so ranks, accumulation and the place of an answer change nothing.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from erniekit.config import Config
from erniekit.data.batch import Batch
from erniekit.errors import CheckpointError, TrainingError
from erniekit.model.decoder import Decoder
from erniekit.rewards.rewards import Rewards
from erniekit.rollouts.advantages import (
    all_equal,
    group_advantages,
    group_deviations,
    leave_one_out_advantages,
    overlong_penalty,
    rollout_advantages,
    weighted_rewards,
)
from erniekit.rollouts.prompts import PromptPlan
from erniekit.rollouts.records import RolloutRecords, policy_fingerprint
from erniekit.rollouts.rollout import Rollout, Sizes, answers_of_update, figure_names
from erniekit.rollouts.sampling import Sampled, Texts, sample_answers, sampling_settings
from erniekit.rollouts.workers import RolloutWorkers
from erniekit.training.checkpoint.tensors import TensorFiles
from erniekit.training.collectives import Ranks
from erniekit.training.objectives.policy import ROLLOUT
from erniekit.training.objectives.policy_losses import KL_ESTIMATORS, LOSSES
from erniekit.training.objectives.reference import ComputeLogps, Reference

logger = logging.getLogger(__name__)

_STATE = ROLLOUT + "state"


class Group(NamedTuple):
    """The answers to one prompt, their scores, float64 [G, names], and the rewards that are learned from, [G]."""

    prompt: int
    answers: Sequence[Sampled]
    scores: np.ndarray
    rewards: np.ndarray


@dataclass
class RolloutSteps:
    """Samples answers, scores them, and gives the micro-batches of each step to the trainer.

    Attributes:
        measure: computes log-probabilities of the tokens of batches.
        reference: the same under the reference; None: there is none.
        dp_rank, dp_world_size: which of the ranks with different data this is.
        workers: sample the answers of all ranks, where `rollout_workers` asks for them; the first rank has them.
        multiple_of: the length of rows is a multiple of it.
        row_length: the most tokens of a row with several answers; 0: each has a row of its own.
    """

    config: Config
    model: Decoder
    plan: PromptPlan
    sizes: Sizes
    rewards: Rewards
    texts: Texts
    measure: ComputeLogps
    reference: Reference | None
    records: RolloutRecords
    ranks: Ranks
    dp_rank: int = 0
    dp_world_size: int = 1
    workers: RolloutWorkers | None = None
    multiple_of: int = 1
    row_length: int = 0

    def __post_init__(self) -> None:
        self.number = 0  # of rollouts that were sampled
        self.tokens, self.seconds = 0, 0.0  # sampled in this process, and how long it took
        self._rollout: Rollout | None = None
        self._started = 0  # the step before which it was sampled
        self._update = 0  # the one that is under way, of those it serves

    def is_first_update(self) -> bool:
        """Return whether the weights are those that the answers of this step were sampled from."""
        return self._update == 0

    def read(self, first: int, stop: int) -> Generator[Sequence[Batch], None, None]:
        """Yield this rank's micro-batches of each step; asked between two updates, it samples when a rollout is used
        up."""
        began = time.perf_counter()
        self.records.keep(self.number)  # now, when nothing more can refuse the run
        try:
            for step in range(first, stop):
                if self._rollout is None or step >= self._started + self.sizes.steps:
                    self._rollout, self._started = self._sample(step), step
                self._update = step - self._started
                yield self._batches(self._rollout, self._update)
        finally:
            if self.seconds:
                share = self.seconds / (time.perf_counter() - began)
                logger.info(
                    f"rollouts: {self.tokens:,} tokens at {self.tokens / self.seconds:,.0f} tokens/s, {share:.0%} of "
                    "the time"
                )

    def tensors(self) -> Mapping[str, Tensor]:
        """Return what a checkpoint holds: the answers that are being learned from, and where the run is."""
        state = [self.plan.taken, self.number, self._started, self.sizes.steps, self.sizes.answers, self._figures_hash]
        found = {_STATE: paddle.to_tensor(np.array(state, np.int64))}
        if self._rollout is not None:
            arrays = self._rollout.arrays()
            found |= {ROLLOUT + name: paddle.to_tensor(values) for name, values in arrays.items() if values.size}
        return found

    def restore(self, saved: TensorFiles, step: int) -> None:
        """Go on where a checkpoint was written, before `step`.

        Raises:
            CheckpointError: it lies within a rollout of another size, of other rewards, or with a reference where there
                is none now, or the other way round.
        """
        if _STATE not in saved.names:
            raise CheckpointError("the checkpoint holds no rollout: it was written by another stage\n  Start anew.")
        self.plan.taken, self.number, self._started, *sizes, figures = map(int, np.asarray(saved.read(_STATE)))
        if step >= self._started + sizes[0]:
            if figures != self._figures_hash:
                logger.warning(
                    "the checkpoint was written with other rewards, or with another dynamic_sampling: from now on "
                    f"answers are scored by {', '.join(self.rewards.names)}"
                )
            return
        if sizes != [self.sizes.steps, self.sizes.answers]:
            raise CheckpointError(
                f"the checkpoint lies within a rollout of {sizes[1]} answers that serves {sizes[0]} steps, and the "
                f"configuration asks for {self.sizes.answers} and {self.sizes.steps}\n  Leave steps_per_generation, "
                "num_iterations and the batch as they were."
            )
        known = {name.removeprefix(ROLLOUT) for name in saved.names if name.startswith(ROLLOUT)} - {"state"}
        changed = "rewards or dynamic_sampling" if figures != self._figures_hash else ""
        if ("reference_logps" in known) != (self.reference is not None):
            changed = "beta" if not changed else f"{changed}, beta"
        if changed:
            raise CheckpointError(
                f"the checkpoint lies within a rollout that serves the steps {self._started + 1} to "
                f"{self._started + sizes[0]}, and its answers were scored with other values of {changed}\n"
                "  Put the old values back, or resume from a checkpoint between two rollouts."
            )
        empty = Rollout.of([], [], [], [], [])
        values = {name: np.asarray(saved.read(ROLLOUT + name)) for name in known}
        self._rollout = empty.with_values(**values)

    @property
    def _figures_hash(self) -> int:
        """Of the names of what the log shows of answers, which are columns of a rollout."""
        names = figure_names(self.rewards.names, dynamic=self.config.grpo.dynamic_sampling)
        return zlib.crc32(",".join(names).encode())

    def _batches(self, rollout: Rollout, update: int) -> list[Batch]:
        """Return this rank's micro-batches of an update."""
        seed, size = self.config.training.seed, self.config.training.per_device_train_batch_size
        chosen = answers_of_update(len(rollout), self.sizes.updates, update, self.number, seed)
        starts = range(0, len(chosen), size)[self.dp_rank :: self.dp_world_size]
        return [self._batch(rollout, chosen[start : start + size].tolist()) for start in starts]

    def _batch(self, rollout: Rollout, answers: Sequence[int]) -> Batch:
        """Return a micro-batch, in whose rows neighbours share their prompt, unless windows of attention count it."""
        shares = min(self.model.config.windows, default=self.row_length) >= self.row_length
        batch = rollout.batch(answers, self.texts.pad_id, self.row_length, share_prompts=shares)
        rows, length = batch.shape
        return batch.padded(rows, length + -length % self.multiple_of)

    def _sample(self, step: int) -> Rollout:
        """Sample the answers of the next rollout, score them, and find their advantages."""
        fingerprint = policy_fingerprint(self.model, self.ranks)
        self.number += 1
        began = time.perf_counter()
        if self.workers is not None:
            self.workers.send(self.model, fingerprint)
        self.seconds += time.perf_counter() - began
        groups, dropped = self._groups()
        rollout = self._learnt(groups, dropped)
        self.records.write(self._described(groups, rollout, step, fingerprint))
        return rollout

    def _groups(self) -> tuple[list[Group], int]:
        """Return the groups of a rollout, and how many were dropped for rewards that are all equal."""
        section, wanted = self.config.grpo, self.sizes.prompts
        rounds = section.max_sampling_rounds if section.dynamic_sampling else 1
        kept: list[Group] = []
        equal: list[Group] = []
        for _ in range(rounds):
            for group in self._scored(wanted - len(kept)):
                same = section.dynamic_sampling and bool(all_equal(group.rewards[None])[0])
                (equal if same else kept).append(group)
            if len(kept) == wanted:
                break
        lacking = wanted - len(kept)
        if lacking:
            logger.warning(
                f"rollout {self.number}: after {rounds} rounds of dynamic sampling {lacking} of {wanted} groups still "
                "have equal rewards, and teach nothing: the prompts are too easy, too hard, or max_sampling_rounds is "
                "too low"
            )
        return [*kept, *equal[:lacking]], len(equal) - lacking

    def _scored(self, count: int) -> list[Group]:
        """Sample groups of answers to the next prompts, on all ranks, and score them on the first."""
        first = self.plan.taken
        prompts = self.plan.take(count)
        began = time.perf_counter()
        gathered = (self._from_workers if self.config.grpo.rollout_workers else self._from_ranks)(prompts, first)
        self.tokens += sum(len(answer.tokens) for group in gathered for answer in group)
        self.seconds += time.perf_counter() - began
        scores = self._scores(prompts, gathered)
        rewards = weighted_rewards(scores, self.rewards.weights)
        section = self.config.grpo
        if section.overlong_handling == "soft":
            lengths = np.array([[len(answer.tokens) for answer in group] for group in gathered])
            rewards = rewards + overlong_penalty(lengths, section.max_completion_len, section.overlong_buffer)
        return [Group(*each) for each in zip(prompts, gathered, scores, rewards, strict=True)]

    def _from_ranks(self, prompts: Sequence[int], first: int) -> list[list[Sampled]]:
        """Sample a group of answers to each prompt, every rank its share; `first` prompts were taken before."""
        size, count, data = self.sizes.group, len(prompts), self.plan.dataset.prompts
        own = range(count)[self.dp_rank :: self.dp_world_size]
        answers = sample_answers(
            self.model,
            [data[prompts[place]].ids for place in own for _ in range(size)],
            [(first + place) * size + number for place in own for number in range(size)],
            **sampling_settings(self.config, self.texts),
        )
        by_place: dict[int, list[Sampled]] = {}
        for rank, found in self.ranks.all_gather_object([self.dp_rank, [list(answer) for answer in answers]]):
            for number, answer in enumerate(found):
                place = range(count)[rank :: self.dp_world_size][number // size]
                by_place.setdefault(place, []).append(Sampled(*answer))
        return [by_place[place][:size] for place in range(count)]  # ranks that share a model have the same

    def _from_workers(self, prompts: Sequence[int], first: int) -> list[list[Sampled]]:
        """Let the workers of the first rank sample a group of answers to each prompt."""
        size, count, data = self.sizes.group, len(prompts), self.plan.dataset.prompts
        found: list[Sampled] = []
        if self.workers is not None:
            asked = [data[prompt].ids for prompt in prompts for _ in range(size)]
            found = self.workers.sample(asked, range(first * size, (first + count) * size), size)
        answers = self.ranks.all_gather_object([list(answer) for answer in found])[0]
        return [[Sampled(*each) for each in answers[start : start + size]] for start in range(0, count * size, size)]

    def _scores(self, prompts: Sequence[int], groups: Sequence[Sequence[Sampled]]) -> np.ndarray:
        """Return the rewards of answers: float64 [prompts, G, names], computed by the first rank."""
        scores = None
        if self.ranks.is_main_process:
            data = self.plan.dataset.prompts
            asked = [
                data[prompt].answered(self.texts.decode(answer.text_tokens))
                for prompt, group in zip(prompts, groups, strict=True)
                for answer in group
            ]
            scores = self.rewards.score(asked).tolist()
        found = np.array(self.ranks.all_gather_object(scores)[0], np.float64)
        return found.reshape(len(prompts), self.sizes.group, len(self.rewards.names))

    def _learnt(self, groups: Sequence[Group], dropped: int) -> Rollout:
        """Return the rollout of some groups with what is learned from it: advantages, log-probabilities, figures."""
        section, data = self.config.grpo, self.plan.dataset.prompts
        answers = [answer for group in groups for answer in group.answers]
        prompts = [group.prompt for group in groups for _ in group.answers]
        rollout = Rollout.of(
            prompts,
            [data[prompt].ids for prompt in prompts],
            [answer.tokens for answer in answers],
            [answer.logps for answer in answers],
            [answer.cut for answer in answers],
        )
        rewards = np.stack([group.rewards for group in groups])
        rollout = rollout.with_values(
            advantages=np.zeros(len(rollout.sampled_logps)), figures=self._figures(groups, rollout, rewards, dropped)
        )
        rollout = self._with_logps(rollout)  # of all answers: others are compared with those that are masked, too
        if section.overlong_handling == "mask":
            rollout = rollout.with_values(masked=rollout.cut)
        return rollout.with_values(advantages=self._advantages(rollout, rewards))

    def _figures(self, groups: Sequence[Group], rollout: Rollout, rewards: np.ndarray, dropped: int) -> np.ndarray:
        """Return fp32 [A, F], see `figure_names`."""
        size = self.sizes.group
        columns = [rewards.reshape(-1), *np.concatenate([group.scores for group in groups]).T]
        columns += [np.repeat(group_deviations(rewards), size), rollout.lengths, rollout.cut]
        columns.append(np.repeat(all_equal(rewards), size))
        if self.config.grpo.dynamic_sampling:
            columns.append(np.full(len(rollout), dropped / len(groups)))
        return np.stack([np.asarray(column, np.float32) for column in columns], axis=1)

    def _with_logps(self, rollout: Rollout) -> Rollout:
        """Return the rollout with the log-probabilities that its updates need: those before the first of them, where
        there are several or the reward asks for them, and those under the reference."""
        kl_in_reward = LOSSES[self.config.dpo.loss_type].kl_in_reward
        names = []
        if self.sizes.steps > 1 or (self.reference is not None and kl_in_reward):
            names.append("old_logps")
        if self.reference is not None:
            names.append("reference_logps")
        for name in names:
            values = np.zeros(len(rollout.sampled_logps), np.float32)
            for update in range(self.sizes.updates):
                self._measure(name, rollout, update, values)
            values = self._over_ranks(values)
            if not np.isfinite(values).all():
                raise TrainingError(f"rollout {self.number}: log-probabilities are not finite; lower learning_rate")
            rollout = rollout.with_values(**{name: values})
        return rollout

    def _measure(self, name: str, rollout: Rollout, update: int, values: np.ndarray) -> None:
        """Fill in the log-probabilities of this rank's micro-batches of an update."""
        batches = self._batches(rollout, update)
        size = self.config.training.per_device_train_batch_size
        chosen = answers_of_update(len(rollout), self.sizes.updates, update, self.number, self.config.training.seed)
        starts = range(0, len(chosen), size)[self.dp_rank :: self.dp_world_size]
        if name == "old_logps":
            found = self.measure(self.model, batches)
        else:
            assert self.reference is not None
            found = self.reference(batches)
        for start, (logps, *_) in zip(starts, found, strict=True):
            rollout.scattered(chosen[start : start + size].tolist(), logps.numpy(), values)

    def _over_ranks(self, values: np.ndarray) -> np.ndarray:
        """Return the values of all ranks, each of which has filled in those of its answers."""
        if self.dp_world_size == 1:
            return values
        total = self.ranks.sum(values.astype(np.float64))
        return total.astype(np.float32)

    def _advantages(self, rollout: Rollout, rewards: np.ndarray) -> np.ndarray:
        """Return the advantage of each token: float64 [T]."""
        loss, starts = self.config.dpo.loss_type, rollout.starts
        penalties = np.zeros(len(rollout.sampled_logps))
        if LOSSES[loss].kl_in_reward and len(rollout.reference_logps):
            estimate = KL_ESTIMATORS[self.config.grpo.kl_estimator]
            old, reference = (
                paddle.to_tensor(each.astype(np.float64)) for each in (rollout.old_logps, rollout.reference_logps)
            )
            penalties = self.config.dpo.beta * estimate(old, reference).numpy()
        own = [penalties[start:stop] for start, stop in pairwise(starts)]
        if loss == "reinforce++":
            return np.concatenate(rollout_advantages(rewards.reshape(-1), own))
        if loss == "rloo":
            totals = np.array([each.sum() for each in own]).reshape(rewards.shape)
            of_answers = leave_one_out_advantages(rewards - totals)
        else:
            of_answers = group_advantages(rewards, scale=self.config.grpo.scale_rewards)
        return np.repeat(of_answers.reshape(-1), rollout.lengths)

    def _described(
        self, groups: Sequence[Group], rollout: Rollout, step: int, fingerprint: str
    ) -> Generator[dict[str, Any], None, None]:
        """Yield the line of each answer."""
        if not self.ranks.is_main_process:
            return
        firsts = rollout.starts[:-1]
        answers = [(group, number) for group in groups for number in range(len(group.answers))]
        for place, (group, number) in enumerate(answers):
            prompt, answer = self.plan.dataset.prompts[group.prompt], group.answers[number]
            yield {
                "rollout": self.number - 1,
                "step": step,
                "weights": fingerprint,
                "place": prompt.where,
                "messages": prompt.messages,
                "answer": self.texts.decode(answer.text_tokens),
                "rewards": dict(zip(self.rewards.names, group.scores[number].tolist(), strict=True)),
                "reward": round(float(rollout.figures[place, 0]), 6),
                "advantage": round(float(rollout.advantages[firsts[place]]), 6),
                "tokens": len(answer.tokens),
                **({"cut": True} if answer.cut else {}),
                **({"masked": True} if rollout.masked[place] else {}),
            }


def with_reference_state(steps: RolloutSteps, reference: Reference | None) -> Callable[[], Mapping[str, Tensor]]:
    """Return the function that gives what a checkpoint holds of the rollout and of the reference."""
    return lambda: {**(reference.tensors() if reference is not None else {}), **steps.tensors()}


def without_rollout(saved: TensorFiles) -> TensorFiles:
    """Return the tensors of a checkpoint that are the reference's."""
    return saved._replace(names=tuple(name for name in saved.names if not name.startswith(ROLLOUT)))
