"""On-policy distillation: some steps train on answers that the student has just written itself.

GKD: Agarwal et al. 2023, arXiv:2306.13649, algorithm 1. The engine of `erniekit generate` answers with the weights in
training, of which there is one copy. What a step does depends on the seed and on its number alone, so a resumed run
does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing

import numpy as np

from erniekit.config import Config
from erniekit.data.batch import Batch
from erniekit.data.collate import collate
from erniekit.data.mixing import Purpose, generator
from erniekit.data.packing import pack_sequential
from erniekit.data.sampler import StepPlan
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample
from erniekit.errors import ConfigurationError
from erniekit.inference.decoding.scheduler import Request
from erniekit.inference.generation import answer_requests, make_request
from erniekit.inference.sampling import Sampling
from erniekit.model.bf16 import weights_stay
from erniekit.model.decoder import Decoder
from erniekit.training.objectives.reference import eval_mode

ReadSteps = Callable[[int, int], Generator[Sequence[Batch], None, None]]


def is_on_policy(seed: int, step: int, ratio: float) -> bool:
    """Return whether a step trains on the student's own answers; true in the share `ratio` of all steps."""
    return bool(generator(Purpose.ON_POLICY, seed, step).random() < ratio)


def prompt_length(sample: Sample) -> int:
    """Return the tokens of a sample before its last answer, which is the last run of positions with a label."""
    trained = np.flatnonzero(np.asarray(sample.labels) != IGNORE_INDEX)
    gaps = np.flatnonzero(np.diff(trained) > 1)
    first = trained[gaps[-1] + 1] if len(gaps) else trained[0]
    return int(first) + 1


def with_own_answers(
    config: Config, model: Decoder, plan: StepPlan, stop_token_ids: Sequence[int], multiple_of: int, read: ReadSteps
) -> ReadSteps:
    """Return what reads steps as `read` does, with the student's own answers in the share `on_policy_ratio` of them.

    Args:
        model: the student, which has the weights of the step when its batches are asked for.
        plan: of training, whose samples are answered.
        stop_token_ids: the tokens that end an answer.
        multiple_of: the length of rows is a multiple of it.

    Raises:
        ConfigurationError: the samples have recordings.
    """
    section, seed = config.distillation, config.training.seed
    if plan.dataset.audio is not None:
        raise ConfigurationError(
            "on_policy_ratio: the student listens, and its own answers to recordings are not written\n"
            "  Write `on_policy_ratio: 0`."
        )

    def steps(first: int, stop: int) -> Generator[Sequence[Batch], None, None]:
        with closing(read(first, stop)) as offline:
            for step, batches in enumerate(offline, start=first):
                if is_on_policy(seed, step, section.on_policy_ratio):
                    yield list(answered(step, batches))
                else:
                    yield batches

    def answered(step: int, batches: Sequence[Batch]) -> Iterator[Batch]:
        numbers = [[index for row in batch.samples for index in row] for batch in batches]
        samples = [[plan.dataset.sample(index) for index in of_batch] for of_batch in numbers]
        with eval_mode(model), weights_stay():
            requests = [
                request(sample, step * len(plan.dataset) + index)
                for indices, of_batch in zip(numbers, samples, strict=True)
                for index, sample in zip(indices, of_batch, strict=True)
            ]
            answers = iter(answer_requests(model, requests))
            asked = iter(requests)
        for indices, of_batch in zip(numbers, samples, strict=True):
            own = [own_sample(next(asked), next(answers), sample) for sample in of_batch]
            yield rows_of(own, indices)

    def request(sample: Sample, stream: int) -> Request:
        prompt = [*map(int, sample.input_ids[: prompt_length(sample)])]
        sampling = Sampling(
            section.on_policy_max_new_tokens,
            temperature=section.on_policy_temperature,
            stop_token_ids=tuple(stop_token_ids),
            seed=seed,
            max_length=config.training.max_seq_len,
        )
        return make_request(model, prompt, sampling, stream)

    def own_sample(request: Request, answer: Sequence[int], sample: Sample) -> Sample:
        """An answer that has ended by itself also learns its end."""
        written = list(answer)
        if len(written) < request.room:
            last = int(sample.labels[-1])
            written.append(last if last in stop_token_ids else stop_token_ids[0])
        ids = np.array([*request.prompt, *written], np.int32)
        labels = np.full(len(ids) - 1, IGNORE_INDEX, np.int32)
        labels[len(request.prompt) - 1 :] = written
        return Sample(ids[:-1], labels)

    def rows_of(own: Sequence[Sample], indices: Sequence[int]) -> Batch:
        lengths = np.array([len(sample.input_ids) for sample in own], np.int64)
        packs = list(pack_sequential(lengths, config.training.max_seq_len)) if len(own) else [np.zeros(0, np.int64)]
        rows = [[own[number] for number in pack] for pack in packs]
        batch = collate(rows, [[indices[number] for number in pack] for pack in packs], plan.dataset.pad_id)
        count, length = batch.shape
        return batch.padded(count, length + -length % multiple_of)

    return steps
