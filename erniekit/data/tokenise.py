"""Records to samples, a block at a time: rendering, encoding, and the policy for what is too long."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from erniekit.data.conversation import Conversation, PlainText
from erniekit.data.fields import UnusedFields
from erniekit.data.problems import ProblemList, RecordProblem
from erniekit.data.records import read_records
from erniekit.data.sources import Source
from erniekit.data.template import Sample, Template, TemplateRefusedError, assemble, encode_sample, encode_text
from erniekit.data.tokenizer import Tokenizer
from erniekit.errors import DataError

OVER_LENGTH_POLICIES = ("drop", "truncate_turns", "error")
BLOCK_RECORDS = 1000
BLOCK_CHARACTERS = 2_000_000  # while a block is encoded, each of its tokens weighs about a hundred bytes

Numbered = tuple[int, Conversation | PlainText]  # with the line in the file


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything beside the file itself that decides its samples; see dataset.open_dataset."""

    tokenizer: Tokenizer
    template: Template | None
    max_seq_len: int
    over_length: str

    def __post_init__(self) -> None:
        if self.over_length not in OVER_LENGTH_POLICIES:
            raise DataError(f"over_length {self.over_length!r}: expected one of {', '.join(OVER_LENGTH_POLICIES)}")

    @property
    def key(self) -> tuple:
        template = self.template.fingerprint if self.template else None
        return self.tokenizer.fingerprint, template, self.max_seq_len, self.over_length


@dataclass(slots=True)
class Counts:
    """What became of the records of one source; see report.SourceReport."""

    read: int = 0
    dropped: int = 0
    truncated: int = 0
    split: int = 0


def tokenise(
    source: Source, settings: Settings, counts: Counts, unused: UnusedFields, problems: ProblemList
) -> Iterator[tuple[list[Sample], list[int]]]:
    """Yield the samples of a source and the lines of their records, a block of records at a time, in file order.

    Malformed records are added to `problems` and yield nothing.
    """
    for block in _blocks(source, settings.tokenizer, counts, unused, problems):
        samples: list[Sample] = []
        lines: list[int] = []
        encode = _encode_texts if source.kind == "text" else _encode_conversations
        for line, sample in encode(block, source, settings, counts, problems):
            samples.append(sample)
            lines.append(line)
        yield samples, lines


def _blocks(
    source: Source, tokenizer: Tokenizer, counts: Counts, unused: UnusedFields, problems: ProblemList
) -> Iterator[list[Numbered]]:
    """Records without control tokens in their texts, in blocks limited by number and by characters."""
    block: list[Numbered] = []
    characters = 0
    for item in read_records(source.path, source.kind, unused):
        if isinstance(item, RecordProblem):
            problems.add(item)
            continue
        counts.read += 1
        line, record = item
        named_texts = _texts(record)
        forged = [(name, token) for name, text in named_texts if (token := tokenizer.find_control_token(text))]
        for name, token in forged:
            expected = "text without the tokenizer's control tokens (they would forge the dialogue's structure)"
            problems.add(RecordProblem(str(source.path), line, name, expected, token))
        if forged:
            continue
        block.append(item)
        characters += sum(len(text) for _, text in named_texts)
        if len(block) == BLOCK_RECORDS or characters >= BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


def _texts(record: Conversation | PlainText) -> list[tuple[str, str]]:
    if isinstance(record, PlainText):
        return [("text", record.text)]
    turns = [(f"{turn.role} turn {1 + number // 2}", turn.content) for number, turn in enumerate(record.turns)]
    return [("system", record.system), *turns]


def _encode_texts(
    block: list[Numbered], source: Source, settings: Settings, counts: Counts, problems: ProblemList
) -> Iterator[tuple[int, Sample]]:
    """Every token is kept: labels are shifted before a long text is cut, so its pieces lose no target."""
    encoded = settings.tokenizer.encode_batch([record.text for _, record in block if isinstance(record, PlainText)])
    for (line, _), ids in zip(block, encoded, strict=True):
        whole = encode_text(ids, settings.tokenizer.eos_id)
        length = len(whole.input_ids)
        if not length:
            problems.add(_without_tokens(source, line, "text", "text that leaves a token"))
        counts.split += length > settings.max_seq_len
        for start in range(0, length, settings.max_seq_len):
            part = slice(start, start + settings.max_seq_len)
            yield line, Sample(whole.input_ids[part], whole.labels[part])


def _encode_conversations(
    block: list[Numbered], source: Source, settings: Settings, counts: Counts, problems: ProblemList
) -> Iterator[tuple[int, Sample]]:
    assert settings.template is not None
    rendered = []
    for line, record in block:
        assert isinstance(record, Conversation)
        try:
            rendered.append((line, record, settings.template.render(record)))
        except TemplateRefusedError as error:
            problems.add(RecordProblem(str(source.path), line, "record", "a dialogue the template takes", str(error)))
    encoded = iter(settings.tokenizer.encode_batch([part.text for _, _, segments in rendered for part in segments]))
    for line, conversation, segments in rendered:
        sample = assemble(segments, [next(encoded) for _ in segments], settings.template)
        if not len(sample.input_ids):
            problems.add(_without_tokens(source, line, "record", "a trained answer that leaves a token to predict"))
        elif len(sample.input_ids) <= settings.max_seq_len:
            yield line, sample
        elif settings.over_length == "error":
            expected = f"at most {settings.max_seq_len:,} tokens (max_seq_len)"
            problems.add(RecordProblem(str(source.path), line, "length", expected, f"{len(sample.input_ids):,}"))
        else:
            shorter = (
                _without_oldest_turns(conversation, settings) if settings.over_length == "truncate_turns" else None
            )
            counts.truncated += shorter is not None
            counts.dropped += shorter is None
            if shorter is not None:
                yield line, shorter


def _without_tokens(source: Source, line: int, field: str, expected: str) -> RecordProblem:
    return RecordProblem(str(source.path), line, field, expected, "none: the tokenizer drops every character")


def _without_oldest_turns(conversation: Conversation, settings: Settings) -> Sample | None:
    """The sample with as few of the oldest exchanges gone as makes it fit; None if what fits has no target."""
    assert settings.template is not None
    template, tokenizer = settings.template, settings.tokenizer

    def sample_without(exchanges: int) -> Sample:
        return encode_sample(template, tokenizer, conversation.without_oldest(exchanges))

    def fits(exchanges: int) -> bool:
        return len(sample_without(exchanges).input_ids) <= settings.max_seq_len

    # the later the start, the shorter; the whole is known not to fit, and at least one exchange has to stay
    exchanges = len(conversation.turns) // 2
    fewest = bisect_left(range(exchanges), True, lo=1, hi=exchanges, key=fits)
    if fewest == exchanges:
        return None
    shorter = sample_without(fewest)
    return shorter if len(shorter.input_ids) else None
