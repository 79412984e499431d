"""Parse records of dialogues and plain texts; docs/data.md describes the formats for users.

The formats of pairs, for stage DPO, are in `preference`; `registry` has the table of all formats.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from erniekit.data.conversation import ASSISTANT, USER, Conversation, PlainText, Turn
from erniekit.data.formats.messages import last_must_be_assistant, parse_messages, parse_tools
from erniekit.data.formats.problems import (
    WEIGHT_FIELDS,
    MalformedError,
    NothingToTrainError,
    describe_value,
    parse_answer,
    parse_flag,
    parse_history,
    parse_optional_text,
    parse_question,
    parse_stripped_texts,
    parse_text,
    split_system,
)


def parse_erniekit(record: dict) -> Conversation:
    questions = parse_stripped_texts(record, "src")
    answers = parse_stripped_texts(record, "tgt")
    if len(questions) != len(answers):
        raise MalformedError("tgt", f"as many items as src ({len(questions)})", f"{len(answers)}")
    labels = record.get("label")
    if labels is None:
        labels = [1] * len(answers)
    elif not isinstance(labels, list):
        labels = [labels]
    if len(labels) != len(answers):
        raise MalformedError("label", f"one 0 or 1 for each tgt ({len(answers)})", f"{len(labels)} of them")
    trained = [parse_flag(label, "label") for label in labels]
    system, questions, answers = split_system(record, questions, answers)
    return _conversation(zip(questions, answers, trained[-len(answers) :], strict=True), system, "label")


def parse_alpaca(record: dict) -> Conversation:
    question = join_input(parse_text(record.get("instruction"), "instruction"), record, "instruction")
    answer = parse_answer(record.get("output"), "output")
    rounds = [(*qa_pair, True) for qa_pair in parse_history(record)]
    return _conversation([*rounds, (question, answer, True)], parse_optional_text(record, "system"), "output")


def join_input(instruction: str, record: dict, name: str) -> str:
    """Return an alpaca record's question: the instruction and, on the next line, its `input`."""
    question = "\n".join(part for part in (instruction, parse_optional_text(record, "input")) if part.strip())
    return parse_question(question, name)


def parse_messages_record(record: dict) -> Conversation:
    system, turns = parse_messages(with_labels(record), "messages", tools=True)
    last_must_be_assistant(turns, record["messages"], "messages")
    return _with_target(Conversation(tuple(turns), system, parse_tools(record)), "messages")


def with_labels(record: dict) -> object:
    """Return `messages`, where upstream's `label` beside them (0 or 1 per answer) is moved into the messages.

    Raises:
        MalformedError: `label` has another number of items than the record has answers.
    """
    messages, labels = record.get("messages"), record.get("label")
    if labels is None or not isinstance(messages, list):
        return messages
    answers = [number for number, message in enumerate(messages) if _is_answer(message)]
    labels = labels if isinstance(labels, list) else [labels]
    if len(labels) != len(answers):
        expected = f"one 0 or 1 for each assistant message ({len(answers)})"
        raise MalformedError("label", expected, f"{len(labels)} of them")
    labelled: list[Any] = list(messages)
    for number, label in zip(answers, labels, strict=True):
        labelled[number] = {**messages[number], "label": int(parse_flag(label, "label"))}
        if not messages[number].keys().isdisjoint(WEIGHT_FIELDS):
            raise MalformedError(f"messages[{number}]", "either its own label or weight, or `label` beside", "both")
    return labelled


def _is_answer(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == ASSISTANT


def parse_prompt_completion(record: dict) -> Conversation:
    """Parse `prompt` and `completion`: two texts, or two lists of messages; earlier answers are not trained."""
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, list) or isinstance(completion, list):
        system, turns = parse_messages(prompt, "prompt", tools=True)
        answer = [{"role": ASSISTANT, "content": completion}] if isinstance(completion, str) else completion
        if not isinstance(answer, list):
            raise MalformedError("completion", "a text or a list of messages", describe_value(answer))
        assert isinstance(prompt, list)  # parse_messages refuses anything else
        _, all_turns = parse_messages([*prompt, *answer], "prompt + completion", tools=True)
        last_must_be_assistant(all_turns, answer, "completion")
        read_only = tuple(replace(turn, trained=False, thoughts="") for turn in turns)
        conversation = Conversation(read_only + tuple(all_turns[len(turns) :]), system, parse_tools(record))
        return _with_target(conversation, "completion")
    question = parse_question(prompt, "prompt")
    rounds = [(question, parse_answer(completion, "completion"), True)]
    return _conversation(rounds, parse_optional_text(record, "system"), "completion")


def parse_plain_text(record: dict) -> PlainText:
    name = "tgt" if "text" not in record and "src" not in record and "tgt" in record else "text"
    parts = record.get(name)
    if name == "text" or not isinstance(parts, list):
        parts = [parts]
    text = "\n".join(parse_text(part, name) for part in parts)
    if not text.strip():
        raise NothingToTrainError(name, "a text", "an empty string")
    return PlainText(text)


def _conversation(rounds: Iterable[tuple[str, str, bool]], system: str, label_field: str) -> Conversation:
    turns = []
    for question, answer, trained in rounds:
        turns += [Turn(USER, question), Turn(ASSISTANT, answer, trained)]
    return _with_target(Conversation(tuple(turns), system), label_field)


def _with_target(conversation: Conversation, field: str) -> Conversation:
    if not any(turn.trained for turn in conversation.turns):
        raise NothingToTrainError(field, "at least one assistant turn with label 1", "none: nothing would be trained")
    return conversation
