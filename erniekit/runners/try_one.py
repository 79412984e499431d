"""`erniekit train CONFIG --try`: overfit one sample of the user's own data, as a check of a configuration."""

from __future__ import annotations

import time

from erniekit.data.batches import collate
from erniekit.model.weights import named_weights
from erniekit.parameters import Config
from erniekit.runners.sft import first_weights, objective_from
from erniekit.runners.wiring import (
    Say,
    check_vocabulary,
    open_model,
    open_tokenizer,
    read_model_config,
    select_device,
    training_dataset,
)
from erniekit.training.optimizer import build_optimizer, trainable_parameters
from erniekit.training.settings import optimizer_settings_from
from erniekit.training.step import train_step

SECONDS = 50.0
GOAL = 0.1  # of the first loss
LEARNING_RATE_FROM_WEIGHTS, LEARNING_RATE_FROM_SCRATCH = 1e-4, 1e-3


def try_one_sample(config: Config, say: Say = print) -> bool:
    """Train on the first sample alone until its loss is a tenth of what it was, or a minute has passed.

    Everything that a run needs is exercised (files, template, model, loss, optimizer), nothing is written. The learning
    rate is constant and at least 1e-4 (1e-3 from random weights), because a handful of steps must show an effect.

    Returns:
        Whether the loss got there.
    """
    for line in config.messages:
        say(line)
    select_device(config, say)
    model_config = read_model_config(config)
    tokenizer, template = open_tokenizer(config)
    check_vocabulary(model_config, tokenizer)
    dataset = training_dataset(config, tokenizer, template)
    weights = first_weights(config)
    model = open_model(config, weights, say)
    model.train()
    parameters = named_weights(model)
    optimizer = build_optimizer(parameters, optimizer_settings_from(config, model_config.num_hidden_layers))
    trained = list(trainable_parameters(parameters).values())
    batch = collate([[dataset.sample(0)]], [[0]], dataset.pad_id)
    floor = LEARNING_RATE_FROM_SCRATCH if weights is None else LEARNING_RATE_FROM_WEIGHTS
    rate = max(config.training.learning_rate, floor)
    say(
        f"overfitting {dataset.location(0)} ({batch.token_count} tokens, {batch.target_count} targets), "
        f"learning rate {rate:g}"
    )

    start, first, step = time.monotonic(), 0.0, 0
    while True:
        result = train_step(
            model, trained, optimizer, objective_from(config), [batch],
            step=step, learning_rate=rate, max_grad_norm=config.training.max_grad_norm,
        )  # fmt: skip
        loss, seconds = result.totals.loss, time.monotonic() - start
        first = loss if step == 0 else first
        step += 1
        reached = loss < GOAL * first
        if step == 1 or step % 10 == 0 or reached:
            say(f"step {step:>3}  loss {loss:.4f}  {seconds:.1f} s")
        if reached:
            say(f"OK: the model learned the sample, loss {first:.3f} -> {loss:.3f} in {step} steps.")
            return True
        if seconds > SECONDS:
            say(
                f"NOT OK: the loss only went from {first:.3f} to {loss:.3f} in {step} steps.\n"
                "  Look at the sample with `erniekit preview`, and try a higher learning_rate or less dropout. "
                "A large model on a slow machine may only need more time."
            )
            return False
