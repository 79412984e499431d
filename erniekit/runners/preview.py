"""Show the data of a run: the first samples as the model sees them, and how records are read and packed."""

from __future__ import annotations

from typing import Any

from erniekit.build.checks import check_dense_mask, dense_mask_size, refuse_sampled_data
from erniekit.build.data import (
    DataParallelRank,
    audio_of_model,
    count_steps,
    evaluation_dataset,
    evaluation_plan,
    has_evaluation_data,
    training_dataset,
    training_plan,
)
from erniekit.build.model import open_tokenizer
from erniekit.build.preflight import preflight
from erniekit.build.sources import evaluation_sources, training_sources
from erniekit.config import Config
from erniekit.data.batch import Batch
from erniekit.data.dataset import Dataset
from erniekit.data.recording_report import RecordingReport, check_recordings
from erniekit.data.sampler import StepPlan
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.errors import DataError
from erniekit.rollouts.prompts import PromptPlan, evaluation_prompts, training_prompts
from erniekit.runners.policy import sizes_and_steps
from erniekit.runners.preview_rows import Part, PreviewedRow, previewed_rows
from erniekit.training.optim.schedules import check_schedule_fits

# A batch as text: what the model reads, and which of it the model is trained to say.

TRAINED, REJECTED = "\x1b[1;32m", "\x1b[1;31m"  # green, red
READ, HEADING, RESET = "\x1b[2m", "\x1b[1m", "\x1b[0m"


def render_batch(
    batch: Batch, tokenizer: Tokenizer, dataset: Dataset, *, rows: int = 1, documents: int = 8, color: bool = False
) -> str:
    """The first documents of the first rows.

    Trained text is green (of a rejected answer red), or stands in [[ ]] without colour. Where a label differs from the
    token that is read next, both are shown, the label first: `[[</s>]]<|end_of_sentence|>`.

    Args:
        rows, documents: how many rows, and how many documents of each row, to show.
    """
    what = "documents" if batch.pairs is None else "answers" if dataset.verdicts else "pairs"
    lines = [_legend(what, color)]
    for number, row in enumerate(previewed_rows(batch, tokenizer, dataset, rows=rows, documents=documents)):
        lines += ["", *_row_lines(number, row, color)]
    return "\n".join(lines)


def _row_lines(number: int, row: PreviewedRow, color: bool) -> list[str]:
    heading = f"row {number}: {row.total} {row.what}, {row.positions:,} positions"
    lines = [_styled(heading + (f", {row.padding:,} padding" if row.padding else ""), HEADING, color)]
    for place, document in enumerate(row.documents):
        targets = " + ".join(f"{count:,}" for count in document.targets)
        positions = f"positions {document.start:,}-{document.end - 1:,}, {targets} targets"
        heading = f"--- {row.what[:-1]} {place}: {document.location}, {positions}"
        lines += [_styled(heading, HEADING, color), *(_part_line(part, color) for part in document.parts)]
    if row.total > len(row.documents):
        lines.append(_styled(f"--- and {row.total - len(row.documents)} more {row.what}", HEADING, color))
    return lines


def _part_line(part: Part, color: bool) -> str:
    name = _styled(f"{part.name}: ", HEADING, color) if part.name else ""
    style = REJECTED if part.name in ("rejected", "undesirable") else TRAINED
    return name + "".join(_shown(text, trained, color, style) for trained, text in part.stretches)


def _legend(what: str, color: bool) -> str:
    if not color:
        return "[[trained text]], what is only read"
    if what == "pairs":
        return "chosen answers are green, rejected ones red, what is only read is dim"
    if what == "answers":
        return "desirable answers are green, undesirable ones red, what is only read is dim"
    return "trained text is green, what is only read is dim"


def _shown(text: str, trained: bool, color: bool, trained_style: str = TRAINED) -> str:
    """A stretch of text, marked where it is trained."""
    if color:
        return _styled(text, trained_style if trained else READ, color)
    return f"[[{text}]]" if trained else text


def _styled(text: str, style: str, color: bool) -> str:
    return f"{style}{text}{RESET}" if color else text


def preview(config: Config, *, rows: int = 1, documents: int = 8, color: bool = False) -> str:
    """The first documents of the first training step, token by token where they are trained and where not.

    The counts of the files follow if a record or a field of them is left out.

    Raises:
        UserError: the tokenizer or the data cannot be used.
    """
    tokenizer, dataset, plan = _opened(config)
    shown = []
    for batch in plan.micro_batches(0):
        if rows > 0:
            shown.append(render_batch(batch, tokenizer, dataset, rows=rows, documents=documents, color=color))
            rows -= len(batch.samples)
    if any(source.loses_something for source in dataset.report.sources):
        shown.append(str(dataset.report))
    shown.append(plan.describe(config.training.max_steps, config.training.num_train_epochs))
    return "\n\n".join(shown)


def preview_data(config: Config, *, rows: int = 1, documents: int = 8) -> dict[str, Any]:
    """What `preview` shows, as JSON holds it: `rows` of documents with their parts, `report` and `plan` as text.

    Raises:
        UserError: the tokenizer or the data cannot be used.
    """
    tokenizer, dataset, plan = _opened(config)
    shown: list[PreviewedRow] = []
    for batch in plan.micro_batches(0):
        if len(shown) == rows:
            break
        shown += previewed_rows(batch, tokenizer, dataset, rows=rows - len(shown), documents=documents)
    return {
        "rows": [_row_data(row) for row in shown],
        "report": str(dataset.report),
        "plan": plan.describe(config.training.max_steps, config.training.num_train_epochs),
    }


def _row_data(row: PreviewedRow) -> dict[str, Any]:
    documents = []
    for document in row.documents:
        parts = [{"name": name, "stretches": [each._asdict() for each in own]} for name, own in document.parts]
        documents.append({**document._asdict(), "parts": parts})
    return {**row._asdict(), "documents": documents}


def _opened(config: Config) -> tuple[Tokenizer, Dataset, StepPlan]:
    refuse_sampled_data(config, "there are no packs to show\n  A run keeps its answers in rollouts.jsonl.")
    preflight(config)
    tokenizer, template = open_tokenizer(config)
    dataset = training_dataset(config, tokenizer, template)
    return tokenizer, dataset, training_plan(config, dataset)


def data_summary(config: Config, dp_world_size: int = 1) -> str:
    """Counts of every data file that the configuration reads, packing, and the exact number of steps.

    All recordings are decoded, to name those that are silent, overloaded, broken off or too long.

    What only the data can tell is checked: whether the schedule fits the steps, and a dense mask into memory.

    Args:
        dp_world_size: how many ranks divide every batch.

    Raises:
        UserError: the tokenizer or the data cannot be used.
    """
    if config.stage.reads_prompts:
        return _prompts_summary(config, dp_world_size)
    heard = _listen(config)
    summary, errors = "", []
    try:
        summary = _opened_summary(config, dp_world_size)
    except DataError as error:
        errors.append(str(error))
    try:
        heard.damaged.raise_if_any()
    except DataError as error:
        errors.append(str(error))
    if errors:
        raise DataError("\n".join([*errors, *heard.lines()]))
    return "\n".join([summary, *heard.lines()])


def _prompts_summary(config: Config, dp_world_size: int) -> str:
    """Return the counts of the prompts of each part of the data, and the steps that they make."""
    tokenizer, template = open_tokenizer(config)
    assert template is not None, "prompts are dialogues"
    lines: list[str] = []
    if _reads_training(config):
        dataset = training_prompts(config, tokenizer, template)
        sizes, steps = sizes_and_steps(config, PromptPlan(config, dataset), dp_world_size)
        of_rollout = f"{sizes.prompts:,} prompts x {sizes.group:,} answers, for {sizes.steps:,} steps"
        lines += [str(dataset.report), f"a rollout: {of_rollout}; the run: {steps:,} steps"]
    if _reads_evaluation(config):
        lines.append(f"evaluation: {evaluation_prompts(config, tokenizer, template).report}")
    return "\n".join(lines)


def _listen(config: Config) -> RecordingReport:
    """Decode all recordings of the data."""
    audio = audio_of_model(config)
    if audio is None:
        return RecordingReport()
    sources = training_sources(config) if _reads_training(config) else []
    sources += evaluation_sources(config) if _reads_evaluation(config) else []
    files = [source for source in sources if source.kind != "packed"]
    return check_recordings(files, audio, config.training.max_seq_len)


def _reads_training(config: Config) -> bool:
    return config.basic.do_train or config.verb == "preview"


def _reads_evaluation(config: Config) -> bool:
    return config.basic.do_eval and has_evaluation_data(config)


def _opened_summary(config: Config, dp_world_size: int) -> str:
    tokenizer, template = open_tokenizer(config)
    blocks: list[str] = []
    dataset = held_out = None
    if _reads_training(config):
        dataset = training_dataset(config, tokenizer, template)
        plan = training_plan(config, dataset, DataParallelRank(dp_world_size=dp_world_size))
        check_schedule_fits(config.training, count_steps(config, plan))
        blocks += [str(dataset.report), plan.describe(config.training.max_steps, config.training.num_train_epochs)]
    if _reads_evaluation(config):
        held_out = evaluation_dataset(config, tokenizer, template)
        batches = evaluation_plan(config, held_out).steps_in_epoch(0)
        blocks.append(f"{held_out.report}\nevaluation: {batches:,} batches")
    if config.uses_dense_mask and config.verb == "train" and (dataset or held_out):
        check_dense_mask(dense_mask_size(config, dataset, held_out), config.training.max_seq_len)
    return "\n".join(blocks)


def longest_sample(config: Config) -> int | None:
    """The tokens of the longest training sample; None where the run reads no training data.

    Raises:
        UserError: the tokenizer or the data cannot be used.
    """
    if config.stage.reads_prompts:
        return None
    if not config.basic.do_train:
        return None
    return int(training_dataset(config, *open_tokenizer(config)).longest.max())
