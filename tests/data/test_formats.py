"""The formats of others: what their records become, what is refused with a reason, and how a file's format is found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.data.conversation import Conversation, Preference, Turn
from erniekit.data.formats.problems import Effect, MalformedError, NothingToTrainError, RecordProblem
from erniekit.data.formats.registry import FORMATS, PAIR_KINDS, parse_record, recognise

DIALOGUE_KINDS = tuple(kind for kind, form in FORMATS.items() if form.records == "dialogues")


PROJECT = Path(__file__).parents[2]


def parse(kind, **record):
    return parse_record(FORMATS[kind], record, [str(PROJECT)])


def refusal(kind, **record):
    with pytest.raises(MalformedError) as caught:
        parse(kind, **record)
    return f"{caught.value.field}: expected {caught.value.expected}, got {caught.value.got}"


def user(text):
    return Turn("user", text)


def assistant(text, trained=True):
    return Turn("assistant", text, trained)


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def says(speaker, value, **more):
    return {"from": speaker, "value": value, **more}


EXCHANGE = Conversation((user("q"), assistant("a")))
ADD = {"name": "add", "arguments": {"a": 1}}
TOOL = {"name": "add", "description": "adds", "parameters": {}}


# ShareGPT


@pytest.mark.parametrize(("human", "gpt"), [("human", "gpt"), ("user", "assistant"), ("user", "chatgpt")])
def test_sharegpt_dialogues(human, gpt):
    first = [says(human, "q"), says(gpt, "a", weight=0), says(human, "r"), says(gpt, "b")]
    expected = Conversation((user("q"), assistant("a", False), user("r"), assistant("b")), "s")
    assert parse("sharegpt", conversations=[says("system", "s"), *first]) == expected
    assert parse("sharegpt", conversations=first, system="s") == expected
    assert parse("sharegpt", conversations=[message("user", "q"), message("assistant", "a")]) == EXCHANGE


def test_calls_of_llama_factorys_glaive_data():
    calls = json.dumps(ADD)
    talk = [says("human", "1 + 1?"), says("function_call", calls), says("observation", '{"sum": 2}'), says("gpt", "2")]
    conversation = parse("sharegpt", conversations=talk, tools=json.dumps([TOOL]))
    assert conversation.tools == ({"type": "function", "function": TOOL},)
    assert [turn.role for turn in conversation.turns] == ["user", "assistant", "tool", "assistant"]
    assert conversation.turns[1].fields == {"content": None, "tool_calls": [{"type": "function", "function": ADD}]}
    assert conversation.turns[2].content == '{"sum": 2}'
    assert [turn.trained for turn in conversation.turns] == [False, True, False, True]


def test_several_calls_after_a_thought():
    value = f"<think>both</think>{json.dumps([ADD, ADD])}"
    talk = [says("human", "q"), says("function_call", value), says("observation", "1"), says("observation", "2")]
    fields = parse("sharegpt", conversations=[*talk, says("gpt", "done")]).turns[1].fields
    assert (fields["content"], len(fields["tool_calls"])) == ("<think>both</think>", 2)


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({}, "conversations: expected a list of objects with `from` and `value`, got nothing"),
        ({"conversations": ["q"]}, "conversations[0]: expected an object with `from` and `value`, got 'q'"),
        ({"conversations": [says("narrator", "x")]}, "conversations[0].from: expected one of human, user, gpt"),
        ({"conversations": [says("gpt", "hello")]}, "conversations[0].role: expected system or user, got 'assistant'"),
        ({"conversations": [says("human", "q")]}, "conversations: expected the last message to be the assistant's"),
        (
            {"conversations": [says("human", "q"), says("function_call", "add(1)")]},
            "conversations[1].value: expected the JSON text of a call",
        ),
        ({"conversations": [says("system", "s"), says("human", "q"), says("gpt", "a")], "system": "t"}, "system: "),
    ],
)
def test_malformed_sharegpt_records(record, told):
    assert refusal("sharegpt", **record).startswith(told)


def test_pairs_of_sharegpt():
    prompt = [says("system", "s"), says("human", "q")]
    answers = {"chosen": says("gpt", "good"), "rejected": says("gpt", "bad")}
    expected = Preference(Conversation((user("q"),), "s"), (assistant("good"),), (assistant("bad"),))
    kind = "sharegpt preferences"
    assert parse(kind, conversations=prompt, **answers) == expected
    lists = {name: [answer] for name, answer in answers.items()}
    assert parse(kind, conversations=prompt[1:], system="s", **lists) == expected
    assert parse(kind, conversations=prompt, chosen="good", rejected="bad") == expected


# prompt and completion


def test_prompt_and_completion_are_texts_or_messages():
    assert parse("prompt_completion", prompt="q", completion="a") == EXCHANGE
    prompt = [message("system", "s"), message("user", "q"), message("assistant", "a"), message("user", "r")]
    expected = Conversation((user("q"), assistant("a", False), user("r"), assistant("b")), "s")
    assert parse("prompt_completion", prompt=prompt, completion=[message("assistant", "b")]) == expected
    assert parse("prompt_completion", prompt=prompt, completion="b") == expected
    assert "completion: expected a text" in refusal("prompt_completion", prompt=prompt, completion=3)


# OpenAI's messages


def test_parts_and_weights_by_llama_factorys_names():
    parts = [{"type": "text", "value": "a"}]
    talk = [message("user", "q"), message("assistant", parts, loss_weight=1.0)]
    assert parse("messages", messages=talk) == EXCHANGE
    with pytest.raises(NothingToTrainError):
        parse("messages", messages=[talk[0], message("assistant", "a", loss_weight=0.0)])
    both = [talk[0], message("assistant", "a", loss_weight=1, weight=1)]
    assert "either weight or loss_weight" in refusal("messages", messages=both)


def test_thoughts_and_calls_in_llama_factorys_parts():
    def part(kind, value):
        return {"type": kind, "value": value}

    calling = [part("reasoning", "I add."), part("tool_call", json.dumps(ADD)), part("tool_call", json.dumps(ADD))]
    answering = [part("reasoning", "Two."), part("text", "2")]
    results = [message("tool", [part("text", "2")])] * 2
    talk = [message("user", "q"), message("assistant", calling), *results, message("assistant", answering)]
    _, call, *_, answer = parse("messages", messages=talk).turns
    assert (call.thoughts, answer.thoughts, answer.content) == ("I add.", "Two.", "2")
    assert call.fields == {"content": None, "tool_calls": [{"type": "function", "function": ADD}] * 2}
    broken = [message("user", "q"), message("assistant", [part("tool_call", "add(1)")])]
    assert "messages[1].content: expected the JSON text of a call" in refusal("messages", messages=broken)
    asked = [message("user", [part("reasoning", "x")]), message("assistant", "a")]
    assert "messages[0].content[0]: expected a string or parts of type text" in refusal("messages", messages=asked)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    record = parse("messages", messages=[message("system", parts), message("user", parts), message("assistant", parts)])
    assert record == Conversation((user("one two"), assistant("one two")), "one two")


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"type": "image_url", "image_url": {"url": "x.png"}}, "got image_url (a vision record; ERNIEKit reads texts"),
        ({"type": "image"}, "got image (a vision record;"),
        ({"type": "video"}, "got video (a video record;"),
        ({"type": "file"}, "got {'type': 'file'}"),
        ("text", "got 'text'"),
    ],
)
def test_other_parts_are_refused_by_name(part, told):
    messages = [message("user", [{"type": "text", "text": "q"}, part]), message("assistant", "a")]
    refused = refusal("messages", messages=messages)
    assert refused.startswith(
        "messages[0].content[1]: expected a string or parts of type text, audio or units, " + told
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"price": "15 €"}], '[{"price": "15 €"}]'),
        ({"price": 15}, '{"price": 15}'),
        ([], "[]"),
        ([{"type": "text", "text": "15"}], "15"),
        ("15", "15"),
    ],
)
def test_a_tools_result_is_text_parts_or_json(content, text):
    call = message("assistant", None, tool_calls=[{"type": "function", "function": ADD}])
    talk = [message("user", "q"), call, message("tool", content), message("assistant", "a")]
    assert parse("messages", messages=talk).turns[2] == Turn("tool", text, False, {"content": text})


def test_developer_means_system():
    talk = [message("developer", "s"), message("user", "q"), message("assistant", "a")]
    assert parse("messages", messages=talk) == Conversation(EXCHANGE.turns, "s")


def test_a_user_may_write_twice():
    talk = [message("user", "q"), message("user", "r"), message("assistant", "a")]
    conversation = parse("messages", messages=talk)
    assert conversation == Conversation((user("q"), user("r"), assistant("a")))
    assert conversation.rounds == 2
    assert conversation.drop_oldest_rounds(1) == Conversation((user("r"), assistant("a")))


def test_a_label_beside_the_messages_names_the_answers_that_are_trained():
    talk = [message("user", "q"), message("assistant", "a"), message("user", "r"), message("assistant", "b")]
    assert [turn.trained for turn in parse("messages", messages=talk, label=[0, 1]).turns] == [
        False,
        False,
        False,
        True,
    ]
    assert parse("messages", messages=talk[:2], label=1) == EXCHANGE
    assert "label: expected one 0 or 1 for each assistant message (2), got 1" in refusal(
        "messages", messages=talk, label=[1]
    )
    own = [talk[0], {**talk[1], "weight": 1}]
    assert "either its own label or weight" in refusal("messages", messages=own, label=[1])
    with pytest.raises(NothingToTrainError):
        parse("messages", messages=talk, label=[0, 0])


@pytest.mark.parametrize("kind", ["alpaca", "messages", "sharegpt", "prompt_completion"])
def test_white_space_is_kept(kind):
    code = "\n  code:\n    x\n"
    records = {
        "alpaca": {"instruction": code, "output": code, "system": code},
        "messages": {"messages": [message("system", code), message("user", code), message("assistant", code)]},
        "sharegpt": {"conversations": [says("system", code), says("human", code), says("gpt", code)]},
        "prompt_completion": {"prompt": code, "completion": code, "system": code},
    }
    assert parse(kind, **records[kind]) == Conversation((user(code), assistant(code)), code)


def test_erniekit_is_stripped_as_upstream_does():
    assert parse("erniekit", src=["\n q "], tgt=[" a\n"]) == EXCHANGE


# What is not read


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"images": ["1.png"]}, "images: expected dialogues, got a vision record; ERNIEKit does not read images"),
        ({"image_info": [{"image_url": "1.png"}]}, "images: expected dialogues, got a vision record"),
        ({"videos": ["1.mp4"]}, "videos: expected dialogues, got a video record"),
        ({"kto_tag": True}, "label: expected dialogues, got an answer with a verdict; write stage: KTO to train it"),
        ({"label": False}, "label: expected dialogues, got an answer with a verdict; write stage: KTO to train it"),
    ],
)
def test_records_of_other_kinds_are_refused_with_the_reason(record, told):
    messages = [message("user", "<image>q"), message("assistant", "a")]
    assert refusal("messages", messages=messages, **record).startswith(told)


def test_a_word_is_no_image_and_an_empty_list_none():
    messages = [message("user", "<image> is an element of SVG"), message("assistant", "yes")]
    assert parse("messages", messages=messages, images=[]).turns[0].content == "<image> is an element of SVG"


def test_unpaired_records_of_trl_are_kto():
    assert "got an answer with a verdict" in refusal("prompt_completion", prompt="q", completion="a", label=True)


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        ("erniekit", {"src": "q", "tgt": " "}),
        ("alpaca", {"instruction": "q", "output": ""}),
        ("messages", {"messages": [message("user", "q"), message("assistant", "")]}),
        ("text", {"text": "\n"}),
        ("erniekit preferences", {"src": "q", "response": ["a", "a"], "sort": [1, 0]}),
        ("erniekit preferences", {"src": "q", "response": ["a", "b"], "sort": [1, 1]}),
        ("alpaca preferences", {"question": "q", "chosen": "", "rejected": "b"}),
        ("sharegpt preferences", {"conversations": [says("human", "q")], "chosen": "a", "rejected": "a"}),
    ],
)
def test_records_that_train_nothing_are_told_from_malformed_ones(kind, record):
    with pytest.raises(NothingToTrainError) as caught:
        parse(kind, **record)
    assert caught.value.effect is Effect.SKIP


# One dialogue, however it is written


TEXTS = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=20).map(
    lambda text: text if text.strip() else f"x{text}"
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4), st.one_of(st.just(""), TEXTS))
def test_every_format_reads_the_same_dialogue(rounds, system):
    turns = [(role, text) for pair in rounds for role, text in zip(("user", "assistant"), pair, strict=True)]
    expected = Conversation(tuple(Turn(role, text, role == "assistant") for role, text in turns), system)
    own = {"system": system} if system else {}
    *before, (question, answer) = rounds
    assert (
        parse("messages", messages=[message("system", system)] * bool(system) + [message(*t) for t in turns])
        == expected
    )
    speakers = {"user": "human", "assistant": "gpt"}
    assert parse("sharegpt", conversations=[says(speakers[role], text) for role, text in turns], **own) == expected
    history = [list(pair) for pair in before]
    assert parse("alpaca", instruction=question, output=answer, history=history, **own) == expected
    questions, answers = ([text.strip() for text in texts] for texts in zip(*rounds, strict=True))
    stripped = Conversation(tuple(Turn(t.role, t.content.strip(), t.trained) for t in expected.turns), system.strip())
    assert parse("erniekit", src=questions, tgt=answers, **own) == stripped


JSON = st.recursive(
    st.sampled_from([None, True, 0, 1, -1, 2.5, "", " ", "a", "\ud800", "human", "user", "assistant", "gpt"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "type", "text", "tool_calls", "function", "label"]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("kind", FORMATS)
def test_any_json_is_a_record_or_a_problem(kind, data):
    names = st.sampled_from(sorted({*FORMATS[kind].fields, "images", "kto_tag"}))
    record = data.draw(st.dictionaries(names, JSON, max_size=4))
    try:
        parsed = parse_record(FORMATS[kind], record)
    except MalformedError as error:
        assert error.field and error.expected and error.got
    else:
        assert json.dumps(repr(parsed)).isascii()


# Recognising a file's format


EXAMPLES = {
    "erniekit": {"src": "q", "tgt": "a"},
    "alpaca": {"instruction": "q", "input": "", "output": "a"},
    "messages": {"messages": [message("user", "q"), message("assistant", "a")]},
    "sharegpt": {"conversations": [says("human", "q"), says("gpt", "a")]},
    "prompt_completion": {"prompt": "q", "completion": "a"},
    "asr": {"audio_path": "tests/data/conftest.py", "text": "a"},
    "aligned_units": {"units": [1, 1, 2], "words": [{"word": "a", "start": 0, "end": 0.06}]},
    "token_ids": {"input_ids": [1, 5, 6], "labels": [-100, 5, 6]},
    "text": {"text": "a"},
    "codes": {"text": "a", "codes": [[1, 2], [3, 4]]},
    "erniekit preferences": {"src": ["q"], "tgt": [], "response": [["a"], ["b"]], "sort": [1, 0]},
    "alpaca preferences": {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
    "messages preferences": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "sharegpt preferences": {
        "conversations": [says("human", "q")], "chosen": says("gpt", "a"), "rejected": says("gpt", "b"),
    },
}  # fmt: skip
EXAMPLES |= {
    f"{name} verdicts": {**EXAMPLES[name], "label": name != "alpaca"}
    for name in ("erniekit", "alpaca", "messages", "sharegpt", "prompt_completion")
}


def test_there_is_an_example_of_every_format():
    assert EXAMPLES.keys() == FORMATS.keys()
    for kind, record in EXAMPLES.items():
        parse(kind, **record)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_files_format_is_found_among_those_of_the_stage(kind, write_jsonl):
    path = write_jsonl([EXAMPLES[kind], EXAMPLES[kind]])
    for declared in [other for other, form in FORMATS.items() if form.records == FORMATS[kind].records]:
        assert recognise(path, declared) == kind


@pytest.mark.parametrize("declared", FORMATS)
def test_what_another_stage_trains_is_told(declared, write_jsonl):
    for kind, record in EXAMPLES.items():
        if (declared, kind) == ("codes", "asr"):
            assert recognise(write_jsonl([record]), declared) == declared  # reading says: make codes of them first
        elif FORMATS[declared].records == "tokens" and FORMATS[kind].records not in ("pairs", "verdicts", "codes"):
            assert recognise(write_jsonl([record]), declared) == kind  # which stage SFT or PT may read, too
        elif FORMATS[kind].records not in (FORMATS[declared].records, "tokens"):
            problem = recognise(write_jsonl([record]), declared)
            assert isinstance(problem, RecordProblem), (kind, declared)
            assert "write stage: " in problem.got and f"which stage {STAGE[declared]} reads" in problem.expected


_STAGES = {
    "text": "PT",
    "dialogues": "SFT",
    "pairs": "DPO or RM",
    "verdicts": "KTO",
    "tokens": "PT or SFT",
    "codes": "TTS",
}
STAGE = {kind: _STAGES[form.records] for kind, form in FORMATS.items()}


def test_nothing_is_recognised_where_it_is_not_certain(write_jsonl):
    broken = [{"tgt": "a"}, EXAMPLES["alpaca"]]
    assert recognise(write_jsonl(broken), "erniekit") == "erniekit"  # the first two differ
    assert recognise(write_jsonl(["no json", EXAMPLES["alpaca"]]), "erniekit") == "erniekit"
    assert recognise(write_jsonl([EXAMPLES["erniekit"], EXAMPLES["alpaca"]]), "erniekit") == "erniekit"
    both = {**EXAMPLES["alpaca"], **EXAMPLES["messages"]}
    assert str(recognise(write_jsonl([both]), "sharegpt")).endswith(
        "got what could be alpaca or messages: write which it is"
    )
    assert recognise(write_jsonl([{"scr": "q", "tgt": "a"}]), "erniekit") == "erniekit"


def test_fields_of_no_format_are_named_once(write_jsonl):
    problem = recognise(write_jsonl([{"question": "q", "answer": "a"}] * 5), "erniekit")
    assert str(problem).endswith(
        "format: expected records of one of the formats erniekit (src, tgt), alpaca (instruction, output), messages "
        "(messages), sharegpt (conversations), prompt_completion (prompt, completion), asr (audio_path, "
        "text), aligned_units (units, words), token_ids (input_ids, labels), got the fields answer, question, which no "
        "format has"
    )


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"scr": "q", "tgt": "a"}, "src: expected a string or a list of strings, got nothing, but scr: did you mean"),
        ({"src": "q", "target": "a"}, "tgt: expected a string or a list of strings, got nothing"),
        ({"Src": "q", "tgt": "a"}, "src: expected a string or a list of strings, got nothing, but Src: did you mean"),
    ],
)
def test_a_misspelt_field_is_named(record, told):
    assert refusal("erniekit", **record).startswith(told)


def test_the_examples_of_the_documentation_are_of_the_formats_that_they_stand_under(tmp_path):
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "0001.wav").write_bytes(b"x")
    text = (PROJECT / "docs" / "data.md").read_text(encoding="utf-8")
    formats = text.partition("\n## Formats\n")[2].partition("\n### Tools\n")[0]
    pairs = text.partition("\n## Preference pairs\n")[2].partition("\n### Long pairs\n")[0]
    verdicts = text.partition("\n## Answers with a verdict\n")[2].partition("\n## ")[0]
    shown = []
    for section, suffix in ((formats, ""), (pairs, " preferences"), (verdicts, " verdicts")):
        for name, example in re.findall(r"^`(\w+)`:.*\n\n```json\n(.*)\n```$", section, re.MULTILINE):
            kind = name + suffix
            record = json.loads(example)
            parse_record(FORMATS[kind], record, [str(tmp_path)])
            assert [other for other, form in FORMATS.items() if form.fits(record)] == [kind]
            shown.append(kind)
    assert shown == list(FORMATS)


def test_the_names_of_formats_are_those_of_the_parameters():
    from erniekit.config.registry import PARAMETERS

    names = {form.name for form in FORMATS.values()}
    assert names == set(PARAMETERS["eval_dataset_type"].choices)
    assert names | {"packed"} == set(PARAMETERS["train_dataset_type"].choices)
    assert len(PAIR_KINDS) == 4 and len(DIALOGUE_KINDS) == 6


def test_brackets_nested_too_deeply_are_a_problem():
    call = {"type": "function", "function": {"name": "add", "arguments": "[" * 200_000}}
    talk = [message("user", "q"), message("assistant", None, tool_calls=[call])]
    assert "arguments: expected a JSON object" in refusal("messages", messages=talk)
