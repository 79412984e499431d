"""Evaluation on its own: `erniekit eval`, and `erniekit train` with `do_train: false`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import cast

from erniekit.build.adapters import adapter_plan, starts_from_adapters
from erniekit.build.checks import check_vocabulary
from erniekit.build.data import (
    broadcast_dataset_index,
    dp_rank_of,
    evaluation_dataset,
    evaluation_plan,
    evaluation_sources,
    reads_data,
)
from erniekit.build.distributed import evaluation_ranks, join_ranks, topology_and_rank
from erniekit.build.model import (
    announce_dense_mask,
    initial_weights,
    objective_from,
    open_model,
    open_tokenizer,
    read_model_config,
    select_device,
)
from erniekit.config import Config
from erniekit.data.templates.ernie import Template
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.distributed.decoder_pipeline import PipelineParallelDecoder
from erniekit.distributed.mesh import Mesh
from erniekit.errors import ConfigurationError
from erniekit.export.trained_model import PARAMETERS_FILE, find_trained_model
from erniekit.inference.answer_eval import SAMPLES_FILE, GenerationEvaluator, read_samples
from erniekit.model.decoder import Decoder
from erniekit.terminal import escape_control_characters
from erniekit.training.callbacks.files import EVALUATION_FILE, Results
from erniekit.training.checkpoint.atomic_folder import refuse_damaged
from erniekit.training.checkpoint.lock import locked
from erniekit.training.collectives import Ranks
from erniekit.training.evaluation import EvaluationResult, ExtraMetrics, evaluate
from erniekit.training.objectives.objective import Objective

logger = logging.getLogger(__name__)

SAMPLES_SHOWN = 3


def run_evaluation(config: Config) -> EvaluationResult:
    """Evaluate the model that `config` names, print the figures and leave them in `output_dir/eval_results.json`.

    Raises:
        UserError: anything the user can mend.
    """
    for line in config.messages:
        logger.info(line)
    select_device(config)
    tokenizer, template = open_tokenizer(config)
    model_config = read_model_config(config)
    check_vocabulary(model_config, tokenizer)
    weights, adapters = initial_weights(config), adapter_plan(config, model_config)
    if weights is not None:
        refuse_damaged(weights)
    output_dir = config.output_dir
    topology, rank = topology_and_rank(config, model_config)
    # first: an evaluation whose figures cannot be kept is in vain
    with locked(output_dir) if rank == 0 else nullcontext():
        local_dataset = evaluation_dataset(config, tokenizer, template) if reads_data(config, topology, rank) else None
        mesh = join_ranks(config, topology)
        dataset = broadcast_dataset_index(config, mesh, local_dataset)
        logger.info(str(dataset.report))
        announce_dense_mask(config, [(dataset, config.evaluation.per_device_eval_batch_size)])
        model = open_model(config, weights, adapters=adapters, mesh=mesh)
        ranks = evaluation_ranks(config, mesh, model)
        generation_evaluator = build_generation_evaluator(config, tokenizer, template, output_dir, mesh)
        result = evaluate(
            model,
            evaluation_plan(config, dataset, dp_rank_of(config, mesh)),
            _objective(config, model, ranks, mesh),
            max_batches=config.evaluation.max_evaluate_steps,
            describe_sample=dataset.location,
            extra_metrics=generation_evaluator,
            ranks=ranks,
        )
        record = {"step": 0, "epoch": 0.0, **result.results()}
        covered = f"{result.batches} of {result.batches_available} batches, {result.seconds:.1f} s"
        logger.info(f"evaluation of {adapters.folder if adapters else weights or 'random weights'} ({covered})")
        for line in metrics_table(result):
            logger.info(line)
        if ranks.is_main_process:
            Results(output_dir).on_evaluate(record)
        if generation_evaluator is not None and ranks.is_main_process:
            _show_samples(output_dir)
        logger.info(f"results: {output_dir / EVALUATION_FILE}")
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


def _objective(config: Config, model: Decoder, ranks: Ranks, mesh: Mesh) -> Objective:
    if config.basic.stage != "DPO":
        return objective_from(config)
    from erniekit.runners.dpo import evaluation_objective

    return evaluation_objective(config, model, ranks, mesh)


def _show_samples(output_dir: Path) -> None:
    for sample in read_samples(output_dir, SAMPLES_SHOWN):
        question = escape_control_characters(sample["messages"][-1]["content"])
        verdict = "exact" if sample["exact_match"] else f"rougeL {sample['rougeL']:.2f}"
        logger.info(f"> {question}\n  answer:   {escape_control_characters(sample['answer'])}  ({verdict})")
        logger.info(f"  expected: {escape_control_characters(sample['expected'])}")
    logger.info(f"all answers: {output_dir / SAMPLES_FILE}")


# Which model an evaluation on its own measures, and with which settings. Needs no Paddle.

# defaults of a training, which the configuration that it leaves writes out, and what an evaluation on its own takes
_DEFAULTS = {"max_evaluate_steps": (1, -1), "eval_answers": (0, 100)}
_NO_HUB = ("from_hf_hub=false", "from_aistudio=false", "from_modelscope=false")
_MODEL_PARAMETERS = ("model_name_or_path", "init_from_checkpoint", "lora_path")


def evaluation_config(named: Path, overrides: Sequence[str]) -> Config:
    """What `erniekit eval NAMED` evaluates: the model that a run has left, with the data and settings of the run.

    Args:
        named: the configuration of a run, its output_dir or a checkpoint. Where a word of the command line chooses a
            model, that model is evaluated.

    Raises:
        UserError: the configuration cannot be used, or the run has not left a model.
    """
    file = named / PARAMETERS_FILE if named.is_dir() else named
    if not file.is_file():
        what = (
            f"holds no {PARAMETERS_FILE}, so it says nothing of held-out data" if named.is_dir() else "does not exist"
        )
        raise ConfigurationError(f"{named}: {what}\n  Name the configuration of the run: erniekit eval CONFIG")
    words = ["do_train=false", "do_eval=true", *overrides]
    if any(word.startswith("model_name_or_path=") for word in overrides):  # whose weights are meant, not random ones
        words.insert(0, "continue_training=true")
    if named.is_dir():  # nothing of how that run began is meant
        words = ["resume_from_checkpoint=false", *words]
    config = _load(file, words)
    if named.is_dir():
        words = [*_own_defaults(config), *words]
        config = _load(file, words)
    if any(config.origin(name) == "command line" and config[name] for name in _MODEL_PARAMETERS):
        return config
    # output_dir on the command line is where results go; the model is where the run has left it
    run_config = _load(file, [word for word in words if not word.startswith("output_dir=")])
    trained = find_trained_model(named, run_config)
    if trained.is_adapter:
        other_weights = config.checkpoint.init_from_checkpoint and not starts_from_adapters(config)
        words.append("init_from_checkpoint=")
        if other_weights:
            words += [f"model_name_or_path={trained.base}", "continue_training=true", *_NO_HUB]
        return _load(file, [*words, "lora=true", f"lora_path={trained.folder}"])
    own_weights = config.basic.model_name_or_path if config.basic.continue_training else ""
    start = config.checkpoint.init_from_checkpoint or own_weights
    words += [f"model_name_or_path={trained.folder}", "lora=false", "lora_path=", "continue_training=true"]
    words += [*_NO_HUB, "init_from_checkpoint="]
    if config.stage.needs_reference and not config.dpo.ref_model_name_or_path and start:
        words.append(f"ref_model_name_or_path={start}")
    return _load(file, words)


def _own_defaults(config: Config) -> list[str]:
    """Words for what `config`, as a training has left it, does not say otherwise."""
    names = [name for name, (trainings, _) in _DEFAULTS.items() if config[name] == trainings]
    names = [name for name in names if config.applies(name)]  # plain text has no dialogues to answer
    return [f"{name}={_DEFAULTS[name][1]}" for name in names]


def _load(file: Path, words: Sequence[str]) -> Config:
    """The configuration with words of which the last of a name counts."""
    last = {word.partition("=")[0]: word for word in words}
    return Config.load(file, list(last.values()), verb="train")
