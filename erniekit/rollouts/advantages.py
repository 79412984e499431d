"""Advantages: by how much an answer is better than others to the same prompt, or than all of a rollout.

NumPy, float64. A rollout has P prompts with G answers each; r are their rewards, [P, G], after the weights of several
rewards and, for `rloo` and `reinforce++`, without the divergence from the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-4  # added to a standard deviation, as trl does


def weighted_rewards(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the sum of several rewards times their weights: float64 [...] from [..., names] and [names].

    Equal scores give equal sums to the last bit, which a product of matrices does not: what `all_equal` compares.
    """
    scores = np.asarray(scores, np.float64)
    total = np.zeros(scores.shape[:-1])
    for column, weight in enumerate(np.asarray(weights, np.float64).tolist()):
        total += scores[..., column] * weight
    return total


def group_advantages(rewards_PG: np.ndarray, *, scale: bool = True) -> np.ndarray:
    """Return (r - mean) / (std + 1e-4) within each group, float64 [P, G].

    GRPO: Shao et al. 2024, arXiv:2402.03300, section 4.1.2; the standard deviation is that of a sample (divided by
    G - 1), as in trl. Without `scale` it is r - mean: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783.
    """
    rewards = np.asarray(rewards_PG, np.float64)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    if not scale:
        return centred
    return centred / (group_deviations(rewards)[:, None] + EPSILON)


def group_deviations(rewards_PG: np.ndarray) -> np.ndarray:
    """Return the standard deviation within each group, that of a sample: float64 [P]; 0 for a group of one."""
    rewards = np.asarray(rewards_PG, np.float64)
    return rewards.std(axis=1, ddof=1) if rewards.shape[1] > 1 else np.zeros(len(rewards))


def all_equal(rewards_PG: np.ndarray) -> np.ndarray:
    """Return which groups have one reward only, so that they teach nothing: bool [P]."""
    rewards = np.asarray(rewards_PG)
    return (rewards == rewards[:, :1]).all(axis=1)


def leave_one_out_advantages(rewards_PG: np.ndarray) -> np.ndarray:
    """Return r_i - mean of the others' r in each group, float64 [P, G].

    RLOO: Ahmadian et al. 2024, arXiv:2402.14740, equation 8.
    """
    rewards = np.asarray(rewards_PG, np.float64)
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / (rewards.shape[1] - 1)
    return rewards - others


def rollout_advantages(rewards: np.ndarray, penalties: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the advantages of the tokens of each answer, normalised over all tokens of the rollout.

    a_t = r - sum of the penalties from token t on; then (a - mean) / (std + 1e-8) over the whole rollout.
    REINFORCE++: Hu et al. 2025, arXiv:2501.03262, equations 4 and 5.

    Args:
        rewards: float64 [answers].
        penalties: of each answer beta x divergence of its tokens, [tokens]; zeros without a reference.
    """
    raw = [reward - np.cumsum(own[::-1])[::-1] for reward, own in zip(rewards, penalties, strict=True)]
    every = np.concatenate(raw) if raw else np.zeros(0)
    mean, deviation = (float(every.mean()), float(every.std())) if len(every) else (0.0, 0.0)
    return [(own - mean) / (deviation + 1e-8) for own in raw]


def overlong_penalty(lengths: np.ndarray, longest: int, buffer: int) -> np.ndarray:
    """Return what a soft limit of length adds to the reward, float64 between -1 and 0.

    0 up to `longest` - `buffer` tokens, then falling evenly to -1 at `longest`. DAPO: Yu et al. 2025,
    arXiv:2503.14476, equation 13.
    """
    over = np.asarray(lengths, np.float64) - (longest - buffer)
    return -np.clip(over / buffer, 0.0, 1.0)
