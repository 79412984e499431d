"""Open the samples of all sources: from the disk cache, into which they are tokenised on first use, or from packs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from erniekit.data.alignment_facts import AlignmentFiles
from erniekit.data.cache_key import cache_key, cache_name, is_current, unreadable
from erniekit.data.code_reader import SPEECH
from erniekit.data.conversation import Source, check_probabilities
from erniekit.data.dataset import Dataset
from erniekit.data.dataset_report import describe_skipped
from erniekit.data.drawing import Drawing
from erniekit.data.encode import MIN_SCORE_DIFFERENCE
from erniekit.data.formats.problems import ProblemList, RecordProblem, SkippedRecords, SourceProblems
from erniekit.data.formats.registry import BRANCHED_KINDS, FORMATS, VERDICT_KINDS
from erniekit.data.formats.unused_fields import UnusedField, UnusedFields
from erniekit.data.media.clip import AudioInputs
from erniekit.data.packed import DataFingerprint, open_packed
from erniekit.data.recording_facts import RecordingFacts, recordings_unchanged, sound_digest
from erniekit.data.speech_samples import SpeechIndex, SpeechSettings
from erniekit.data.templates.ernie import IGNORE_INDEX, Template
from erniekit.data.token_cache import MANIFEST, Metadata, TokenArrays, TokenWriter, open_or_build
from erniekit.data.tokenize import RecordCounts, TokenizationSettings, tokenise
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.data.units import ALIGNED_UNITS, CODES
from erniekit.errors import DataError
from erniekit.progress import Progress, lines_of

SKIPPED_FILE = "skipped.txt"
WORDS_DIGEST = "words"  # of the metadata of aligned units: what their words and tokens are, wherever they lie


def open_dataset(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    template: Template | None,
    *,
    max_seq_len: int,
    over_length: str = "drop",
    cache_dir: str | Path,
    max_prompt_len: int | None = None,
    needs_scores: bool = False,
    on_bad_record: str = "stop",
    split_multi_turn: bool | None = None,
    audio: AudioInputs | None = None,
    drawing: Drawing | None = None,
    speech: SpeechSettings | None = None,
    scored: bool = False,
    pair_window: int | None = None,
) -> Dataset:
    """Open the tokenised samples of all sources; tokenise what is not in the cache, one block at a time.

    Args:
        template: renders dialogues; may be None if all sources are of kind `text`.
        max_seq_len: the longest sample, in positions.
        over_length: what to do with longer dialogues: "drop" them, "truncate_turns" (oldest first; a dialogue whose
            last round is still too long is dropped), or "error". Plain texts are split in any case.
        cache_dir: contains a folder for each source's tokens, named by the file's content, its kind, the tokenizer,
            the template, max_seq_len and over_length, for pairs max_prompt_len, and where the model has an audio
            encoder what that takes and where the recordings lie.
        max_prompt_len: the longest prompt of a pair; a longer one loses its oldest turns. None: no limit.
        needs_scores: every pair must have scores, and the chosen answer the higher one.
        on_bad_record: what a malformed record does: "stop" the run, or "skip" the record. Records that train nothing
            (an empty answer, a pair of equal answers) are always skipped.
        split_multi_turn: see templates.samples.render_samples.
        audio: what the model's audio encoder takes; None: it has none, and records with recordings are problems.
        drawing: how the records of a kind become samples that differ from epoch to epoch; None: none do.
        speech: what recordings as codes must be like; None: there are none.
        scored: answers of pairs are read whole and scored, see `pairs.join_scored`.
        pair_window: longer pairs have their prompt twice, see `pairs.PairLayout`; None: none do.

    Raises:
        DataError: a record of any source is malformed (the first 20 are shown, all are counted), probabilities
            cannot be used, no sample is left to train on, or the cache folder cannot be written.
    """
    check_probabilities([source.probability for source in sources])
    settings = TokenizationSettings(
        tokenizer,
        template,
        max_seq_len,
        over_length,
        max_prompt_len,
        needs_scores,
        on_bad_record=on_bad_record,
        split_multi_turn=split_multi_turn,
        audio=audio,
        drawing=drawing,
        speech=speech,
        scored=scored,
        pair_window=pair_window,
    )
    problems = ProblemList()
    arrays = []
    fingerprint = hashlib.blake2b(digest_size=8)
    for source in sources:
        if source.probability == 0:
            arrays.append(_no_samples())
            continue
        if (problem := unreadable(source)) is not None:
            problems.add(problem)
            continue
        try:
            key = cache_key(source, settings)
        except OSError as error:
            problems.add(RecordProblem(str(source.path), 0, "file", "a readable file", error.strerror or str(error)))
            continue
        fingerprint.update(repr((key, source.probability)).encode())
        folder = Path(cache_dir) / cache_name(key, source, settings)
        try:
            build = _builder(source, settings, problems)
            tokens = open_or_build(folder, build, partial(is_current, settings, folder))
        except _SourceSkippedError:
            continue
        fingerprint.update(sound_digest(tokens.metadata).encode())
        if drawing is not None and source.kind == drawing.kind:
            fingerprint.update(repr((_content_digest(tokens.metadata), drawing.fingerprint)).encode())
        if tokens.metadata.get("skipped"):
            tokens.metadata["skipped_file"] = str(folder / SKIPPED_FILE)
        arrays.append(tokens)
    problems.raise_if_any()
    pairs = any(source.kind in BRANCHED_KINDS for source in sources)
    dataset = Dataset(
        sources,
        arrays,
        pad_id=tokenizer.pad_id,
        fingerprint=fingerprint.hexdigest(),
        pairs=pairs,
        verdicts=any(source.kind in VERDICT_KINDS for source in sources),
        audio=audio,
        drawing=drawing,
    )
    _check_split(dataset)
    for report in dataset.report.sources:
        if report.part and not report.read:
            continue
        if report.probability and not report.samples and report.skipped == report.read:
            none = f"{report.path}: none of its {report.read:,} records trains anything"
            raise DataError("\n".join([*describe_skipped(report), none]))
        if report.probability and not report.samples and report.outside == report.read:
            raise DataError(
                f"{report.path}: none of its {report.read:,} recordings has a duration within duration_range\n"
                "  Write a wider one, or remove the file."
            )
        if report.probability and not report.samples:
            prompts_too_long = report.long_prompts == report.dropped
            limit = f"max_prompt_len {max_prompt_len:,}" if prompts_too_long else f"max_seq_len {max_seq_len:,}"
            raise DataError(
                f"{report.path}: none of its {report.read:,} records fits {limit}; "
                f"raise {limit.split()[0]}, or remove the file"
            )
    return dataset


def open_packed_dataset(
    folder: Path,
    data_fingerprint: DataFingerprint,
    *,
    max_seq_len: int,
    pad_id: int,
    needs_scores: bool = False,
    audio: AudioInputs | None = None,
    pair_window: int | None = None,
) -> Dataset:
    """Open the dataset of a folder that `erniekit pack` wrote.

    Args:
        needs_scores, audio, pair_window: as for `open_dataset`.

    Raises:
        DataError: see packed.open_packed; or a pair has no scores or shares a prompt that it must have twice, or a
            recording has changed.
    """
    arrays, packed = open_packed(folder, data_fingerprint, max_seq_len)
    if pair_window is not None and arrays.has_shared_prompts_beyond(pair_window):
        raise DataError(
            f"{folder}: holds pairs of more than {pair_window:,} tokens whose answers share their prompt; layers of "
            "this model attend to a window of so many, and would hide a part of the prompt from the rejected answer\n"
            "  Pack the data again for this model: such pairs then have their prompt twice."
        )
    fingerprint = hashlib.blake2b((folder / MANIFEST).read_bytes(), digest_size=8).hexdigest()
    source = Source(folder, "packed")
    dataset = Dataset(
        [source],
        [arrays],
        pad_id=pad_id,
        fingerprint=fingerprint,
        pairs=data_fingerprint.pairs or data_fingerprint.verdicts,
        verdicts=data_fingerprint.verdicts,
        packed=packed,
        audio=audio,
    )
    if not recordings_unchanged(arrays):
        raise DataError(f"{folder}: its recordings have been changed, moved or removed\n  Pack the data again.")
    if needs_scores:
        invalid = np.flatnonzero(~(arrays.score_differences >= MIN_SCORE_DIFFERENCE))  # NaN for pairs without scores
        if len(invalid):
            raise DataError(
                f"{folder}: {len(invalid):,} of its {len(arrays.lines):,} pairs have no scores in which the chosen "
                f"answer's is the higher (offset_alpha needs them), first {dataset.location(int(invalid[0]))}\n"
                "  Fix these records and pack the data again."
            )
    return dataset


class _SourceSkippedError(Exception):
    """Raised for a source with problems: its half-built cache is discarded, and the other sources are still read."""


def _builder(
    source: Source, settings: TokenizationSettings, problems: ProblemList
) -> Callable[[TokenWriter], Metadata]:
    def build(writer: TokenWriter) -> Metadata:
        problems_before = problems.total
        speech = SpeechIndex(source.path) if source.kind == CODES else None
        counts, unused, targets = RecordCounts(), UnusedFields(FORMATS[source.kind]), 0
        skipped = SkippedRecords(writer.folder / SKIPPED_FILE, source.path)
        recordings = RecordingFacts(settings.audio.sampling_rate if settings.audio else 1)
        own_problems = SourceProblems(problems, skipped, settings.skips_bad_records)
        alignments, words = AlignmentFiles(), hashlib.blake2b(digest_size=8)
        path = Path(source.path)
        tokenising = Progress(f"tokenising {path.name}", partial(lines_of, path))
        try:
            for samples, lines in tokenise(
                source, settings, counts, unused, own_problems, files=alignments, speech=speech
            ):
                tokenising.advance(counts.read - tokenising.done)
                if problems.total == problems_before:  # after a problem, only look for further problems
                    writer.append(samples, lines)
                    targets += sum(int(np.count_nonzero(sample.labels != IGNORE_INDEX)) for sample in samples)
                    recordings.add([clip for sample in samples for clip in sample.clips])
                    for sample in samples:
                        if sample.words is not None:
                            words.update(sample.words.tobytes() + sample.input_ids.tobytes())
        finally:
            tokenising.close()
            skipped.close()
        if problems.total > problems_before:
            raise _SourceSkippedError
        counts.skipped = skipped.count
        metadata = _build_metadata(counts, targets, unused.found())
        aligned = {WORDS_DIGEST: words.hexdigest()} if source.kind == ALIGNED_UNITS else {}
        spoken = {} if speech is None or settings.speech is None else speech.metadata(settings.speech)
        own = {**recordings.metadata(), **alignments.write(writer.folder), **aligned, **spoken}
        return {**metadata, "skipped": skipped.first, **own}

    return build


def _build_metadata(counts: RecordCounts, targets: int, unused: list[UnusedField]) -> Metadata:
    return {"counts": {**asdict(counts), "targets": targets}, "unused_fields": unused}


def _content_digest(metadata: Metadata) -> str:
    """Return what changes with the content of records from which samples are drawn, wherever they lie."""
    return str(metadata[SPEECH]["digest"] if SPEECH in metadata else metadata[WORDS_DIGEST])


def _check_split(dataset: Dataset) -> None:
    """Raise DataError if a part of the records is empty: no training file may be, nor the held-out ones together."""
    reports = [report for report in dataset.report.sources if report.probability]
    splits = [source.split for source in dataset.sources if source.split is not None]
    empty = [report.path for report in reports if report.part and not report.read]
    if not splits or not empty or (splits[0].held_out and len(empty) < len(reports)):
        return
    fraction = splits[0].fraction
    if splits[0].held_out:
        raise DataError(
            f"eval_split {fraction:g}: of {', '.join(empty)} it holds out no record, because there are too few\n"
            "  Write a larger fraction, or name held-out files as eval_dataset_path."
        )
    raise DataError(f"eval_split {fraction:g}: it leaves no record of {empty[0]} to train on\n  Write a smaller one.")


def _no_samples() -> TokenArrays:
    tokens = np.empty(0, np.int32)
    return TokenArrays(tokens, tokens, np.zeros(1, np.int64), tokens, _build_metadata(RecordCounts(), 0, []))
