"""What became of the records of each file, as numbers and as the text printed before step 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from erniekit.data.fields import UnusedField, describe_unused
from erniekit.data.preference_records import PREFERENCE_KINDS


@dataclass(frozen=True, slots=True)
class SourceReport:
    """The counts of one source.

    Attributes:
        read: records in the file.
        dropped: records left out because they are longer than max_seq_len, or the next.
        long_prompts: those among the dropped whose prompt exceeds max_prompt_len even without its older turns.
        truncated: dialogues, or prompts of pairs, that lost their oldest turns for such a reason.
        split: plain texts cut into several samples for that reason.
        samples: what is there to train on.
        tokens, targets: positions, and those among them with a label.
        lengths: the 50th and 95th percentile and the maximum of the sample lengths, in tokens.
        probability: the source's share of the mixture.
        unused_fields: what the records have beside the fields of their format.
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

    @property
    def kept(self) -> int:
        return self.read - self.dropped


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
    """The 50th and 95th percentile (nearest rank) and the maximum; zeros where there is no sample."""
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
            (source.long_prompts, "dropped (their last question is longer than max_prompt_len)"),
            (source.truncated, "shortened by their oldest turns"),
            (source.split, "split into several samples"),
        )
        if count
    ]
    middle, high, longest = source.lengths
    share = f", share {source.probability:.3g}" if source.probability != 1 else ""
    samples = "pairs" if source.kind in PREFERENCE_KINDS else "samples"
    lines = [
        f"{source.path} ({source.kind}{share}): {source.read:,} records, {source.kept:,} kept"
        f"{''.join(f', {change}' for change in changes)}",
        f"{source.samples:,} {samples}, {source.tokens:,} tokens of which {source.targets:,} are targets "
        f"({source.targets / max(1, source.tokens):.0%}); length p50 {middle:,}, p95 {high:,}, longest {longest:,}",
        *describe_unused(source.kind, source.unused_fields),
    ]
    return "\n  ".join(lines)
