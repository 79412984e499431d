"""Records to samples, a block at a time: rendering, encoding, and the policy for what is too long."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from erniekit.data.conversation import Conversation, PlainText, Preference
from erniekit.data.fields import UnusedFields
from erniekit.data.pairs import assemble_pair, render_pair
from erniekit.data.preference_records import PREFERENCE_KINDS
from erniekit.data.problems import ProblemList, RecordProblem
from erniekit.data.records import Record, read_records
from erniekit.data.sources import Source
from erniekit.data.template import Sample, Template, TemplateRefusedError, assemble, encode_sample, encode_text
from erniekit.data.tokenizer import Tokenizer
from erniekit.errors import DataError

OVER_LENGTH_POLICIES = ("drop", "truncate_turns", "error")
BLOCK_RECORDS = 1000
BLOCK_CHARACTERS = 2_000_000  # while a block is encoded, each of its tokens weighs about a hundred bytes

Numbered = tuple[int, Record]  # with the line in the file


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything beside the file itself that decides its samples; see dataset.open_dataset."""

    tokenizer: Tokenizer
    template: Template | None
    max_seq_len: int
    over_length: str
    max_prompt_len: int | None = None
    needs_scores: bool = False

    def __post_init__(self) -> None:
        if self.over_length not in OVER_LENGTH_POLICIES:
            raise DataError(f"over_length {self.over_length!r}: expected one of {', '.join(OVER_LENGTH_POLICIES)}")

    def key(self, kind: str) -> tuple:
        """Stands for everything here that decides the samples of a source of this kind."""
        template = self.template.fingerprint if self.template else None
        of_pairs = (self.max_prompt_len, self.needs_scores) if kind in PREFERENCE_KINDS else ()
        return self.tokenizer.fingerprint, template, self.max_seq_len, self.over_length, *of_pairs


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
        encode = _ENCODERS.get(source.kind, _encode_conversations)
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


def _texts(record: Record) -> list[tuple[str, str]]:
    if isinstance(record, PlainText):
        return [("text", record.text)]
    if isinstance(record, Preference):
        answers = (("chosen", record.chosen), ("rejected", record.rejected))
        return _texts(record.prompt) + [(name, turn.content) for name, turns in answers for turn in turns]
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


def _encode_preferences(
    block: list[Numbered], source: Source, settings: Settings, counts: Counts, problems: ProblemList
) -> Iterator[tuple[int, Sample]]:
    assert settings.template is not None
    rendered = []
    for line, record in block:
        assert isinstance(record, Preference)
        if settings.needs_scores and not (record.score_difference or 0) > 0:
            expected = "scores of which the chosen answer's is the higher (offset_alpha needs them)"
            got = "none" if record.score_difference is None else f"a difference of {record.score_difference:g}"
            problems.add(RecordProblem(str(source.path), line, "score_chosen", expected, got))
            continue
        try:
            rendered.append((line, record, render_pair(settings.template, record)))
        except TemplateRefusedError as error:
            problems.add(RecordProblem(str(source.path), line, "record", "a dialogue the template takes", str(error)))
    encoded = iter(settings.tokenizer.encode_batch([part.text for _, _, pair in rendered for part in pair.segments]))
    for line, record, pair in rendered:
        ids = [next(encoded) for _ in pair.segments]
        sample, prompt = assemble_pair(pair, ids, settings.template, record.score_difference)
        fitted = (
            sample if _pair_fits(sample, prompt, settings) else _pair_without_oldest_turns(record, prompt, settings)
        )
        counts.truncated += fitted is not None and fitted is not sample
        if fitted is not None:
            yield line, fitted
        elif settings.over_length == "error":
            problems.add(_too_long(source, line, sample, prompt, settings))
        else:
            counts.dropped += 1


def _pair_fits(sample: Sample, prompt: int, settings: Settings) -> bool:
    return prompt <= (settings.max_prompt_len or prompt) and len(sample.input_ids) <= settings.max_seq_len


def _pair_without_oldest_turns(record: Preference, prompt: int, settings: Settings) -> Sample | None:
    """The pair with as few of the prompt's oldest exchanges gone as makes it fit; None where that is not allowed, or
    not enough.

    A prompt longer than max_prompt_len loses turns whatever the policy for long samples is.
    """
    assert settings.template is not None
    template, tokenizer = settings.template, settings.tokenizer
    prompt_too_long = settings.max_prompt_len is not None and prompt > settings.max_prompt_len
    if not prompt_too_long and settings.over_length != "truncate_turns":
        return None

    def without(exchanges: int) -> tuple[Sample, int]:
        shorter = replace(record, prompt=record.prompt.without_oldest(exchanges))
        pair = render_pair(template, shorter)
        encoded = tokenizer.encode_batch([part.text for part in pair.segments])
        return assemble_pair(pair, encoded, template, record.score_difference)

    def fits(exchanges: int) -> bool:
        sample, length = without(exchanges)
        if settings.over_length == "truncate_turns":
            return _pair_fits(sample, length, settings)
        return length <= (settings.max_prompt_len or length)

    exchanges = len(record.prompt.turns) // 2 + 1  # the last question has to stay
    fewest = bisect_left(range(exchanges), True, lo=1, hi=exchanges, key=fits)
    if fewest == exchanges:
        return None
    shorter, length = without(fewest)
    return shorter if _pair_fits(shorter, length, settings) else None


def _too_long(source: Source, line: int, sample: Sample, prompt: int, settings: Settings) -> RecordProblem:
    limit = settings.max_prompt_len
    if limit is not None and prompt > limit:
        return RecordProblem(
            str(source.path),
            line,
            "prompt",
            f"at most {limit:,} tokens (max_prompt_len) in its last turn",
            f"{prompt:,}",
        )
    expected = f"at most {settings.max_seq_len:,} tokens (max_seq_len) in prompt and answers"
    return RecordProblem(str(source.path), line, "length", expected, f"{len(sample.input_ids):,}")


_ENCODERS = {"text": _encode_texts, **dict.fromkeys(PREFERENCE_KINDS, _encode_preferences)}


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
