"""Say early that a run collapses: the entropy, the lengths of answers, or a gradient that has come to nothing."""

from __future__ import annotations

import logging
from collections import deque
from statistics import mean

from erniekit.training.callbacks import Callback, Record

logger = logging.getLogger(__name__)

WINDOW = 10  # steps, at the beginning and now
ENTROPY_LEFT = 0.1  # of that of the first steps
MOST_CUT = 0.5  # of the answers
LENGTHS = (0.25, 4.0)  # of that of the first steps
MOST_EQUAL = 0.95  # of the groups


class CollapseWarnings(Callback):
    """Compares the last steps of a run with its first ones; each warning is given once."""

    def __init__(self) -> None:
        self._first: list[Record] = []
        self._last: deque[Record] = deque(maxlen=WINDOW)
        self._told: set[str] = set()

    def on_step(self, record: Record) -> None:
        if len(self._first) < WINDOW:
            self._first.append(record)
        self._last.append(record)
        if len(self._last) == WINDOW:
            for what, problem in self._problems().items():
                if problem and what not in self._told:
                    self._told.add(what)
                    logger.warning(f"step {record['step']}: {problem}")

    def _problems(self) -> dict[str, str]:
        entropy, entropy_before = self._means("entropy")
        length, length_before = self._means("completion_len")
        cut, cut_before = self._means("completions_cut")
        equal, _ = self._means("groups_equal")
        found = dict.fromkeys(("entropy", "length", "cut", "equal", "gradient"), "")
        if entropy < ENTROPY_LEFT * entropy_before:
            found["entropy"] = (
                f"the entropy has fallen from {entropy_before:.3g} to {entropy:.3g}: the answers to a prompt become "
                "the same, and nothing more is learned; lower learning_rate, or raise clip_ratio_high, beta or "
                "rollout_temperature"
            )
        if not LENGTHS[0] * length_before <= length <= LENGTHS[1] * length_before:
            found["length"] = (
                f"answers have {length:.0f} tokens, and had {length_before:.0f} at first: the rewards may be had by "
                "length alone; read rollouts.jsonl"
            )
        if cut > max(MOST_CUT, 2 * cut_before):
            found["cut"] = (
                f"{cut:.0%} of the answers have no end within max_completion_len, and {cut_before:.0%} had none at "
                "first; raise it, or write overlong_handling: soft"
            )
        if equal > MOST_EQUAL:
            found["equal"] = (
                f"in {equal:.0%} of the groups of the last {WINDOW} steps all rewards are equal, so that they teach "
                "nothing: the prompts are too easy or too hard for this model, or the rewards too coarse; "
                "dynamic_sampling: true leaves such prompts out"
            )
        if all(record["grad_norm"] == 0.0 for record in self._last):
            found["gradient"] = (
                f"the gradient of the last {WINDOW} steps is 0: the weights no longer change; see the rewards in "
                "rollouts.jsonl"
            )
        return found

    def _means(self, name: str) -> tuple[float, float]:
        """Return the mean of a figure over the last steps, and over the first ones."""
        now, before = (
            [float(record[name]) for record in records if name in record] for records in (self._last, self._first)
        )
        return (mean(now), mean(before)) if now and before else (0.0, 0.0)
