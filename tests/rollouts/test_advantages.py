"""Advantages by hand."""

from __future__ import annotations

import numpy as np
import pytest

from erniekit.rollouts.advantages import (
    all_equal,
    group_advantages,
    leave_one_out_advantages,
    overlong_penalty,
    rollout_advantages,
    weighted_rewards,
)

REWARDS = np.array([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [2.0, -1.0, 0.0, 0.0]])


def test_a_group_is_centred_and_divided_by_its_deviation() -> None:
    found = group_advantages(REWARDS)
    deviation = np.sqrt(4 * 0.25 / 3)  # of the first group, whose mean is 0.5
    np.testing.assert_allclose(found[0], np.array([0.5, -0.5, -0.5, 0.5]) / (deviation + 1e-4), rtol=1e-12)
    assert not found[1].any()
    third = np.sqrt((1.75**2 + 1.25**2 + 2 * 0.25**2) / 3)
    np.testing.assert_allclose(found[2], np.array([1.75, -1.25, -0.25, -0.25]) / (third + 1e-4), rtol=1e-12)
    np.testing.assert_allclose(group_advantages(REWARDS, scale=False)[2], [1.75, -1.25, -0.25, -0.25], rtol=1e-12)


def test_leave_one_out_compares_with_the_others() -> None:
    found = leave_one_out_advantages(REWARDS)
    np.testing.assert_allclose(found[0], [1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3], rtol=1e-12)
    np.testing.assert_allclose(found[2], [2 + 1 / 3, -1 - 2 / 3, -1 / 3, -1 / 3], rtol=1e-12)


def test_groups_of_one_reward_are_known() -> None:
    assert all_equal(REWARDS).tolist() == [False, True, False]


def test_rewards_are_weighted() -> None:
    np.testing.assert_allclose(weighted_rewards(np.array([[1.0, 2.0], [0.0, 4.0]]), np.array([1.0, 0.25])), [1.5, 1.0])


def test_equal_scores_give_equal_rewards_to_the_last_bit() -> None:
    """The product of a matrix and a vector rounds some rows otherwise."""
    drawn = np.random.default_rng(0)
    for _ in range(100):
        found = weighted_rewards(np.tile(drawn.random(5), (9, 7, 1)), drawn.random(5))
        assert all_equal(found).all() and np.unique(found).size == 1


def test_penalties_count_from_their_token_on_and_the_rollout_is_normalised() -> None:
    first, second = rollout_advantages(np.array([1.0, 0.0]), [np.array([0.1, 0.2]), np.array([0.0, 0.0, 0.3])])
    raw = np.array([1 - 0.3, 1 - 0.2, -0.3, -0.3, -0.3])
    expected = (raw - raw.mean()) / (raw.std() + 1e-8)
    np.testing.assert_allclose(np.concatenate([first, second]), expected, rtol=1e-12)
    assert rollout_advantages(np.zeros(0), []) == []


@pytest.mark.parametrize(("length", "added"), [(10, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0)])
def test_the_soft_limit_falls_evenly(length: int, added: float) -> None:
    assert overlong_penalty(np.array([length]), 100, 20).tolist() == pytest.approx([added])
