"""Evaluate a model without training it: `erniekit eval`, and `erniekit train` with `do_train: false`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

from erniekit.build.adapters import AdapterPlan, adapter_plan
from erniekit.build.data import (
    broadcast_dataset_index,
    dp_rank_of,
    evaluation_dataset,
    evaluation_plan,
    reads_data,
)
from erniekit.build.distributed import evaluation_ranks, join_ranks, topology_and_rank
from erniekit.build.model import announce_dense_mask, begin, initial_weights, open_model
from erniekit.build.sources import evaluation_sources
from erniekit.build.speech import codec_of_run
from erniekit.build.tokenizer import speech_of
from erniekit.config import Config
from erniekit.data.templates.ernie import Template
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.distributed.decoder_pipeline import PipelineParallelDecoder
from erniekit.distributed.mesh import Mesh
from erniekit.distributed.topology import Topology
from erniekit.errors import ConfigurationError
from erniekit.export.model_card import TRANSCRIPTS_RECORD
from erniekit.inference.answer_eval import SAMPLES_FILE, GenerationEvaluator, read_samples, worst_transcripts
from erniekit.inference.error_rates import ERROR_RATES
from erniekit.inference.sampling import Sampling
from erniekit.inference.speaking.spoken_answers import SPEECH_FOLDER, SpokenAnswers, SpokenAnswerSettings
from erniekit.model.decoder import Decoder
from erniekit.rewards.rewards import open_rewards
from erniekit.rollouts.prompts import evaluation_prompts
from erniekit.runners.policy import reward_evaluation, texts_of
from erniekit.runners.stages import stage_objectives
from erniekit.terminal import escape_control_characters
from erniekit.training.callbacks.files import EVALUATION_FILE, Results
from erniekit.training.checkpoint.lock import locked
from erniekit.training.collectives import Ranks
from erniekit.training.evaluation import EvaluationResult, ExtraMetrics, evaluate

logger = logging.getLogger(__name__)

SAMPLES_SHOWN = 3
WORST_SHOWN = 5


def run_evaluation(config: Config) -> EvaluationResult:
    """Evaluate the model that `config` names, log its metrics and leave them in `output_dir/eval_results.json`.

    Raises:
        UserError: the configuration, the data, the model or the machine does not allow the evaluation.
    """
    model_config, tokenizer, template = begin(config)
    weights, adapters = initial_weights(config), adapter_plan(config, model_config)
    output_dir = config.output_dir
    topology, rank = topology_and_rank(config, model_config)
    # first, so that no evaluation runs whose metrics cannot be written
    with locked(output_dir) if rank == 0 else nullcontext():
        evaluated = _evaluate_samples if not config.stage.reads_prompts else _evaluate_prompts
        result, ranks, shows_answers = evaluated(config, topology, rank, weights, adapters, tokenizer, template)
        record = {"step": 0, "epoch": 0.0, **result.results(), **_of_transcripts(config, result)}
        covered = f"{result.batches} of {result.batches_available} batches, {result.seconds:.1f} s"
        trained = adapters.folder if adapters else None  # new adapters change nothing
        logger.info(f"evaluation of {trained or weights or 'random weights'} ({covered})")
        for line in metrics_table(result):
            logger.info(line)
        if ranks.is_main_process:
            Results(output_dir).on_evaluate(record)
        if shows_answers and ranks.is_main_process:
            _show_samples(output_dir)
        logger.info(f"results: {output_dir / EVALUATION_FILE}")
    return result


class _Evaluated(NamedTuple):
    """What an evaluation has found, the ranks that took part, and whether there are answers with scores to show."""

    result: EvaluationResult
    ranks: Ranks
    shows_answers: bool


def _evaluate_samples(
    config: Config,
    topology: Topology,
    rank: int,
    weights: Path | None,
    adapters: AdapterPlan | None,
    tokenizer: Tokenizer,
    template: Template | None,
) -> _Evaluated:
    """Evaluate on the samples of files."""
    local_dataset = evaluation_dataset(config, tokenizer, template) if reads_data(config, topology, rank) else None
    mesh = join_ranks(config, topology)
    dataset = broadcast_dataset_index(config, mesh, local_dataset)
    logger.info(str(dataset.report))
    announce_dense_mask(config, evaluation=dataset)
    model = open_model(config, weights, adapters=adapters, mesh=mesh)
    ranks = evaluation_ranks(config, mesh, model)
    generation_evaluator = build_generation_evaluator(config, tokenizer, template, mesh)
    result = evaluate(
        model,
        evaluation_plan(config, dataset, dp_rank_of(config, mesh)),
        stage_objectives(config).evaluation(config, model, ranks, mesh),
        max_batches=config.evaluation.max_evaluate_steps,
        describe_sample=dataset.location,
        extra_metrics=generation_evaluator,
        ranks=ranks,
    )
    return _Evaluated(result, ranks, generation_evaluator is not None)


def _evaluate_prompts(
    config: Config,
    topology: Topology,
    rank: int,
    weights: Path | None,
    adapters: AdapterPlan | None,
    tokenizer: Tokenizer,
    template: Template | None,
) -> _Evaluated:
    """Let the model answer held-out prompts, and score the answers by the rewards."""
    del rank  # every rank reads the prompts
    assert template is not None, "prompts are dialogues"
    held_out = evaluation_prompts(config, tokenizer, template)
    logger.info(str(held_out.report))
    mesh = join_ranks(config, topology)
    model = open_model(config, weights, adapters=adapters, mesh=mesh)
    ranks, dp_rank = evaluation_ranks(config, mesh, model), dp_rank_of(config, mesh)
    rewards = open_rewards(config, scores=ranks.is_main_process)
    try:
        texts = texts_of(config, tokenizer, template)
        result = reward_evaluation(config, held_out, rewards, texts, ranks, dp_rank)(model)
    finally:
        rewards.close()
    return _Evaluated(result, ranks, shows_answers=False)


def _of_transcripts(config: Config, result: EvaluationResult) -> dict[str, Any]:
    """Return what error rates were measured on, for the model card; the run that trained the model may name others."""
    if "wer" not in result.metrics:
        return {}
    sources = [str(source.path) for source in evaluation_sources(config) if source.probability > 0]
    return {TRANSCRIPTS_RECORD: {"eval_dataset_path": sources, "text_normalizer": config.evaluation.text_normalizer}}


def build_generation_evaluator(
    config: Config, tokenizer: Tokenizer, template: Template | None, mesh: Mesh
) -> Callable[[Decoder], ExtraMetrics] | None:
    """Build what answers held-out dialogues, or speaks held-out texts; None where `eval_answers` is 0.

    All ranks answer, the first one writes.

    Raises:
        ConfigurationError: the libraries that score answers are not installed.
    """
    if not config.evaluation.eval_answers:
        return None
    if config.stage.reads_codes:
        return _spoken_answers(config, tokenizer, mesh)
    if template is None:
        return None
    samples = config.output_dir / SAMPLES_FILE if mesh.rank == 0 else Path(os.devnull)
    section = config.evaluation
    generation_evaluator = GenerationEvaluator(
        evaluation_sources(config),
        tokenizer,
        template,
        section.eval_answers,
        samples,
        section.text_normalizer,
        speech_of(config),
    )
    if mesh.topology.pipeline == 1:
        return generation_evaluator
    return lambda model: generation_evaluator(
        cast(Decoder, PipelineParallelDecoder(model, mesh))
    )  # stands in for it where answers are written


def _spoken_answers(config: Config, tokenizer: Tokenizer, mesh: Mesh) -> Callable[[Decoder], ExtraMetrics] | None:
    """Build what speaks held-out texts; None where the layers of the model are divided among ranks."""
    if mesh.topology.pipeline > 1:
        if (metric := config.evaluation.metric_for_best_model) in config.stage.answer_metrics:
            raise ConfigurationError(
                f"{config.origin('metric_for_best_model')}: `metric_for_best_model: {metric}`: texts are not "
                "spoken where pipeline stages divide the model\n  Write eval_loss, or pipeline_parallel_degree: 1."
            )
        logger.warning("no effect: eval_answers, because texts are not spoken where pipeline stages divide the model")
        return None
    section, is_first, seed = config.evaluation, mesh.rank == 0, config.training.seed
    settings = SpokenAnswerSettings(
        section.eval_answers,
        section.speech_judge,
        section.text_normalizer,
        config.output_dir / SAMPLES_FILE if is_first else Path(os.devnull),
        config.output_dir / SPEECH_FOLDER if is_first else None,
        config.output_dir,
        config.speech.prompt_seconds[1],
        config.speech.text_frontend,
        seed,
        config.basic.device,
        config.lora.lora_codebooks or None,
        config.speech.language_probability > 0,
        config.speech.instruct_probability > 0,
        config.speaking,
        Sampling(temperature=0.0, seed=seed),
    )
    dataset = evaluation_dataset(config, tokenizer, None)  # every rank speaks; it is in the cache by now
    return SpokenAnswers(dataset, tokenizer, codec_of_run(config), settings)


def metrics_table(result: EvaluationResult) -> list[str]:
    """Return a table: a row for each metric, a column for all files and, where there are several, for each."""
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
    ratios = ("exact_match", *ERROR_RATES)
    return {
        name.replace("_", " "): f"{value:.1%}" if name in ratios or "accuracy" in name.split("_") else f"{value:,.4g}"
        for name, value in metrics.items()
        if value is not None
    }


def _show_samples(output_dir: Path) -> None:
    worst = worst_transcripts(output_dir, WORST_SHOWN)
    if worst:
        logger.info("the worst transcripts:")
    for sample in worst:
        logger.info(_shown(sample, f"{sample['place']}  (WER {sample['wer']:.1%})"))
    for sample in read_samples(output_dir, SAMPLES_SHOWN):
        if "messages" in sample and not (worst and "wer" in sample):
            question = sample["messages"][-1]["content"] or sample["place"]  # a recording alone has no text
            score = f"WER {sample['wer']:.1%}" if "wer" in sample else f"rougeL {sample['rougeL']:.2f}"
            verdict = "exact" if sample["exact_match"] else score
            logger.info(_shown(sample, question, f"  ({verdict})"))
    logger.info(f"all answers: {output_dir / SAMPLES_FILE}")


def _shown(sample: Mapping[str, Any], question: str, verdict: str = "") -> str:
    answer, expected = (escape_control_characters(sample[name]) for name in ("answer", "expected"))
    return f"> {escape_control_characters(question)}\n  answer:   {answer}{verdict}\n  expected: {expected}"
