"""Parse records of a prompt with one answer and a verdict on it, for stage KTO; see docs/data.md.

Every format of dialogues has such records: they have `label` or `kto_tag`, true where the answer is desirable and false
where it is not, as trl's and LLaMA-Factory's. The dialogue's last answer is the one that the verdict is on; earlier
ones are only read.

KTO compares with answers to other prompts, too: `with_other_answers` gives each record that of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from erniekit.data.conversation import ASSISTANT, Conversation, Preference
from erniekit.data.formats.problems import Effect, MalformedError, NothingToTrainError, RecordProblem, describe_value

VERDICTS = ("label", "kto_tag")
DESIRABLE, UNDESIRABLE = 1.0, -1.0


def verdict_kind(kind: str) -> str:
    """Return the kind of a format whose records are answers with a verdict."""
    return f"{kind} verdicts"


def has_verdict(record: dict) -> bool:
    """Return whether a record says true or false of its answer; upstream's `label` of dialogues is numbers."""
    return any(isinstance(record.get(name), bool) for name in VERDICTS)


def verdict_parser(parse_dialogue: Callable[[dict], Conversation]) -> Callable[[dict], Preference]:
    """Return the parser of answers with a verdict that are written as a format of dialogues.

    It gives pairs without a rejected answer, whose score difference is DESIRABLE or UNDESIRABLE.
    """

    def parse(record: dict) -> Preference:
        verdict = _verdict(record)
        dialogue = parse_dialogue({name: value for name, value in record.items() if name not in VERDICTS})
        if dialogue.uses_tools:
            raise MalformedError("tools", "none (answers with a verdict cannot hold calls yet)", "some")
        *prompt, answer = dialogue.turns
        if answer.role != ASSISTANT:
            raise MalformedError("record", "a dialogue that ends with the answer", f"one that ends with {answer.role}")
        if not answer.trained:
            raise NothingToTrainError("record", "a last answer that is trained", "one that is only read")
        read = tuple(replace(turn, trained=False, fields=None, thoughts="") for turn in prompt)
        return Preference(Conversation(read, dialogue.system), (answer,), (), verdict)

    return parse


def _verdict(record: dict) -> float:
    given = [name for name in VERDICTS if record.get(name) is not None]
    if not given:
        raise MalformedError("label", "true or false, the verdict on the answer (stage KTO)", "nothing")
    if len(given) == 2:
        raise MalformedError("kto_tag", "no `kto_tag` together with `label`, which means the same", "both")
    if not isinstance(record[given[0]], bool):
        raise MalformedError(given[0], "true or false, the verdict on the answer", describe_value(record[given[0]]))
    return DESIRABLE if record[given[0]] else UNDESIRABLE


def with_other_answers(
    items: Iterable[tuple[int, Preference] | RecordProblem], path: str
) -> Iterator[tuple[int, Preference] | RecordProblem]:
    """Yield the records with an answer to another prompt as the rejected one: that of the nearest earlier record.

    The first records, before which there is no other prompt, get that of the nearest later one. All other records pass
    at once, so that nothing but the beginning of a file with one prompt is in memory. If all records have the same
    prompt, there is one problem at the end.
    """
    waiting: list[tuple[int, Preference]] = []
    last: Preference | None = None
    other: Preference | None = None  # the last one with another prompt than `last`
    for item in items:
        if isinstance(item, RecordProblem):
            yield item
            continue
        line, record = item
        if last is not None and record.prompt != last.prompt:
            yield from ((number, replace(early, rejected=record.chosen)) for number, early in waiting)
            waiting, other = [], last
        last = record
        if other is None:
            waiting.append((line, record))
        else:
            yield line, replace(record, rejected=other.chosen)
    if waiting:
        yield RecordProblem(
            path, 0, "prompt", "at least two different prompts (KTO compares with answers to other prompts)",
            f"the same one in all {len(waiting):,} records", Effect.STOP,
        )  # fmt: skip
