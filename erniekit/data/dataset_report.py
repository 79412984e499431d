"""The counts of records in each file of a dataset, and their text in the log before step 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from erniekit.data.code_reader import SpeechFacts
from erniekit.data.formats.registry import FORMATS, PAIR_KINDS, VERDICT_KINDS
from erniekit.data.formats.unused_fields import UnusedField, describe_unused
from erniekit.data.recording_facts import AudioCounts, duration


@dataclass(frozen=True, slots=True)
class SourceReport:
    """The counts of one source.

    Attributes:
        read: records in the file.
        dropped: records left out because they exceed max_seq_len or max_prompt_len.
        long_prompts: dropped records whose prompt exceeds max_prompt_len even without its older turns.
        truncated: dialogues, or prompts of pairs, that lost their oldest turns to fit.
        split: plain texts cut into several samples to fit.
        split_dialogues: dialogues of which each trained answer is a sample; dropped_answers: such samples left out
            because they exceed max_seq_len, of dialogues of which others are kept.
        plain_control: records whose texts contain something that the tokenizer would read as a control token; it is
            encoded as ordinary text.
        samples: number of training samples.
        tokens, targets: number of positions, and of positions with a label.
        lengths: 50th percentile, 95th percentile and maximum of the sample lengths, in tokens.
        probability: the source's share of the mixture.
        unused_fields: fields of the records that their format does not have.
        skipped: records left out because they are malformed (`on_bad_record: skip`) or train nothing.
        first_skipped: line and problem of the first of them.
        skipped_file: the text file that lists all of them; "" if there are none.
        audio: the recordings of the samples; None if they have none.
        speech: of recordings as codes; None for other sources.
        outside: of these, those whose duration is outside of duration_range.
        repeated_prompts: pairs that have their prompt twice, see `pairs.PairLayout`.
        part: the part of the file that is read, in words; "" if all of it is.
    """

    path: str
    kind: str
    probability: float
    read: int
    dropped: int
    long_prompts: int
    truncated: int
    split: int
    samples: int
    tokens: int
    targets: int
    lengths: tuple[int, int, int]
    unused_fields: tuple[UnusedField, ...]
    skipped: int = 0
    first_skipped: tuple[tuple[int, str], ...] = ()
    skipped_file: str = ""
    split_dialogues: int = 0  # these are absent from folders that an older version packed
    dropped_answers: int = 0
    plain_control: int = 0
    audio: AudioCounts | None = None
    part: str = ""
    speech: SpeechFacts | None = None
    outside: int = 0
    repeated_prompts: int = 0

    @property
    def kept(self) -> int:
        return self.read - self.dropped - self.skipped - self.outside

    @property
    def loses_something(self) -> bool:
        """Whether records are left out or shortened, or fields not used."""
        return bool(self.dropped or self.outside or self.skipped or self.truncated or self.unused_fields)


@dataclass(frozen=True, slots=True)
class DatasetReport:
    sources: tuple[SourceReport, ...]

    @property
    def samples(self) -> int:
        return sum(source.samples for source in self.sources)

    @property
    def tokens(self) -> int:
        return sum(source.tokens for source in self.sources)

    @property
    def targets(self) -> int:
        return sum(source.targets for source in self.sources)

    def __str__(self) -> str:
        return "\n".join(_describe(source) for source in self.sources)


def length_percentiles(lengths: np.ndarray) -> tuple[int, int, int]:
    """Return the 50th and 95th percentile (nearest rank) and the maximum; zeros if there is no sample."""
    if not len(lengths):
        return 0, 0, 0
    middle, high = np.percentile(lengths, (50, 95), method="nearest")
    return int(middle), int(high), int(lengths.max())


def _describe(source: SourceReport) -> str:
    if source.probability == 0:
        return f"{source.path} ({source.kind}): left out, its probability is 0"
    changes = [
        f"{count:,} {what}"
        for count, what in (
            (source.dropped - source.long_prompts, "dropped (longer than max_seq_len)"),
            (source.outside, "dropped (outside of duration_range)"),
            (source.long_prompts, "dropped (their last question is longer than max_prompt_len)"),
            (source.truncated, "shortened by dropping their oldest turns"),
            (source.split, "split into several samples"),
            (source.skipped, "skipped"),
            (source.split_dialogues, "split into a sample for each answer"),
            (source.dropped_answers, "of their answers dropped (longer than max_seq_len)"),
            (source.plain_control, "with control tokens in their texts, read as ordinary text"),
            (source.repeated_prompts, "with their prompt twice (longer than a window of the model's attention)"),
        )
        if count
    ]
    middle, high, longest = source.lengths
    share = f", share {source.probability:.3g}" if source.probability != 1 else ""
    verdicts = source.kind in VERDICT_KINDS
    samples = "pairs" if source.kind in PAIR_KINDS else "answers with a verdict" if verdicts else "samples"
    part = f", {source.part}" if source.part else ""
    lines = [
        f"{source.path} ({source.kind}{share}{part}): {source.read:,} records, {source.kept:,} kept"
        f"{''.join(f', {change}' for change in changes)}",
        f"{_describe_content(source, samples)}; length p50 {middle:,}, p95 {high:,}, longest {longest:,}",
        *([str(source.audio)] if source.audio is not None else []),
        *describe_skipped(source),
        *(describe_unused(FORMATS[source.kind], source.unused_fields) if source.kind in FORMATS else ()),
    ]
    return "\n  ".join(lines)


def _describe_content(source: SourceReport, samples: str) -> str:
    speech = source.speech
    if speech is None:
        return (
            f"{source.samples:,} {samples}, {source.tokens:,} tokens of which {source.targets:,} are targets "
            f"({source.targets / max(1, source.tokens):.0%})"
        )
    alone = f" ({speech.alone:,} recordings have no other of their speaker)" if speech.alone else ""
    return (
        f"{source.samples:,} recordings, {duration(speech.seconds)} of sound, {len(speech.speakers):,} named "
        f"speaker{'s' * (len(speech.speakers) != 1)}{alone}; {source.tokens:,} positions in the first epoch"
    )


def describe_skipped(source: SourceReport) -> list[str]:
    lines = [
        f"skipped {source.path}:{line}: {problem}" if line else f"skipped {problem}"
        for line, problem in source.first_skipped
    ]
    if source.skipped > len(lines):
        lines.append(f"... and {source.skipped - len(lines):,} more")
    return [*lines, f"all skipped records: {source.skipped_file}"] if source.skipped_file else lines
