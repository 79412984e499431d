"""`erniekit train CONFIG --try`: overfit one sample of the user's own data, as a check of a configuration."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from statistics import mean
from typing import TYPE_CHECKING

from erniekit.build.adapters import adapter_plan
from erniekit.build.checks import refuse_sampled_data
from erniekit.build.data import audio_of_model, sample_limits, training_dataset
from erniekit.build.model import begin, initial_weights, open_model
from erniekit.build.sources import training_sources
from erniekit.config import Config
from erniekit.data.batch import Batch
from erniekit.data.collate import collate
from erniekit.data.formats.problems import ProblemList, SkippedRecords, SourceProblems
from erniekit.data.formats.registry import FORMATS
from erniekit.data.formats.unused_fields import UnusedFields
from erniekit.data.media.audio_batch import audio_arrays
from erniekit.data.templates.ernie import Sample, Template
from erniekit.data.tokenize import RecordCounts, TokenizationSettings, tokenise
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.errors import DataError
from erniekit.model.architectures.parts import part_of
from erniekit.model.lora.lora import named_trainable_parameters
from erniekit.runners.stages import stage_objectives
from erniekit.training.optim.adamw import build_optimizer, trainable_parameters
from erniekit.training.step import NotFiniteError, train_step

if TYPE_CHECKING:
    from erniekit.runners.overfit_speech import RecordingToLearn

logger = logging.getLogger(__name__)

SECONDS = 50.0
SPEAK_EVERY = 50  # steps, once the loss is where it should be
LEARNED = 0.99  # the share of the codes of a recording
RECENT_STEPS = 10
GOAL, GOAL_OF_PAIRS = 0.1, 0.8  # of the first loss; preference losses have their minimum at many places
LEARNING_RATE_FROM_WEIGHTS, LEARNING_RATE_FROM_SCRATCH = 1e-4, 1e-3


def overfit_check(config: Config, *, seconds: float = SECONDS, steps: float = math.inf) -> bool:
    """Train on the first sample alone until its loss is a tenth of what it was, or a minute has passed.

    A pair is learned when its chosen answer has the higher reward and the loss is four fifths of what it was, a
    recording when the model writes 99% of its codes. Then, or at the end, the model says it, and that is written.

    Everything that a run needs is exercised (files, template, model, loss, optimizer), nothing else is written. The
    learning rate is constant and at least 1e-4 (1e-3 from random weights), because a handful of steps must show an
    effect.

    Args:
        seconds, steps: when it ends at the latest, whichever comes first.

    Returns:
        Whether the sample was learned.

    Raises:
        UserError: the configuration, the data, the model or the machine does not allow the run.
    """
    refuse_sampled_data(
        config, "--try has no sample to overfit\n  Try a rollout: max_steps=1, and read rollouts.jsonl."
    )
    model_config, tokenizer, template = begin(config, writes_output=False)
    recording: RecordingToLearn | None = None
    batches: Iterator[Batch]
    if config.stage.reads_codes:
        from erniekit.runners.overfit_speech import first_recording  # imports what speaks

        recording = first_recording(config, tokenizer)
        location, batches, goal = recording.location, recording.batches(), GOAL
    else:
        location, sample = first_sample(config, tokenizer, template)
        batches = repeat(_batch_of(config, sample, tokenizer.pad_id))
        goal = GOAL if sample.pair is None else GOAL_OF_PAIRS
    weights = initial_weights(config)
    model = open_model(config, weights, adapters=adapter_plan(config, model_config))
    model.train()
    parameters = named_trainable_parameters(model)
    layers, scale = model_config.num_hidden_layers, config.lora.lora_plus_scale
    parts = partial(part_of, model_config.architecture)
    optimizer = build_optimizer(parameters, config.training, num_layers=layers, lora_plus_scale=scale, part_of=parts)
    trained = list(trainable_parameters(parameters).values())
    batch = next(batches)
    objective = stage_objectives(config).single_batch(config, model, batch)
    floor = LEARNING_RATE_FROM_SCRATCH if weights is None else LEARNING_RATE_FROM_WEIGHTS
    lr = max(config.training.learning_rate, floor)
    logger.info(
        f"overfitting {location} ({batch.token_count} tokens, {batch.target_count} targets), learning rate {lr:g}"
    )

    losses: deque[float] = deque(maxlen=1 if recording is None else RECENT_STEPS)  # draws make those of speech uneven
    start, first, step, last_said = time.monotonic(), 0.0, 0, -SPEAK_EVERY
    while True:
        try:
            result = train_step(
                model, trained, optimizer, objective, [batch],
                step=step, learning_rate=lr, max_grad_norm=config.training.max_grad_norm,
            )  # fmt: skip
        except NotFiniteError as error:
            logger.info(
                f"NOT OK: {error.what} is not finite at step {step + 1}.\n  {_not_finite_hint(step, weights is None)}"
            )
            return False
        losses.append(result.totals.loss)
        loss, taken = mean(losses), time.monotonic() - start
        first = loss if step == 0 else first
        step += 1
        reached = loss < goal * first and result.totals.metrics.get("reward_accuracy", 1.0) == 1.0
        learned, said, ends = reached and recording is None, "", taken > seconds or step >= steps
        if recording is not None and (ends or (reached and step - last_said >= SPEAK_EVERY)):
            share, said = recording.say(model)
            learned, last_said = share >= LEARNED or (reached and ends), step
        if step == 1 or step % 10 == 0 or learned or said:
            logger.info(f"step {step:>3}  loss {loss:.4f}  {taken:.1f} s{said}")
        if learned:
            logger.info(f"OK: the model learned the sample, loss {first:.3f} -> {loss:.3f} in {step} steps{said}.")
            return True
        if ends:
            logger.info(
                f"NOT OK: the loss only went from {first:.3f} to {loss:.3f} in {step} steps{said}.\n"
                "  Look at the sample with `erniekit preview`, and try a higher learning_rate or less dropout. "
                "A large model on a slow machine may only need more time."
            )
            return False
        batch = next(batches)


def _batch_of(config: Config, sample: Sample, pad_id: int) -> Batch:
    batch = collate([[sample]], [[0]], pad_id, pairs=sample.pair is not None)
    audio = audio_of_model(config)
    return batch if audio is None else batch.with_arrays(**audio_arrays([[sample]], batch.shape, audio))


def first_sample(config: Config, tokenizer: Tokenizer, template: Template | None) -> tuple[str, Sample]:
    """The first record of the training data that fits `max_seq_len` and has a target, and its place (file:line).

    No more records than needed are read, and nothing is cached, so that a huge file costs no more than a small one.

    Raises:
        DataError: a record before it is malformed, or none fits.
    """
    limits = f"max_seq_len {config.training.max_seq_len:,}"
    if config.applies("max_prompt_len"):
        limits += f" or max_prompt_len {config.dpo.max_prompt_len:,}"
    settings = TokenizationSettings(tokenizer, template, **sample_limits(config), audio=audio_of_model(config))
    if "packed" in config.training.train_dataset_type:
        dataset = training_dataset(config, tokenizer, template)
        return dataset.location(0), dataset.sample(0)
    skipped = 0
    for source in training_sources(config):
        if source.probability == 0:
            continue
        problems = SourceProblems(ProblemList(), SkippedRecords(), settings.skips_bad_records)
        counts, unused = RecordCounts(), UnusedFields(FORMATS[source.kind])
        for samples, lines in tokenise(source, settings, counts, unused, problems, block_records=1):
            problems.raise_if_any()
            if samples:
                if skipped + counts.dropped:
                    logger.info(f"skipped {skipped + counts.dropped:,} records before it, longer than {limits}")
                return f"{source.path}:{lines[0]}", samples[0]
        problems.raise_if_any()
        skipped += counts.dropped
    if not skipped:
        raise DataError("train_dataset_path: no file is set, so there is no sample to try")
    raise DataError(f"train_dataset_path: none of {skipped:,} records fits {limits}; raise it, or give shorter ones")


def _not_finite_hint(finished_steps: int, random_weights: bool) -> str:
    if finished_steps:
        return "Try a lower learning_rate, or max_grad_norm: 1."
    if random_weights:
        return "No step was made yet, so the model's config.json is the likely cause, for example initializer_range."
    return "No step was made yet, so the weights are damaged, or are not those of config.json."
