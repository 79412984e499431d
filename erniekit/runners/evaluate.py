"""Evaluation on its own: `erniekit train` with `do_train: false`."""

from __future__ import annotations

from pathlib import Path

from erniekit.parameters import Config
from erniekit.runners.adapters import adapter_plan
from erniekit.runners.checks import check_vocabulary
from erniekit.runners.wiring import (
    Say,
    announce_dense_mask,
    evaluation_dataset,
    evaluation_plan,
    first_weights,
    objective_from,
    open_model,
    open_tokenizer,
    read_model_config,
    select_device,
)
from erniekit.training.callbacks.plain_lines import PlainLines
from erniekit.training.callbacks.results import Results
from erniekit.training.checkpoint_folder import locked, refuse_damaged
from erniekit.training.evaluation import EvaluationResult, evaluate


def run_evaluation(config: Config, say: Say = print) -> EvaluationResult:
    """Evaluate the model as it is, print the figures and leave them in `output_dir/eval_results.json`.

    Raises:
        UserError: anything the user can mend.
    """
    for line in config.messages:
        say(line)
    select_device(config, say)
    tokenizer, template = open_tokenizer(config)
    model_config = read_model_config(config)
    check_vocabulary(model_config, tokenizer)
    weights, adapters = first_weights(config), adapter_plan(config, model_config)
    if weights is not None:
        refuse_damaged(weights)
    output_dir = Path(config.basic.output_dir).expanduser()
    with locked(output_dir):  # first: an evaluation whose figures cannot be kept is in vain
        dataset = evaluation_dataset(config, tokenizer, template)
        say(str(dataset.report))
        announce_dense_mask(config, [(dataset, config.evaluation.per_device_eval_batch_size)], say)
        model = open_model(config, weights, say, adapters=adapters)
        result = evaluate(
            model,
            evaluation_plan(config, dataset),
            objective_from(config),
            max_batches=config.evaluation.max_evaluate_steps,
            describe_sample=dataset.location,
        )
        record = {"step": 0, "epoch": 0.0, **result.record()}
        PlainLines(say).on_evaluate(record)
        Results(output_dir).on_evaluate(record)
    return result
