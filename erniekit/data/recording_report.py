"""Listen to all recordings of some sources before a run does, for `erniekit validate --data`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice

from erniekit.data.conversation import Conversation, Source
from erniekit.data.formats.problems import Effect, ProblemList, RecordProblem
from erniekit.data.media.clip import AudioInputs, Clip
from erniekit.data.media.errors import RecordingError
from erniekit.data.media.recording import clip_length
from erniekit.data.media.recording_check import recording_problems
from erniekit.data.placeholders import clips_of
from erniekit.data.recording_facts import duration
from erniekit.data.split import read_part
from erniekit.data.tokenize import recording_problem

BLOCK_CLIPS = 256
MAX_THREADS = 16  # each decodes one recording


@dataclass
class RecordingReport:
    """What the recordings of some sources are like.

    Attributes:
        clips: their number.
        seconds: of sound, of those that can be read; shortest and longest: of one of them.
        languages: the records with recordings, by the language that they name ("" for none).
        suspicious: what is wrong with recordings that can be read, such as silence.
        damaged: recordings whose header is whole, but not their sound. Reading the data, for which the headers suffice,
            tells the others that cannot be read; training would stop at these.
    """

    clips: int = 0
    seconds: float = 0.0
    shortest: float = float("inf")
    longest: float = 0.0
    languages: Counter[str] = field(default_factory=Counter)
    suspicious: list[RecordProblem] = field(default_factory=list)
    damaged: ProblemList = field(default_factory=ProblemList)

    def add(self, seconds: float) -> None:
        self.seconds += seconds
        self.shortest, self.longest = min(self.shortest, seconds), max(self.longest, seconds)

    def lines(self) -> list[str]:
        """Return a line with the totals and one for each suspicious recording; none where there are no recordings."""
        if not self.clips:
            return []
        named = [f"{language or 'not named'} {count:,}" for language, count in self.languages.most_common()]
        languages = f"; languages of records: {', '.join(named)}" if set(self.languages) != {""} else ""
        lengths = f", from {duration(self.shortest)} to {duration(self.longest)}" if self.seconds else ""
        what = f"recordings: {self.clips:,}, {duration(self.seconds)} of sound{lengths}{languages}"
        if self.damaged.total:
            what += f"; damaged {self.damaged.total:,}"
        if not self.suspicious:
            return [f"{what}; none is suspicious" if not self.damaged.total else what]
        return [f"{what}; these are suspicious ({len(self.suspicious):,}):", *map(str, self.suspicious)]


def check_recordings(sources: Sequence[Source], inputs: AudioInputs, max_seq_len: int) -> RecordingReport:
    """Decode every recording of all sources, in threads and a few at a time.

    Args:
        max_seq_len: a recording with more placeholders than this is suspicious: no sample can hold it.

    Raises:
        DataError: a package is missing.
    """
    report = RecordingReport()
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="listen") as pool:
        for source in sources:
            if not source.probability:
                continue
            named = _named_clips(source, report)
            while block := list(islice(named, BLOCK_CLIPS)):
                different = list(dict.fromkeys(clip for _, clip in block))
                heard = pool.map(lambda clip: _listen(clip, inputs, max_seq_len), different)
                found = dict(zip(different, heard, strict=True))
                for line, clip in block:
                    report.clips += 1
                    one = found[clip]
                    if isinstance(one, RecordingError):
                        report.damaged.add(replace(recording_problem(source, line, clip, one), effect=Effect.STOP))
                    elif one is not None:
                        report.add(one[0])
                        report.suspicious += [recording_problem(source, line, clip, each) for each in one[1]]
    return report


def _named_clips(source: Source, report: RecordingReport) -> Iterator[tuple[int, Clip]]:
    """Yield every clip with the line of its record, and count the languages."""
    for item in read_part(source):
        if isinstance(item, RecordProblem):
            continue
        line, record = item
        clips = clips_of(record)
        if clips:
            report.languages[record.language if isinstance(record, Conversation) else ""] += 1
        yield from ((line, clip) for clip in clips)


def _listen(
    clip: Clip, inputs: AudioInputs, max_seq_len: int
) -> tuple[float, list[RecordingError]] | RecordingError | None:
    """Return the seconds of a recording and what is suspicious about it.

    The error if only decoding shows that it cannot be read; None if its header shows that.
    """
    try:
        length = clip_length(clip, inputs.sampling_rate)
    except RecordingError:
        return None
    try:
        found: Iterable[RecordingError] = recording_problems(clip, inputs.sampling_rate)
    except RecordingError as error:
        return error
    seconds, tokens = length / inputs.sampling_rate, inputs.clip_tokens(length)
    too_long = [
        RecordingError(clip, f"at most {max_seq_len:,} tokens (max_seq_len)", f"{tokens:,} of {seconds:.1f} s")
    ] * (tokens > max_seq_len)
    return seconds, [*found, *too_long]
