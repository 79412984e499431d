"""Parse records of a prompt with a preferred and a rejected answer, for stages DPO and RM; see docs/data.md.

erniekit: `src`, `tgt` (one item shorter), `response`: two answers, each a text or a list of turns, `sort`: two numbers,
the higher for the preferred answer; optional `system`, `is_system`. Of more than two it is a ranking, for stage RM.
alpaca: `question` (or `instruction`), `chosen`, `rejected`; optional `input`, `history`, `system` and scores.
sharegpt: `conversations` (the prompt), `chosen` and `rejected`: one or several objects with `from` and `value` each.
messages: `prompt`, `chosen`, `rejected`: texts or lists of messages; or full dialogues as `chosen` and `rejected`, with
or without a `prompt`; optional scores. Scores are `score_chosen` and `score_rejected`,
or their difference `margin`.

The kinds are called "... preferences" here, because the stage decides that a file is read as pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

from erniekit.data.conversation import ASSISTANT, USER, Conversation, Preference, Turn
from erniekit.data.formats.dialogues import join_input
from erniekit.data.formats.messages import SYSTEM_ROLES, parse_messages
from erniekit.data.formats.problems import (
    MARGIN,
    SCORES,
    MalformedError,
    NothingToTrainError,
    describe_value,
    parse_answer,
    parse_history,
    parse_optional_text,
    parse_question,
    parse_stripped_texts,
    parse_text,
    shorten,
    split_system,
)
from erniekit.data.formats.sharegpt import preference_as_messages

MAX_RANKED = 64  # answers of a ranking, which are 2,016 pairs
MAX_ABS_SCORE = 1e30  # differences are kept in float32


def preference_kind(kind: str) -> str:
    """Return the kind of a format whose records are pairs."""
    return f"{kind} preferences"


def _require(record: dict, *names: str) -> None:
    """Raise MalformedError if a field is missing. Checked first: without these fields the record is probably not a
    pair."""
    for name in names:
        if record.get(name) is None:
            expected = "two answers" if name == "response" else "an answer"
            raise MalformedError(name, f"{expected} (stages DPO and RM read pairs of answers)", "nothing")


def parse_erniekit_pair(record: dict) -> Preference:
    _require(record, "response")
    questions = parse_stripped_texts(record, "src")
    answers = parse_stripped_texts(record, "tgt") if record.get("tgt") not in (None, [], "") else []
    if len(questions) != len(answers) + 1:
        raise MalformedError("tgt", f"one item fewer than src ({len(questions) - 1})", f"{len(answers)}")
    system, questions, answers = split_system(record, questions, answers)
    turns = [Turn(USER, questions[0])]
    for answer, question in zip(answers, questions[1:], strict=True):
        turns += [Turn(ASSISTANT, answer), Turn(USER, question)]
    responses = record.get("response")
    if not isinstance(responses, list) or len(responses) < 2:
        got = f"{len(responses)} of them" if isinstance(responses, list) else describe_value(responses)
        raise MalformedError("response", "a list of two answers", got)
    if len(responses) > MAX_RANKED:
        raise MalformedError("response", f"at most {MAX_RANKED} answers in a ranking", f"{len(responses)} of them")
    parsed = [
        [replace(turn, content=turn.content.strip()) for turn in _response(response, f"response[{number}]")]
        for number, response in enumerate(responses)
    ]
    scores = record.get("sort")
    if not isinstance(scores, list) or len(scores) != len(responses):
        count = "two numbers" if len(responses) == 2 else f"{len(responses)} numbers, one for each answer"
        raise MalformedError("sort", f"{count}, the preferred answer's the higher", describe_value(scores))
    ranks = [_number(score, f"sort[{number}]") for number, score in enumerate(scores)]
    prompt = Conversation(tuple(turns), system)
    pairs = [
        _pair(prompt, parsed[better], parsed[worse], ranks[better] - ranks[worse], "response")
        for better, worse in permutations(range(len(ranks)), 2)
        if ranks[better] > ranks[worse]
    ]
    if not pairs:
        expected = "two different numbers" if len(ranks) == 2 else "different numbers"
        raise NothingToTrainError("sort", expected, shorten(scores))
    return replace(pairs[0], others=tuple(pairs[1:]))


def _response(response: object, name: str) -> list[Turn]:
    """Parse an answer into turns that alternate assistant, user, assistant, ..."""
    if isinstance(response, str):
        return [Turn(ASSISTANT, parse_answer(response, name), True)]
    if not isinstance(response, list):
        raise MalformedError(name, "an answer: a text, or a list of turns", describe_value(response))
    parts = response
    if len(parts) % 2 == 0:
        raise MalformedError(name, "an odd number of turns, the assistant's first and last", f"{len(parts)}")
    texts = [parse_answer(part, f"{name}[{number}]") for number, part in enumerate(parts)]
    return [Turn(USER, text) if number % 2 else Turn(ASSISTANT, text, True) for number, text in enumerate(texts)]


def parse_alpaca_pair(record: dict) -> Preference:
    _require(record, "chosen", "rejected")
    name = _question_field(record)
    question = join_input(parse_text(record.get(name), name), record, name)
    chosen, rejected = (_response(record.get(field), field) for field in ("chosen", "rejected"))
    turns = [
        turn
        for earlier_question, earlier_answer in parse_history(record)
        for turn in (Turn(USER, earlier_question), Turn(ASSISTANT, earlier_answer))
    ]
    prompt = Conversation((*turns, Turn(USER, question)), parse_optional_text(record, "system"))
    return _pair(prompt, chosen, rejected, _score_difference(record), "rejected")


def _question_field(record: dict) -> str:
    given = [name for name in ("question", "instruction") if record.get(name) is not None]
    if len(given) == 2 and all(record[name] for name in given):
        raise MalformedError(
            "instruction", "no `instruction` together with `question`, which means the same", shorten(record[given[1]])
        )
    return next((name for name in given if record[name]), given[0] if given else "question")


def parse_messages_pair(record: dict) -> Preference:
    _require(record, "chosen", "rejected")
    if record.get("tools"):
        raise MalformedError("tools", "none (pairs cannot hold calls yet)", shorten(record["tools"]))
    answers = [record.get(name) for name in ("chosen", "rejected")]
    if record.get("prompt") is None or all(_is_full_conversation(answer) for answer in answers):
        return _full_conversations(record)
    system, turns = _prompt(record["prompt"])
    chosen, rejected = (_answer(record.get(field), field) for field in ("chosen", "rejected"))
    return _pair(_without_targets(turns, system), chosen, rejected, _score_difference(record), "rejected")


def parse_sharegpt_pair(record: dict) -> Preference:
    """Parse LLaMA-Factory's form: `conversations` is the prompt, `chosen` and `rejected` one object each."""
    _require(record, "chosen", "rejected")
    return parse_messages_pair(preference_as_messages(record))


def _is_full_conversation(answer: object) -> bool:
    return (
        isinstance(answer, list)
        and len(answer) > 0
        and isinstance(answer[0], dict)
        and answer[0].get("role") in (*SYSTEM_ROLES, USER)
    )


def _prompt(prompt: object) -> tuple[str, list[Turn]]:
    """Return the prompt's system text, and turns that end with the user's."""
    if isinstance(prompt, str):
        return "", [Turn(USER, parse_question(prompt, "prompt"))]
    system, turns = parse_messages(prompt, "prompt")
    if not turns or turns[-1].role != USER:
        role = turns[-1].role if turns else "system"
        raise MalformedError("prompt", "the last message to be the user's", describe_value(role))
    return system, turns


def _answer(value: object, name: str) -> list[Turn]:
    """Parse a text, or messages that begin and end with the assistant's."""
    if isinstance(value, str):
        return _response(value, name)
    if not isinstance(value, list) or not value:
        raise MalformedError(name, "a text or a list of messages", describe_value(value))
    # Read it as a dialogue whose first question is the prompt's.
    try:
        system, turns = parse_messages([{"role": USER, "content": "-"}, *value], name)
    except MalformedError as error:
        raise type(error)(_shift_index(error.field, name), error.expected, error.got) from None
    del system
    if turns[1].role != ASSISTANT:
        raise MalformedError(f"{name}[0].role", ASSISTANT, describe_value(turns[1].role))
    if turns[-1].role != ASSISTANT:
        raise MalformedError(name, "the last message to be the assistant's", describe_value(value[-1].get("role")))
    return turns[1:]


def _shift_index(field_path: str, name: str) -> str:
    """Return "chosen[3].role" with the index in the user's list, which lacks the first message added here."""
    head, _, tail = field_path.removeprefix(f"{name}[").partition("]")
    return f"{name}[{int(head) - 1}]{tail}" if field_path.startswith(f"{name}[") else field_path


def _full_conversations(record: dict) -> Preference:
    """Build a pair from two full dialogues; the prompt is the given one, or their common part up to a user message."""
    (system, chosen), (other_system, rejected) = (
        parse_messages(record.get(name), name) for name in ("chosen", "rejected")
    )
    common_turns = _common_prefix_length(chosen, rejected) if system == other_system else 0
    while common_turns and not all(_prompt_may_end(turns, common_turns) for turns in (chosen, rejected)):
        common_turns -= 1
    if not common_turns:
        raise MalformedError(
            "rejected", "to begin as chosen does, with the same system text and question", "no common prompt"
        )
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        if turns[-1].role != ASSISTANT:
            raise MalformedError(name, "the last message to be the assistant's", describe_value(turns[-1].role))
    if record.get("prompt") is not None:
        common_turns = _given_prompt_length(record["prompt"], system, chosen[:common_turns])
    prompt = _without_targets(chosen[:common_turns], system)
    return _pair(prompt, chosen[common_turns:], rejected[common_turns:], _score_difference(record), "rejected")


def _begins_with(dialogue: Sequence[Turn], prompt: Sequence[Turn]) -> bool:
    """Return whether a prompt is the beginning of a dialogue that an answer follows."""
    return _common_prefix_length(prompt, dialogue) == len(prompt) and _prompt_may_end(dialogue, len(prompt))


def _prompt_may_end(turns: Sequence[Turn], length: int) -> bool:
    """Return whether the first turns of a dialogue end with a question that the next one answers."""
    return turns[length - 1].role == USER and (length >= len(turns) or turns[length].role == ASSISTANT)


def _common_prefix_length(some: Sequence[Turn], others: Sequence[Turn]) -> int:
    """Return the number of turns with which both lists begin."""
    count = 0
    for one, other in zip(some, others, strict=False):
        if (one.role, one.content, one.clips) != (other.role, other.content, other.clips):
            break
        count += 1
    return count


def _given_prompt_length(prompt: object, system: str, common_turns: Sequence[Turn]) -> int:
    """Return the number of turns of a prompt that is given in addition to two full dialogues, which must begin with it.

    A list is the prompt itself. A text is one of its questions, often the first; then the prompt is as long as
    possible.
    """
    own_system, turns = _prompt(prompt)
    if isinstance(prompt, str):
        if any(turn.role == USER and turn.content == turns[0].content for turn in common_turns):
            return len(common_turns)
    elif own_system in ("", system) and _begins_with(common_turns, turns):
        return len(turns)
    raise MalformedError("prompt", "what chosen and rejected begin with, or nothing", "something else")


def _without_targets(turns: Sequence[Turn], system: str) -> Conversation:
    read = tuple(replace(turn, trained=False, fields=None, thoughts="") for turn in turns)
    return Conversation(read, system)


def _pair(
    prompt: Conversation, chosen: Sequence[Turn], rejected: Sequence[Turn], difference: float | None, name: str
) -> Preference:
    for field, answer in (("chosen", chosen), ("rejected", rejected)):
        if not any(turn.trained for turn in answer):
            raise NothingToTrainError(field, "an answer with a trained turn", "none")
    if [(turn.role, turn.content) for turn in chosen] == [(turn.role, turn.content) for turn in rejected]:
        raise NothingToTrainError(name, "two different answers", "the same twice")
    return Preference(prompt, tuple(chosen), tuple(rejected), difference)


def _score_difference(record: dict) -> float | None:
    given = [name for name in SCORES if record.get(name) is not None]
    if record.get(MARGIN) is not None:
        if given:
            raise MalformedError(MARGIN, f"no `{MARGIN}` together with `{given[0]}`, which say the same", "both")
        return _number(record[MARGIN], MARGIN)
    if not given:
        return None
    if len(given) == 1:
        raise MalformedError(
            next(name for name in SCORES if name not in given), "a number, like the other score", "nothing"
        )
    chosen, rejected = (_number(record[name], name) for name in SCORES)
    return chosen - rejected


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MalformedError(name, "a number", describe_value(value))
    if not -MAX_ABS_SCORE <= value <= MAX_ABS_SCORE:  # also rejects NaN
        raise MalformedError(name, f"a number of at most {MAX_ABS_SCORE:g}", describe_value(value))
    return float(value)
