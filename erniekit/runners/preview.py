"""Show the data of a run: the first samples as the model sees them, and how records are read and packed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby

from erniekit.build.checks import check_dense_mask, dense_mask_size
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
from erniekit.data.ar_nar_codes import ArNarCodes
from erniekit.data.batch import Batch
from erniekit.data.dataset import Dataset
from erniekit.data.masked_codes import MaskedCodes
from erniekit.data.media.clip import PlacedClip
from erniekit.data.media.errors import describe_clip
from erniekit.data.recording_report import RecordingReport, check_recordings
from erniekit.data.templates.ernie import IGNORE_INDEX
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.errors import DataError
from erniekit.runners.preview_codes import stretches
from erniekit.terminal import escape_control_characters
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
    what = "documents" if batch.pairs is None else "pairs"
    lines = [_legend(what, color)]
    for row in range(min(rows, len(batch.input_ids))):
        spans = list(_documents(batch, row) if batch.pairs is None else _pairs(batch, row, dataset))
        filled = spans[-1][1] if spans else 0
        ends = list(accumulate(int(dataset.lengths[index]) for index in batch.samples[row]))  # one may be a pack
        padding = batch.input_ids.shape[1] - filled
        heading = f"row {row}: {len(spans)} {what}, {filled:,} positions" + (
            f", {padding:,} padding" if padding else ""
        )
        lines += ["", _styled(heading, HEADING, color)]
        for number, (start, end) in enumerate(spans[:documents]):
            index = batch.samples[row][bisect_right(ends, start)]
            pair = dataset.sample(index).pair
            parts = [slice(start, end)]
            if pair is not None:
                parts = [slice(start + pair.chosen, start + pair.rejected), slice(start + pair.rejected, end)]
            targets = " + ".join(f"{_targets(batch, row, part):,}" for part in parts)
            location = escape_control_characters(dataset.location(index))
            heading = f"--- {what[:-1]} {number}: {location}, positions {start:,}-{end - 1:,}, {targets}"
            lines.append(_styled(f"{heading} targets", HEADING, color))
            spoken = _decoder(tokenizer, dataset, dataset.sample(index).clips)
            if batch.codes_view is not None:
                assert isinstance(dataset.drawing, MaskedCodes | ArNarCodes), "which make batches of codes"
                pieces = stretches(batch, row, start, end, spoken, dataset.drawing)
                lines.append("".join(_shown(text, trained, color) for trained, text in pieces))
            elif pair is None:
                lines.append(_document(batch, spoken, row, start, end, color))
            else:
                lines += _pair(batch, spoken, row, start, parts, color)
        if len(spans) > documents:
            lines.append(_styled(f"--- and {len(spans) - documents} more {what}", HEADING, color))
    return "\n".join(lines)


def _targets(batch: Batch, row: int, part: slice) -> int:
    """The number of labels of some positions."""
    view = batch.codes_view
    of_codes = 0 if view is None else int((view.labels[row, part] != IGNORE_INDEX).sum())
    return int((batch.labels[row, part] != IGNORE_INDEX).sum()) + of_codes


def _legend(what: str, color: bool) -> str:
    if not color:
        return "[[trained text]], what is only read"
    if what == "pairs":
        return "chosen answers are green, rejected ones red, what is only read is dim"
    return "trained text is green, what is only read is dim"


def _decoder(tokenizer: Tokenizer, dataset: Dataset, clips: Sequence[PlacedClip]) -> Callable[[list[int]], str]:
    """A function that decodes the tokens of a sample from left to right: all placeholders of a clip become its name."""
    left = iter(clips)
    audio = dataset.audio

    def decode(tokens: list[int]) -> str:
        parts = []
        for sound, own in groupby(tokens, key=lambda token: audio is not None and token == audio.placeholder_id):
            run = list(own)
            if not sound or audio is None:
                parts.append(tokenizer.decode(run, skip_special_tokens=False))
                continue
            count = 0
            while count < len(run):
                clip = next(left)
                count += clip.tokens
                seconds = clip.length / audio.sampling_rate
                parts.append(f"<audio {describe_clip(clip.clip)}: {seconds:.2f} s, {clip.tokens:,} tokens>")
        return escape_control_characters("".join(parts))

    return decode


def _pair(
    batch: Batch, decode: Callable[[list[int]], str], row: int, start: int, answers: list[slice], color: bool
) -> list[str]:
    """The prompt, as both answers read it, and each answer behind its name."""
    prompt = batch.input_ids[row, start : answers[0].start + 1].tolist()
    lines = [_styled(decode(prompt), READ, color)]
    for name, part, style in zip(("chosen", "rejected"), answers, (TRAINED, REJECTED), strict=True):
        answer = _document(batch, decode, row, part.start, part.stop, color, beginning=False, trained_style=style)
        lines.append(_styled(f"{name}: ", HEADING, color) + answer)
    return lines


def _documents(batch: Batch, row: int) -> Iterator[tuple[int, int]]:
    """First position and end of each document, read from the attention indices, so that they are seen as they act."""
    ends = batch.startend_row_indices[row, 0, :, 0]
    start = 0
    while start < len(ends) and ends[start] > start:
        yield start, int(ends[start])
        start = int(ends[start])


def _pairs(batch: Batch, row: int, dataset: Dataset) -> Iterator[tuple[int, int]]:
    """First position and end of each pair."""
    start = 0
    for index in batch.samples[row]:
        end = start + int(dataset.lengths[index])
        yield start, end
        start = end


def _document(
    batch: Batch,
    decode: Callable[[list[int]], str],
    row: int,
    start: int,
    end: int,
    color: bool,
    *,
    beginning: bool = True,
    trained_style: str = TRAINED,
) -> str:
    parts = []
    for trained, tokens in groupby(_tokens(batch, row, start, end, beginning), key=lambda pair: pair[0]):
        parts.append(_shown(decode([token for _, token in tokens]), trained, color, trained_style))
    return "".join(parts)


def _shown(text: str, trained: bool, color: bool, trained_style: str = TRAINED) -> str:
    """A stretch of text, marked where it is trained."""
    if color:
        return _styled(text, trained_style if trained else READ, color)
    return f"[[{text}]]" if trained else text


def _tokens(batch: Batch, row: int, start: int, end: int, beginning: bool) -> Iterator[tuple[bool, int]]:
    """(trained, token id) in reading order: each position's label, and the next token where it is not the same.

    `beginning`: with the first token, for which there is no label.
    """
    if beginning:
        yield False, int(batch.input_ids[row, start])
    for position in range(start, end):
        label = int(batch.labels[row, position])
        following = int(batch.input_ids[row, position + 1]) if position + 1 < end else None
        if label != IGNORE_INDEX:
            yield True, label
        if following is not None and following != label:
            yield False, following


def _styled(text: str, style: str, color: bool) -> str:
    return f"{style}{text}{RESET}" if color else text


def preview(config: Config, *, rows: int = 1, documents: int = 8, color: bool = False) -> str:
    """The first documents of the first training step, token by token where they are trained and where not.

    The counts of the files follow if a record or a field of them is left out.

    Raises:
        UserError: the tokenizer or the data cannot be used.
    """
    preflight(config)
    tokenizer, template = open_tokenizer(config)
    dataset = training_dataset(config, tokenizer, template)
    plan = training_plan(config, dataset)
    shown = []
    for batch in plan.micro_batches(0):
        if rows > 0:
            shown.append(render_batch(batch, tokenizer, dataset, rows=rows, documents=documents, color=color))
            rows -= len(batch.samples)
    if any(source.loses_something for source in dataset.report.sources):
        shown.append(str(dataset.report))
    shown.append(plan.describe(config.training.max_steps, config.training.num_train_epochs))
    return "\n\n".join(shown)


def data_summary(config: Config, dp_world_size: int = 1) -> str:
    """Counts of every data file that the configuration reads, packing, and the exact number of steps.

    All recordings are decoded, to name those that are silent, overloaded, broken off or too long.

    What only the data can tell is checked: whether the schedule fits the steps, and a dense mask into memory.

    Args:
        dp_world_size: how many ranks divide every batch.

    Raises:
        UserError: the tokenizer or the data cannot be used.
    """
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
    if not config.basic.do_train:
        return None
    return int(training_dataset(config, *open_tokenizer(config)).longest.max())
