"""Whatever JSON a preference file holds, it becomes a sound pair or a problem with its place; nothing is raised."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.data.conversation import ASSISTANT, USER
from erniekit.data.formats.problems import RecordProblem
from erniekit.data.formats.registry import PAIR_KINDS, read_records

TEXTS = st.sampled_from(["", " ", "a", "b", "a ", "q\n", "\ud800"])
NUMBERS = st.sampled_from([0, 1, -1, 0.5, True, 10**400, -(10**400), float("inf"), float("nan"), 1e300, None, "1"])
ROLES = st.sampled_from(["system", "user", "assistant", "tool", None, 3])
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": ROLES, "content": TEXTS}, optional={"weight": NUMBERS, "label": NUMBERS}),
    st.sampled_from([{}, None, "a", []]),
)
# mostly well-formed dialogues, so that what comes after the first checks is reached
ALTERNATING = st.builds(
    lambda first, contents, last: (
        [
            {"role": (USER, ASSISTANT)[(first + number) % 2], "content": content}
            for number, content in enumerate(contents)
        ]
        + last
    ),
    st.integers(0, 1),
    st.lists(st.sampled_from(["a", "b"]), max_size=4),
    st.lists(MESSAGES, max_size=1),
)
VALUES = st.one_of(TEXTS, NUMBERS, ALTERNATING, st.lists(MESSAGES, max_size=3))
ANSWERS = st.one_of(VALUES, st.lists(st.one_of(TEXTS, st.lists(TEXTS, max_size=3), NUMBERS), max_size=3))
SOUND_DIALOGUES = st.tuples(st.lists(st.sampled_from(["a", "b"]), min_size=3, max_size=5), st.booleans()).map(
    lambda drawn: [
        *([{"role": "system", "content": "s"}] if drawn[1] else []),
        *({"role": (USER, ASSISTANT)[i % 2], "content": drawn[0][i]} for i in range(len(drawn[0]) // 2 * 2)),
    ]
)
SPEECHES = st.one_of(
    st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "function_call", "x", None, 3]), "value": TEXTS}),
    st.sampled_from([{}, None, "a", [], {"role": "user", "content": "q"}]),
)
# sound records, of which some fields are then replaced
SOUND = {
    "erniekit preferences": [
        st.just({"src": ["q", "r"], "tgt": ["a"], "response": [["a", "u", "b"], ["b"]], "sort": [0, 1]}),
        st.just({"src": "q", "response": ["a", "b"], "sort": [2.5, -1]}),
    ],
    "alpaca preferences": [
        st.just({"question": "q", "chosen": "a", "rejected": ["a", "u", "b"], "history": [["q", "a"]]}),
        st.just({"instruction": "q", "input": "r", "chosen": "a", "rejected": "b", "score_chosen": 1}),
    ],
    "sharegpt preferences": [
        st.just(
            {
                "conversations": [{"from": "human", "value": "q"}],
                **{name: {"from": "gpt", "value": name} for name in ("chosen", "rejected")},
            }
        ),
        st.just(
            {
                "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}],
                "chosen": [{"from": "gpt", "value": "a"}],
                "rejected": "b",
                "system": "",
            }
        ),
    ],
    "messages preferences": [
        st.fixed_dictionaries({"prompt": st.just("q"), "chosen": st.just("a"), "rejected": ALTERNATING}),
        st.fixed_dictionaries(
            {"chosen": SOUND_DIALOGUES, "rejected": SOUND_DIALOGUES}, optional={"prompt": SOUND_DIALOGUES}
        ),
    ],
}
CHANGES = {
    "erniekit preferences": {
        "src": ANSWERS, "tgt": ANSWERS, "response": ANSWERS, "sort": st.one_of(VALUES, st.lists(NUMBERS, max_size=3)),
        "system": VALUES, "is_system": NUMBERS,
    },
    "alpaca preferences": {
        "question": VALUES, "instruction": VALUES, "input": VALUES, "system": VALUES, "chosen": ANSWERS,
        "rejected": ANSWERS, "history": st.one_of(VALUES, st.lists(st.lists(TEXTS, max_size=3), max_size=2)),
        "score_chosen": NUMBERS, "score_rejected": NUMBERS,
    },
    "sharegpt preferences": {
        "conversations": st.one_of(VALUES, st.lists(SPEECHES, max_size=3)), "chosen": st.one_of(VALUES, SPEECHES),
        "rejected": st.one_of(VALUES, SPEECHES, st.lists(SPEECHES, max_size=3)), "system": VALUES,
        "score_chosen": NUMBERS,
    },
    "messages preferences": {
        "prompt": VALUES, "chosen": VALUES, "rejected": VALUES, "score_chosen": NUMBERS, "score_rejected": NUMBERS,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", PAIR_KINDS)
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_record_is_a_sound_pair_or_a_problem(kind, data, tmp_path_factory):
    record = data.draw(st.one_of(SOUND[kind]))
    for name in data.draw(st.lists(st.sampled_from(sorted(CHANGES[kind])), max_size=2)):
        record = {**record, name: data.draw(CHANGES[kind][name])}
    path = tmp_path_factory.getbasetemp() / "record.jsonl"
    path.write_text(json.dumps(record))
    (item,) = read_records(path, kind)
    if isinstance(item, RecordProblem):
        assert item.line == 1 and item.field and item.expected and item.got
        return
    line, pair = item
    assert line == 1
    roles = [turn.role for turn in pair.prompt.turns]
    assert roles[:1] + roles[-1:] == [USER, USER]
    assert (ASSISTANT, ASSISTANT) not in pairwise(roles)
    assert not any(turn.trained for turn in pair.prompt.turns)
    for answer in (pair.chosen, pair.rejected):
        roles = [turn.role for turn in answer]
        assert roles[:1] + roles[-1:] == [ASSISTANT, ASSISTANT]
        assert (ASSISTANT, ASSISTANT) not in pairwise(roles)
        assert any(turn.trained for turn in answer)
        assert not any(turn.trained for turn in answer if turn.role == USER)
    texts = [[turn.content for turn in turns] for turns in (pair.prompt.turns, pair.chosen, pair.rejected)]
    assert texts[1] != texts[2]
    assert all(text.strip() for turns in texts for text in turns)
    if kind.startswith("erniekit"):  # upstream's format is read as upstream does
        assert all(text == text.strip() for turns in texts for text in turns)
    assert pair.score_difference is None or abs(pair.score_difference) < float("inf")
