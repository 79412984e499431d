"""Evaluation on its own: `erniekit eval`, and `erniekit train` with `do_train: false`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import cast

from erniekit.data.template import Template
from erniekit.data.tokenizer import Tokenizer
from erniekit.model.decoder import Decoder
from erniekit.parallel.mesh import Mesh
from erniekit.parallel.staged_decoder import PipelineParallelDecoder
from erniekit.parameters import Config
from erniekit.runners.adapters import adapter_plan
from erniekit.runners.checks import check_vocabulary
from erniekit.runners.data_wiring import evaluation_dataset, evaluation_plan, evaluation_sources
from erniekit.runners.held_out_answers import SAMPLES_FILE, GenerationEvaluator, read_samples
from erniekit.runners.layout import evaluation_ranks, join_ranks, topology_and_rank
from erniekit.runners.reading import broadcast_dataset_index, dp_rank_of, reads_data
from erniekit.runners.wiring import (
    Say,
    announce_dense_mask,
    initial_weights,
    objective_from,
    open_model,
    open_tokenizer,
    read_model_config,
    select_device,
)
from erniekit.terminal import escape_control_characters
from erniekit.training.callbacks.results import EVALUATION_FILE, Results
from erniekit.training.checkpoint_folder import refuse_damaged
from erniekit.training.evaluation import EvaluationResult, ExtraMetrics, evaluate
from erniekit.training.folder_lock import locked
from erniekit.training.objectives import Objective
from erniekit.training.ranks import Ranks

SAMPLES_SHOWN = 3


def run_evaluation(config: Config, say: Say = print) -> EvaluationResult:
    """Evaluate the model that `config` names, print the figures and leave them in `output_dir/eval_results.json`.

    Raises:
        UserError: anything the user can mend.
    """
    for line in config.messages:
        say(line)
    select_device(config, say)
    tokenizer, template = open_tokenizer(config)
    model_config = read_model_config(config)
    check_vocabulary(model_config, tokenizer)
    weights, adapters = initial_weights(config), adapter_plan(config, model_config)
    if weights is not None:
        refuse_damaged(weights)
    output_dir = Path(config.basic.output_dir).expanduser()
    topology, rank = topology_and_rank(config, model_config)
    # first: an evaluation whose figures cannot be kept is in vain
    with locked(output_dir, say) if rank == 0 else nullcontext():
        local_dataset = evaluation_dataset(config, tokenizer, template) if reads_data(config, topology, rank) else None
        mesh = join_ranks(config, topology)
        dataset = broadcast_dataset_index(config, mesh, local_dataset)
        say(str(dataset.report))
        announce_dense_mask(config, [(dataset, config.evaluation.per_device_eval_batch_size)], say)
        model = open_model(config, weights, say, adapters=adapters, mesh=mesh)
        ranks = evaluation_ranks(config, mesh, model)
        generation_evaluator = build_generation_evaluator(config, tokenizer, template, output_dir, mesh)
        result = evaluate(
            model,
            evaluation_plan(config, dataset, dp_rank_of(config, mesh)),
            _objective(config, model, say, ranks, mesh),
            max_batches=config.evaluation.max_evaluate_steps,
            describe_sample=dataset.location,
            extra_metrics=generation_evaluator,
            ranks=ranks,
        )
        record = {"step": 0, "epoch": 0.0, **result.results()}
        covered = f"{result.batches} of {result.batches_available} batches, {result.seconds:.1f} s"
        say(f"evaluation of {adapters.folder if adapters else weights or 'random weights'} ({covered})")
        for line in metrics_table(result):
            say(line)
        if ranks.is_main_process:
            Results(output_dir).on_evaluate(record)
        if generation_evaluator is not None and ranks.is_main_process:
            _show_samples(output_dir, say)
        say(f"results: {output_dir / EVALUATION_FILE}")
    return result


def build_generation_evaluator(
    config: Config, tokenizer: Tokenizer, template: Template | None, output_dir: Path, mesh: Mesh
) -> Callable[[Decoder], ExtraMetrics] | None:
    """What answers held-out dialogues in this run; None where it should not. All ranks answer, the first one writes.

    Raises:
        ConfigurationError: the libraries that score answers are not installed.
    """
    if not config.evaluation.eval_answers or template is None:
        return None
    samples = output_dir / SAMPLES_FILE if mesh.rank == 0 else Path(os.devnull)
    generation_evaluator = GenerationEvaluator(
        evaluation_sources(config), tokenizer, template, config.evaluation.eval_answers, samples
    )
    if mesh.topology.pipeline == 1:
        return generation_evaluator
    return lambda model: generation_evaluator(
        cast(Decoder, PipelineParallelDecoder(model, mesh))
    )  # stands in for it where answers are written


def metrics_table(result: EvaluationResult) -> list[str]:
    """Lines of a table: a row for each figure, a column for all files and, where there are several, for each."""
    columns = {"all" if result.sources else "": result, **result.sources}
    cells = {name: _cells(part) for name, part in columns.items()}
    metrics = list(dict.fromkeys(metric for column in cells.values() for metric in column))
    first = max(len(metric) for metric in metrics)
    lines = [f"  {'':<{first}}  " + "  ".join(f"{name:>{_width(name)}}" for name in cells)] if result.sources else []
    for metric in metrics:
        row = "  ".join(f"{column.get(metric, ''):>{_width(name)}}" for name, column in cells.items())
        lines.append(f"  {metric:<{first}}  {row}")
    return lines


def _width(name: str) -> int:
    return max(10, len(name))


def _cells(result: EvaluationResult) -> dict[str, str]:
    metrics = {"loss": result.loss, "perplexity": result.perplexity, **result.metrics}
    ratios = ("token_accuracy", "reward_accuracy", "exact_match")
    return {
        name.replace("_", " "): f"{value:.1%}" if name in ratios else f"{value:,.4g}"
        for name, value in metrics.items()
        if value is not None
    }


def _objective(config: Config, model: Decoder, say: Say, ranks: Ranks, mesh: Mesh) -> Objective:
    if config.basic.stage != "DPO":
        return objective_from(config)
    from erniekit.runners.dpo import evaluation_objective

    return evaluation_objective(config, model, say, ranks, mesh)


def _show_samples(output_dir: Path, say: Say) -> None:
    for sample in read_samples(output_dir, SAMPLES_SHOWN):
        question = escape_control_characters(sample["messages"][-1]["content"])
        verdict = "exact" if sample["exact_match"] else f"rougeL {sample['rougeL']:.2f}"
        say(f"> {question}\n  answer:   {escape_control_characters(sample['answer'])}  ({verdict})")
        say(f"  expected: {escape_control_characters(sample['expected'])}")
    say(f"all answers: {output_dir / SAMPLES_FILE}")
