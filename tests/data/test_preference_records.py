"""Pairs of every format, and what is said of those that cannot be used."""

from __future__ import annotations

import pytest

from erniekit.data.conversation import ASSISTANT, USER
from erniekit.data.formats.problems import RecordProblem
from erniekit.data.formats.registry import read_records


@pytest.fixture
def read(write_jsonl):
    def read(record, kind):
        path = write_jsonl([record])
        (item,) = read_records(path, f"{kind} preferences")
        return item if isinstance(item, RecordProblem) else item[1]

    return read


def message(role, content, **more):
    return {"role": role, "content": content, **more}


CALLING = message("assistant", "I add.", tool_calls=[{"function": {"name": "add", "arguments": {}}}])


def shown(turns):
    return [(turn.role, turn.content, turn.trained) for turn in turns]


ERNIEKIT = {"src": ["q"], "tgt": [], "response": [["good"], ["bad"]], "sort": [1, 0]}
MESSAGES = {"prompt": [message("user", "q")], "chosen": [message("assistant", "good")], "rejected": "bad"}
ALPACA = {"question": "q", "chosen": "good", "rejected": "bad"}


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (ERNIEKIT, "erniekit"),
        ({**ERNIEKIT, "src": "q", "tgt": None, "response": ["good", "bad"], "sort": [0.5, -0.5]}, "erniekit"),
        ({**ERNIEKIT, "response": [["bad"], ["good"]], "sort": [0, 1]}, "erniekit"),
        (ALPACA, "alpaca"),
        ({"instruction": "q", "chosen": "good", "rejected": "bad"}, "alpaca"),
        ({"question": None, "instruction": "q", "chosen": "good", "rejected": "bad"}, "alpaca"),
        (MESSAGES, "messages"),
        ({**MESSAGES, "prompt": "q", "chosen": "good"}, "messages"),
        ({**MESSAGES, "chosen": [message("assistant", "good", tool_calls=None)], "tools": []}, "messages"),
        (
            {
                "chosen": [message("user", "q"), message("assistant", "good")],
                "rejected": [message("user", "q"), message("assistant", "bad")],
            },
            "messages",
        ),
    ],
)
def test_a_single_turn_reads_alike_in_every_format(read, record, kind):
    pair = read(record, kind)
    assert shown(pair.prompt.turns) == [(USER, "q", False)]
    assert pair.prompt.system == ""
    assert shown(pair.chosen) == [(ASSISTANT, "good", True)]
    assert shown(pair.rejected) == [(ASSISTANT, "bad", True)]


def test_earlier_turns_and_systems_belong_to_the_prompt(read):
    long = {"src": ["q1", "q2"], "tgt": ["a1"], "response": [["good"], ["bad"]], "sort": [3, 1], "system": "s"}
    pair = read(long, "erniekit")
    assert shown(pair.prompt.turns) == [(USER, "q1", False), (ASSISTANT, "a1", False), (USER, "q2", False)]
    assert (pair.prompt.system, pair.score_difference) == ("s", 2.0)
    older = {**long, "src": ["s", "q1", "q2"], "tgt": ["", "a1"], "is_system": 1, "system": None}
    assert read(older, "erniekit") == pair
    prompt = [message("system", "s"), message("user", "q1"), message("assistant", "a1"), message("user", "q2")]
    scores = {"score_chosen": 3, "score_rejected": 1}
    assert read({"prompt": prompt, "chosen": "good", "rejected": "bad", **scores}, "messages") == pair
    whole = {name: [*prompt, message("assistant", name)] for name in ("chosen", "rejected")}
    assert read(whole, "messages").prompt == pair.prompt
    assert read({**ALPACA, "input": "more", "system": "s"}, "alpaca").prompt.turns[0].content == "q\nmore"


def test_answers_may_have_several_turns(read):
    pair = read({**ERNIEKIT, "response": [["a", "u", "b"], ["c"]]}, "erniekit")
    assert shown(pair.chosen) == [(ASSISTANT, "a", True), (USER, "u", False), (ASSISTANT, "b", True)]
    chosen = [message("assistant", "a", weight=0), message("user", "u"), message("assistant", "b")]
    assert [turn.trained for turn in read({**MESSAGES, "chosen": chosen}, "messages").chosen] == [False, False, True]
    # where whole dialogues go apart at a question, the last common question is the prompt's
    begin = [message("user", "q"), message("assistant", "same")]
    ends = {
        name: [*begin, message("user", f"asks {name}"), message("assistant", name)] for name in ("chosen", "rejected")
    }
    pair = read(ends, "messages")
    assert shown(pair.prompt.turns) == [(USER, "q", False)]
    assert [turn.content for turn in pair.chosen] == ["same", "asks chosen", "chosen"]


QUESTION = message("user", "q")
SHARED = [QUESTION, message("assistant", "a"), message("user", "r")]


def dialogues(*prompt):
    return {name: [*prompt, message("assistant", name)] for name in ("chosen", "rejected")}


@pytest.mark.parametrize(
    ("prompt", "turns"),
    [("q", 3), ("r", 3), (SHARED, 3), ([QUESTION], 1), ([message("system", "s"), *SHARED], 3)],
)
def test_a_prompt_may_stand_beside_whole_dialogues(read, prompt, turns):
    """As many published sets have it: the first question as `prompt`, and everything in `chosen` and `rejected`."""
    pair = read({"prompt": prompt, **dialogues(message("system", "s"), *SHARED)}, "messages")
    assert (len(pair.prompt.turns), pair.prompt.system) == (turns, "s")
    assert [turn.content for turn in pair.chosen] == [*(["a", "r"] if turns == 1 else []), "chosen"]
    assert all(turn.trained == (turn.role == ASSISTANT) for turn in pair.chosen)


def test_alpaca_histories_belong_to_the_prompt(read):
    pair = read({**ALPACA, "history": [["h1", "a1"], ["h2", "a2"]]}, "alpaca")
    assert [turn.content for turn in pair.prompt.turns] == ["h1", "a1", "h2", "a2", "q"]
    assert not any(turn.trained for turn in pair.prompt.turns)


@pytest.mark.parametrize(
    ("record", "kind", "field", "expected"),
    [
        ({**ERNIEKIT, "tgt": ["a"]}, "erniekit", "tgt", "one item fewer than src"),
        ({**ERNIEKIT, "src": []}, "erniekit", "src", "a string or a list"),
        ({**ERNIEKIT, "src": [" "]}, "erniekit", "src[0]", "a text"),
        ({**ERNIEKIT, "response": ["a"]}, "erniekit", "response", "a list of two answers"),
        ({"src": "q", "tgt": "a"}, "erniekit", "response", "two answers (stages DPO and RM read pairs of answers)"),
        ({"src": "q", "response": "ab", "sort": [1, 0]}, "erniekit", "response", "a list of two answers"),
        ({"instruction": "q", "output": "a"}, "alpaca", "chosen", "an answer (stages DPO and RM read pairs"),
        ({"messages": [message("user", "q")]}, "messages", "chosen", "an answer (stages DPO and RM read pairs"),
        ({**ERNIEKIT, "response": [["a"], ["a "]]}, "erniekit", "response", "two different answers"),
        ({**ERNIEKIT, "response": [["a"], [""]]}, "erniekit", "response[1][0]", "a text"),
        ({**ERNIEKIT, "response": [["a", "u"], ["b"]]}, "erniekit", "response[0]", "an odd number of turns"),
        ({**ERNIEKIT, "response": [[], ["b"]]}, "erniekit", "response[0]", "an odd number of turns"),
        ({**ERNIEKIT, "sort": [1, 1]}, "erniekit", "sort", "two different numbers"),
        ({**ERNIEKIT, "sort": [1]}, "erniekit", "sort", "two numbers"),
        ({**ERNIEKIT, "sort": [1, True]}, "erniekit", "sort[1]", "a number"),
        ({**ERNIEKIT, "sort": None}, "erniekit", "sort", "two numbers"),
        ({**ALPACA, "chosen": ""}, "alpaca", "chosen", "a text"),
        ({"question": "q", "chosen": "a"}, "alpaca", "rejected", "an answer (stages DPO"),
        ({**ALPACA, "question": ""}, "alpaca", "question", "a text"),
        ({**ALPACA, "rejected": "good"}, "alpaca", "rejected", "two different answers"),
        ({**ALPACA, "score_chosen": 1}, "alpaca", "score_rejected", "a number, like the other score"),
        ({**ALPACA, "score_chosen": "1", "score_rejected": 0}, "alpaca", "score_chosen", "a number"),
        ({**MESSAGES, "prompt": []}, "messages", "prompt", "a list of messages"),
        ({**MESSAGES, "prompt": [message("system", "s")]}, "messages", "prompt", "the last message to be the user's"),
        ({**MESSAGES, "prompt": "  "}, "messages", "prompt", "a text"),
        ({**MESSAGES, "rejected": []}, "messages", "rejected", "a text or a list of messages"),
        ({**MESSAGES, "rejected": [message("user", "x")]}, "messages", "rejected[0].role", "assistant"),
        (
            {**MESSAGES, "rejected": [message("assistant", "x"), message("user", "y")]},
            "messages", "rejected", "the last message to be the assistant's",
        ),
        (
            {**MESSAGES, "chosen": [message("assistant", "x", weight=0)]},
            "messages", "chosen", "an answer with a trained turn",
        ),
        (
            {
                "chosen": [message("user", "q"), message("assistant", "a")],
                "rejected": [message("user", "other"), message("assistant", "b")],
            },
            "messages", "rejected", "to begin as chosen does",
        ),
        (
            {
                "chosen": [message("user", "q"), message("assistant", "a")],
                "rejected": [message("user", "q")],
            },
            "messages", "rejected", "the last message to be the assistant's",
        ),
        ({"chosen": [], "rejected": []}, "messages", "chosen", "a list of messages"),
        ({"prompt": "other", **dialogues(*SHARED)}, "messages", "prompt", "what chosen and rejected begin with"),
        ({"prompt": SHARED[::2][1:], **dialogues(*SHARED)}, "messages", "prompt", "what chosen and rejected begin"),
        (
            {"prompt": [message("system", "t"), *SHARED], **dialogues(*SHARED)},
            "messages", "prompt", "what chosen and rejected begin with",
        ),
        ({**ALPACA, "history": [["h1"]]}, "alpaca", "history[0]", "a pair"),
        ({**ALPACA, "chosen": 3}, "alpaca", "chosen", "an answer: a text, or a list of turns"),
        ({**ERNIEKIT, "sort": [10**400, 0]}, "erniekit", "sort[0]", "a number of at most 1e+30"),
        ({**ALPACA, "score_chosen": float("inf"), "score_rejected": 0}, "alpaca", "score_chosen", "a number of at"),
        ({**ALPACA, "instruction": "i"}, "alpaca", "instruction", "no `instruction` together with `question`"),
        ({"chosen": "a", "rejected": "b"}, "alpaca", "question", "a string"),
        ({**MESSAGES, "tools": [{"name": "f"}]}, "messages", "tools", "none (pairs cannot hold calls yet)"),
        ({**MESSAGES, "chosen": [CALLING]}, "messages", "chosen[0].tool_calls", "no calls"),
        (dialogues(QUESTION, CALLING, QUESTION), "messages", "chosen[1].tool_calls", "no calls"),
    ],
)  # fmt: skip
def test_bad_pairs_are_told_with_their_place(read, record, kind, field, expected):
    problem = read(record, kind)
    assert isinstance(problem, RecordProblem), problem
    assert (problem.line, problem.field) == (1, field)
    assert expected in problem.expected
