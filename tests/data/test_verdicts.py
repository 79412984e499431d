"""Answers with a verdict: how records are read, which answer to another prompt each gets, and their samples."""

from __future__ import annotations

import pytest

from erniekit.data.conversation import Conversation, Preference, Turn
from erniekit.data.formats.problems import MalformedError, NothingToTrainError, RecordProblem
from erniekit.data.formats.registry import FORMATS, VERDICT_KINDS, parse_record
from erniekit.data.formats.verdicts import DESIRABLE, UNDESIRABLE, with_other_answers
from erniekit.data.open_dataset import open_dataset
from erniekit.data.pairs import PairLayout, RenderedPair, assemble_pair
from erniekit.data.templates.ernie import Segment
from erniekit.errors import DataError


def record(prompt: str, answer: str, verdict: float = DESIRABLE) -> Preference:
    return Preference(Conversation((Turn("user", prompt),)), (Turn("assistant", answer, True),), (), verdict)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("prompt_completion", {"prompt": "q", "completion": "a"}),
        (
            "prompt_completion",
            {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
        ),
        ("alpaca", {"instruction": "q", "input": "", "output": "a"}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}),
        ("messages", {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}),
        ("erniekit", {"src": "q", "tgt": "a"}),
    ],
)
@pytest.mark.parametrize("field", ["label", "kto_tag"])
def test_records_of_trl_and_llamafactory(kind, value, field):
    form = FORMATS[f"{kind} verdicts"]
    assert parse_record(form, {**value, field: True}) == record("q", "a")
    assert parse_record(form, {**value, field: False}) == record("q", "a", UNDESIRABLE)


def test_the_verdict_is_on_the_last_answer_and_earlier_ones_are_read():
    value = {"src": ["q", "r"], "tgt": ["a", "b"], "system": "s", "label": False}
    parsed = parse_record(FORMATS["erniekit verdicts"], value)
    prompt = (Turn("user", "q"), Turn("assistant", "a"), Turn("user", "r"))
    assert parsed == Preference(Conversation(prompt, "s"), (Turn("assistant", "b", True),), (), UNDESIRABLE)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({}, "label"),
        ({"label": 1}, "label"),
        ({"label": "true"}, "label"),
        ({"label": True, "kto_tag": True}, "kto_tag"),
    ],
)
def test_a_verdict_is_true_or_false(more, field):
    with pytest.raises(MalformedError) as caught:
        parse_record(FORMATS["prompt_completion verdicts"], {"prompt": "q", "completion": "a", **more})
    assert caught.value.field == field


def test_calls_and_answers_that_are_only_read_are_refused():
    with pytest.raises(MalformedError, match="tools"):
        value = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "label": True}
        tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]
        parse_record(FORMATS["messages verdicts"], {**value, "tools": tools})
    unread = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 1}]
    unread += [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]
    with pytest.raises(NothingToTrainError):
        parse_record(FORMATS["messages verdicts"], {"messages": unread, "label": True})


def others(*prompts: str) -> list[str]:
    items = [(number, record(prompt, f"{prompt}{number}")) for number, prompt in enumerate(prompts)]
    found = list(with_other_answers(items, "file"))
    assert [item[0] for item in found if not isinstance(item, RecordProblem)] == sorted(range(len(prompts)))
    return [item[1].rejected[0].content for item in found if not isinstance(item, RecordProblem)]


def test_each_record_gets_the_nearest_earlier_answer_to_another_prompt():
    assert others("p", "q", "r") == ["q1", "p0", "q1"]
    assert others("p", "p", "q", "q", "q", "p") == ["q2", "q2", "p1", "p1", "p1", "q4"]


def test_one_prompt_alone_is_refused():
    items = [(1, record("p", "a")), (2, record("p", "b"))]
    (problem,) = with_other_answers(items, "file")
    assert isinstance(problem, RecordProblem)
    assert str(problem) == (
        "file: prompt: expected at least two different prompts (KTO compares with answers to other prompts), got the "
        "same one in all 2 records"
    )


def test_the_other_answer_is_cut_where_it_does_not_fit_and_may_be_equal(template):
    pair = RenderedPair([Segment("p", False)], [Segment("a", True)], [Segment("b", True)])
    sample, prompt = assemble_pair(pair, [[1, 2, 3], [4, 5], [6, 7, 8, 9]], template, DESIRABLE, PairLayout(cut_at=6))
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 3, 6] and sample.labels.tolist() == [-100, -100, 4, 2, 6, 7]
    assert prompt == 3 and sample.pair.score_difference == DESIRABLE
    sample, _ = assemble_pair(pair, [[1, 2, 3], [4, 5], [4, 5]], template, DESIRABLE, PairLayout(cut_at=4))
    assert sample.labels.tolist() == [-100, -100, 4, 2, 4]  # one token of it always stays
    with pytest.raises(NothingToTrainError):
        assemble_pair(pair, [[1, 2, 3], [4, 5], [4, 5]], template, None)


@pytest.mark.parametrize(
    ("cut_at", "window", "input_ids", "documents"),
    [
        (12, 8, [1, 2, 3, 4, 3, 6, 7, 8], ()),  # within the window
        (12, 7, [1, 2, 3, 4, 1, 2, 3, 6, 7, 8], (4,)),  # there is room for the prompt and all of both answers
        (9, 6, [1, 2, 3, 4, 1, 2, 3, 6, 7], (4,)),
        (8, 7, [1, 2, 3, 4, 3, 6, 7], ()),  # sharing the prompt leaves the other answer more than reading it twice
    ],
)
def test_the_other_answer_keeps_as_much_as_a_window_and_the_limit_leave(cut_at, window, input_ids, documents, template):
    pair = RenderedPair([Segment("p", False)], [Segment("a", True)], [Segment("b", True)])
    layout = PairLayout(cut_at, window=window)
    sample, _ = assemble_pair(pair, [[1, 2, 3], [4, 5], [6, 7, 8, 9]], template, DESIRABLE, layout)
    assert sample.input_ids.tolist() == input_ids and sample.documents == documents


def test_a_file_becomes_samples(make_source, tokenizer, template, tmp_path):
    values = [{"prompt": f"q{number}", "completion": "yes", "label": number % 2 == 0} for number in range(4)]
    source = make_source(values, "prompt_completion verdicts")
    dataset = open_dataset([source], tokenizer, template, max_seq_len=64, cache_dir=tmp_path / "cache")
    assert dataset.pairs and dataset.verdicts and len(dataset) == 4
    assert [dataset.sample(number).pair.score_difference for number in range(4)] == [1, -1, 1, -1]
    assert "4 answers with a verdict" in str(dataset.report)
    alike = make_source([{**value, "prompt": "q"} for value in values], "prompt_completion verdicts", name="b.jsonl")
    with pytest.raises(DataError, match="at least two different prompts"):
        open_dataset([alike], tokenizer, template, max_seq_len=64, cache_dir=tmp_path / "cache")


def test_every_format_of_dialogues_has_them():
    assert [kind.removesuffix(" verdicts") for kind in VERDICT_KINDS] == [
        "erniekit", "alpaca", "messages", "sharegpt", "prompt_completion"
    ]  # fmt: skip
