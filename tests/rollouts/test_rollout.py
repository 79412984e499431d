"""How the answers of a rollout lie in the rows of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from erniekit.data.batch import Batch
from erniekit.data.templates.ernie import IGNORE_INDEX
from erniekit.rollouts.rollout import Rollout
from tests.runners.test_policy import answer_prompts, assert_equal_models, prompts  # noqa: F401 (fixtures)

PAD = 0


def rollout_of(lengths: list[int], answers: list[tuple[int, int]], masked: bool = False) -> Rollout:
    """Answers to prompts of these lengths: of each the number of its prompt, and its length."""
    made = Rollout.of(
        [prompt for prompt, _ in answers],
        [[100 + prompt * 20 + place for place in range(lengths[prompt])] for prompt, _ in answers],
        [[1000 + number * 20 + place for place in range(length)] for number, (_, length) in enumerate(answers)],
        [[number + place / 100 for place in range(length)] for number, (_, length) in enumerate(answers)],
        [False] * len(answers),
    )
    tokens = sum(length for _, length in answers)
    cut = np.arange(len(answers)) % 3 == 1 if masked else np.zeros(len(answers), bool)
    return made.with_values(advantages=np.arange(tokens), figures=np.zeros((len(answers), 1)), masked=cut)


def predictions(batch: Batch) -> list[tuple[Any, ...]]:
    """What each label is predicted from: the tokens that its position sees, and their positions; in order."""
    found = []
    for row in range(batch.shape[0]):
        for place in np.flatnonzero(batch.labels[row] != IGNORE_INDEX):
            seen = np.flatnonzero(batch.document_ends[row, : place + 1] > place)
            positions = batch.position_ids[row, seen].tolist()
            arrays = [float(batch.arrays[name][row, place]) for name in ("answer_of", "advantages", "sampled_logps")]
            found.append((batch.labels[row, place], batch.input_ids[row, seen].tolist(), positions, arrays))
    return found


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    data=st.data(),
    row_length=st.integers(0, 40),
    masked=st.booleans(),
)
def test_packed_answers_are_predicted_from_what_they_are_alone(
    lengths: list[int], data: st.DataObject, row_length: int, masked: bool
) -> None:
    answer = st.tuples(st.integers(0, len(lengths) - 1), st.integers(1, 7))
    rollout = rollout_of(lengths, data.draw(st.lists(answer, min_size=1, max_size=8)), masked)
    chosen = data.draw(st.permutations(range(len(rollout))))
    alone = rollout.batch(chosen, PAD)
    assert alone.shape[0] == len(chosen)
    for shared in (False, True):
        packed = rollout.batch(chosen, PAD, row_length, share_prompts=shared)
        assert predictions(packed) == predictions(alone)
        assert packed.target_count == alone.target_count and packed.token_count <= alone.token_count
        widest = packed.is_token.sum(axis=1)
        assert ((widest <= row_length) | [len(own) == 1 for own in packed.samples]).all()
        assert [index for own in packed.samples for index in own] == [int(rollout.prompts[each]) for each in chosen]


def test_neighbours_have_their_prompt_once() -> None:
    rollout = rollout_of([5, 4], [(0, 2), (0, 3), (1, 2), (1, 1)])
    packed = rollout.batch(range(4), PAD, 64, share_prompts=True)
    assert packed.shape == (1, (5 + 1) + 3 + (4 + 1) + 1) and packed.token_count == packed.shape[1]
    assert packed.input_ids[0].tolist() == [
        100, 101, 102, 103, 104, 1000, 104, 1020, 1021, 120, 121, 122, 123, 1040, 123,
    ]  # fmt: skip
    assert packed.position_ids[0].tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6, 0, 1, 2, 3, 4, 3]
    assert packed.document_ends[0].tolist() == [9, 9, 9, 9, 6, 6, 9, 9, 9, 15, 15, 15, 14, 14, 15]
    assert rollout.batch(range(4), PAD, 64).shape == (1, 6 + 7 + 5 + 4)


@pytest.mark.proves("packing")
@pytest.mark.parametrize("several", [{}, {"steps_per_generation": 2, "num_iterations": 2}], ids=["once", "often"])
def test_packs_change_nothing_but_speed(
    answer_prompts: Callable[..., Any],  # noqa: F811
    several: dict[str, int],
    tmp_path: Path,
) -> None:
    runs = []
    for packing in (True, False):
        run = answer_prompts(
            packing=packing, **several, beta=0.05, output_dir=str(tmp_path / f"packing-{packing}"),
            per_device_train_batch_size=8, gradient_accumulation_steps=1,
        )  # fmt: skip
        runs.append(run)
    for packed, alone in zip(runs[0].log, runs[1].log, strict=True):
        for name in ("loss", "grad_norm", "reward", "kl", "entropy"):
            if name in packed:
                assert packed[name] == pytest.approx(alone[name], abs=2e-6, rel=2e-5)
    assert runs[0].log[0]["tokens"] < runs[1].log[0]["tokens"]
    assert_equal_models(runs[0].output, runs[1].output, atol=1e-5)
