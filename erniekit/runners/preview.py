"""What the data becomes: the first samples as the model sees them, and the figures of reading and packing."""

from __future__ import annotations

from erniekit.data.preview import render_batch
from erniekit.parameters import Config
from erniekit.runners.data_wiring import (
    DataParallelRank,
    count_steps,
    evaluation_dataset,
    evaluation_plan,
    training_dataset,
    training_plan,
)
from erniekit.runners.wiring import open_tokenizer


def preview(config: Config, *, rows: int = 1, documents: int = 8, color: bool = False) -> str:
    """The first documents of the first training step, token by token where they are trained and where not.

    Raises:
        UserError: the tokenizer or the data cannot be used.
    """
    tokenizer, template = open_tokenizer(config)
    dataset = training_dataset(config, tokenizer, template)
    plan = training_plan(config, dataset)
    shown = []
    for batch in plan.micro_batches(0):
        if rows > 0:
            shown.append(render_batch(batch, tokenizer, dataset, rows=rows, documents=documents, color=color))
            rows -= len(batch.samples)
    shown.append(plan.describe(config.training.max_steps, config.training.num_train_epochs))
    return "\n\n".join(shown)


def data_summary(config: Config, dp_world_size: int = 1) -> str:
    """Counts of every data file that the configuration reads, packing, and the exact number of steps.

    Args:
        dp_world_size: how many ranks divide every batch.

    Raises:
        UserError: the tokenizer or the data cannot be used.
    """
    tokenizer, template = open_tokenizer(config)
    blocks = []
    if config.basic.do_train or config.verb == "preview":
        dataset = training_dataset(config, tokenizer, template)
        plan = training_plan(config, dataset, DataParallelRank(dp_world_size=dp_world_size))
        count_steps(config, plan)
        blocks += [str(dataset.report), plan.describe(config.training.max_steps, config.training.num_train_epochs)]
    if config.basic.do_eval and config.evaluation.eval_dataset_path:
        held_out = evaluation_dataset(config, tokenizer, template)
        batches = evaluation_plan(config, held_out).steps_in_epoch(0)
        blocks.append(f"{held_out.report}\nevaluation: {batches:,} batches")
    return "\n".join(blocks)


def longest_sample(config: Config) -> int | None:
    """The tokens of the longest training sample; None where the run reads no training data.

    Raises:
        UserError: the tokenizer or the data cannot be used.
    """
    if not config.basic.do_train:
        return None
    return int(training_dataset(config, *open_tokenizer(config)).lengths.max())
