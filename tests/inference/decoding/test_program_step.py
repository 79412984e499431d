"""A program computes mixed steps as its decoder does, from blocks that lie anywhere."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.export.saved_program import SavedProgram
from erniekit.export.static_program import Program, ProgramDescription
from erniekit.inference.decoding.open_scheduler import open_scheduler
from erniekit.inference.decoding.program_step import ProgramStep
from erniekit.inference.decoding.scheduler import Request, Scheduler
from erniekit.inference.decoding.step import StepBatch
from erniekit.inference.generation import generate
from erniekit.inference.sampling import Sampling
from tests.model.tiny import tiny_model

PROMPTS = [[5, 9, 33, 2], [7], [40, 41, 42, 43, 44, 45, 46, 3, 1, 8, 12] * 3, [4] * 18]


@pytest.fixture(scope="module")
def decoder():
    decoder = tiny_model(seed=6, max_position_embeddings=64)
    decoder.eval()
    return decoder


@pytest.fixture(scope="module")
def program(decoder):
    """The layer that programs are saved from, not saved."""
    layer = Program(decoder)

    @paddle.no_grad()
    def step(arrays):
        ids, positions, mask, last, *past = map(paddle.to_tensor, arrays)
        return [tensor.numpy() for tensor in layer(ids, positions, mask, last, past)]

    return SavedProgram(step, ProgramDescription.of(decoder.config))


def test_chunks_and_answers_side_by_side(decoder, program):
    expected = generate(decoder, PROMPTS, Sampling(max_new_tokens=20))
    assert generate(program, PROMPTS, Sampling(max_new_tokens=20)) == expected
    scheduler = Scheduler(
        ProgramStep(program), 9, max_running=3, step_tokens=12
    )  # prompts go in chunks, blocks run out
    for prompt in PROMPTS:
        scheduler.submit(Request(prompt, Sampling(), 20))
    answers = {number: [] for number in range(len(PROMPTS))}
    while scheduler.unfinished:
        for event in scheduler.step():
            answers[event.request].append(event.token)
    assert list(answers.values()) == expected


def test_what_others_left_in_a_block_is_not_read(program):
    def answers():
        scheduler = Scheduler(step, 9)
        for prompt in PROMPTS:
            scheduler.submit(Request(prompt, Sampling(), 6))
        events = []
        while scheduler.unfinished:
            events += scheduler.step()
        return events

    step = ProgramStep(program)
    expected = answers()
    for stored in step._blocks:
        stored[:] = np.nan
    assert answers() == expected


def test_a_program_gets_blocks_by_its_description(decoder, program):
    assert open_scheduler(program)._blocks.count == open_scheduler(decoder)._blocks.count


def test_logits_of_other_than_last_tokens_are_not_there(program):
    batch = StepBatch(
        np.array([5, 9, 33]), np.arange(3), np.array([0, 3], np.int32), np.zeros(1, np.int32),
        np.zeros((1, 1), np.int32), np.array([1]),
    )  # fmt: skip
    with pytest.raises(AssertionError, match="last tokens"):
        ProgramStep(program).logits(batch)
