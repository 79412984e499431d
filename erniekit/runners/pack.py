"""Packing the training data once, so that runs replay it. Needs no Paddle."""

from __future__ import annotations

import logging
from pathlib import Path

from erniekit.build.checks import refuse_packed_data
from erniekit.build.data import data_fingerprint_of, training_dataset, training_plan
from erniekit.build.model import open_tokenizer
from erniekit.build.preflight import preflight
from erniekit.config import Config
from erniekit.data.packed import check_empty_or_new, write_packed

logger = logging.getLogger(__name__)


def pack_data(config: Config, target: Path) -> None:
    """Write the first epoch of a training run to the folder `target`.

    Raises:
        UserError: the data cannot be used, is packed already, or is drawn anew in each epoch; or `target` cannot be
            written.
    """
    for line in config.messages:
        logger.info(line)
    refuse_packed_data(config)
    preflight(config)
    check_empty_or_new(target)
    tokenizer, template = open_tokenizer(config)
    dataset = training_dataset(config, tokenizer, template)
    plan = training_plan(config, dataset)
    logger.info(str(dataset.report))
    logger.info(plan.describe(num_train_epochs=1).splitlines()[0])
    packs = plan.packs(0)
    batch_tokens = config.acceleration.batch_tokens
    write_packed(target, dataset, packs, data_fingerprint_of(config, tokenizer, template), batch_tokens=batch_tokens)
    logger.info(f"wrote {len(packs):,} {'batches' if batch_tokens else 'rows'} to {target}; train on them with")
    logger.info(f"  train_dataset_path: {target}\n  train_dataset_type: packed")
