"""Where a record has its reference answer."""

from __future__ import annotations

from typing import Any

import pytest

from erniekit.rewards.references import reference_of

QUESTION = {"role": "user", "content": "2 + 3"}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [QUESTION], "answer": "5"}, "5"), ({"prompt": [QUESTION], "solution": 5}, "5"),
        ({"answer": ["5", 5.0]}, ["5", "5.0"]), ({"answer": True}, "true"),
        ({"prompt": [QUESTION], "reward_model": {"style": "rule", "ground_truth": "5"}}, "5"),
        ({"messages": [QUESTION, {"role": "assistant", "content": "5"}]}, "5"),
        ({"conversations": [{"from": "human", "value": "2 + 3"}, {"from": "gpt", "value": "5"}]}, "5"),
        ({"prompt": "2 + 3", "completion": [{"role": "assistant", "content": "5"}]}, "5"),
        ({"prompt": "2 + 3", "completion": "5"}, "5"), ({"src": ["2 + 3"], "tgt": ["5"]}, "5"),
        ({"instruction": "2 + 3", "output": "5"}, "5"), ({"answer": "5", "output": "6"}, "5"),
    ],
)  # fmt: skip
def test_the_reference_is_a_field_or_the_last_answer(record: dict[str, Any], expected: object) -> None:
    assert reference_of(record) == expected


def test_a_field_that_is_named_counts() -> None:
    record = {"answer": "5", "meta": {"truth": 6}, "dotted.name": "7"}
    assert reference_of(record, "meta.truth") == "6"
    assert reference_of(record, "dotted.name") == "7"
    with pytest.raises(ValueError, match=r"no field `truth` \(it has answer, meta, dotted\.name"):
        reference_of(record, "truth")
    with pytest.raises(ValueError, match="`meta` of the record is neither"):
        reference_of(record, "meta")


@pytest.mark.parametrize("record", [{}, {"messages": [QUESTION]}, {"prompt": "2 + 3"}, {"messages": []}])
def test_a_record_without_one_is_told(record: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no reference answer"):
        reference_of(record)
