"""Messages with tools: what is read, what is trained, what is refused. tests/parity compares the text."""

from __future__ import annotations

import json

import pytest

from erniekit.data.conversation import Conversation
from erniekit.data.formats.problems import RecordProblem
from erniekit.data.formats.registry import FORMATS, read_records
from erniekit.data.formats.unused_fields import UnusedFields
from erniekit.data.open_dataset import open_dataset
from erniekit.data.templates.ernie import ErnieTemplate, TemplateRefusedError, chat_template, encode_sample
from erniekit.data.templates.jinja import JinjaTemplate
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import DataError
from erniekit.inference.prompts import read_prompts
from tests.data.conftest import CONTROL_TOKENS, write_tokenizer
from tests.data.test_jinja_template import CHATML

# a format of our own: tools in the first turn, calls as JSON a line, results of one round together
WITH_TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\\ntools: ' }}{% for tool in tools %}{{ tool | tojson }};{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' or message.role == 'function' %}"
    "{{- '<|im_start|>results\\n' if loop.first or messages[loop.index0 - 1].role != message.role else '' }}"
    "{{- (message.name or message.tool_call_id or '') + '=' + message.content + '\\n' }}"
    "{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != message.role else '' }}"
    "{%- else %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{{- message.content if message.content is string else '' }}"
    "{%- for call in message.tool_calls or [] %}{% set f = call.function or call %}"
    "{{- '\\n<call>' + f.name + ' ' + (f.arguments if f.arguments is string else f.arguments | tojson) }}"
    "{%- endfor %}{{ '<|im_end|>\\n' }}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "the sum", "parameters": {"type": "object", "properties": {}}},
    }
]


def call(name, arguments, **more):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


RECORDS = {
    "one call without content": {
        "tools": TOOLS,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": None, "tool_calls": [call("add", {"a": 1, "b": 2}, id="c1")]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            {"role": "assistant", "content": "three"},
        ],
    },
    "several calls with content, twice, in German": {
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": "1 + 2, und 3 + 4?"},
            {"role": "assistant", "content": "Für beide:", "tool_calls": [call("add", {"a": "ä"}), call("add", {})]},
            {"role": "tool", "name": "add", "content": "3"},
            {"role": "tool", "name": "add", "content": "7"},
            {"role": "assistant", "tool_calls": [call("add", '{"a": 3, "b": 7}')]},
            {"role": "tool", "content": "10"},
            {"role": "assistant", "content": "zehn"},
            {"role": "user", "content": "danke"},
            {"role": "assistant", "content": "bitte"},
        ],
    },
    "ends with a call": {
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": "", "tool_calls": [call("add", {})]},
        ],
    },
    "no tools listed, role function": {
        "messages": [
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": "", "tool_calls": [call("add", {})]},
            {"role": "function", "name": "add", "content": "3"},
            {"role": "assistant", "content": "three"},
        ],
    },
    "tools that are not called": {
        "tools": TOOLS,
        "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}],
    },
}


@pytest.fixture(scope="module")
def tokenizer_with(tmp_path_factory):
    def make(template):
        folder = write_tokenizer(
            tmp_path_factory.mktemp("tools"), (*CONTROL_TOKENS, "<|im_start|>", "<|im_end|>"), chat_template=template
        )
        return load_tokenizer(folder)

    return make


@pytest.fixture
def read(write_jsonl):
    def read(*records):
        return [
            item if isinstance(item, RecordProblem) else item[1]
            for item in read_records(write_jsonl(list(records)), "messages")
        ]

    return read


def test_calls_and_answers_are_trained_and_results_are_not(read, tokenizer_with):
    (conversation,) = read(RECORDS["several calls with content, twice, in German"])
    template = chat_template(tokenizer_with(WITH_TOOLS))
    segments = template.render(conversation)
    assert [part.text for part in segments if part.trained] == [
        'Für beide:\n<call>add {"a": "ä"}\n<call>add {}<|im_end|>',
        '\n<call>add {"a": 3, "b": 7}<|im_end|>',
        "zehn<|im_end|>",
        "bitte<|im_end|>",
    ]
    read_only = "".join(part.text for part in segments if not part.trained)
    assert "add=3\nadd=7\n" in read_only and "=10" in read_only and "tools: {" in read_only


def test_a_label_leaves_a_call_untrained(read, tokenizer_with):
    record = json.loads(json.dumps(RECORDS["one call without content"]))
    record["messages"][2]["label"] = 0
    (conversation,) = read(record)
    segments = chat_template(tokenizer_with(WITH_TOOLS)).render(conversation)
    assert [part.text for part in segments if part.trained] == ["three<|im_end|>"]


def test_the_older_function_call_is_one_call(read, tokenizer_with):
    new = RECORDS["ends with a call"]
    old = {**new, "messages": [new["messages"][0], {"role": "assistant", "content": "", "function_call": {}}]}
    old["messages"][1]["function_call"] = {"name": "add", "arguments": {}}
    first, second = read(new, old)
    template = chat_template(tokenizer_with(WITH_TOOLS))
    assert template.render(first) == template.render(second)


def test_tools_may_be_json_text(read):
    record = RECORDS["one call without content"]
    first, second = read(record, {**record, "tools": json.dumps(TOOLS)})
    assert first == second and first.tools == tuple(TOOLS)


def test_oldest_exchanges_go_with_their_calls_and_results(read):
    (conversation,) = read(RECORDS["several calls with content, twice, in German"])
    assert conversation.rounds == 2
    shorter = conversation.drop_oldest_rounds(1)
    assert [turn.content for turn in shorter.turns] == ["danke", "bitte"] and shorter.tools == conversation.tools
    assert conversation.drop_oldest_rounds(2).turns == ()


def test_a_prompt_may_end_with_a_result(write_jsonl, tokenizer_with):
    record = RECORDS["one call without content"]
    path = write_jsonl([{**record, "messages": record["messages"][:-1]}])
    (prompt,) = read_prompts(path)
    text = "".join(part.text for part in chat_template(tokenizer_with(WITH_TOOLS)).render(prompt.conversation))
    assert text.endswith("c1=3\n<|im_end|>\n<|im_start|>assistant\n") and prompt.reference is None


def user_then(*messages):
    return {"messages": [{"role": "user", "content": "q"}, *messages]}


MALFORMED = {
    "messages[1].tool_calls": user_then({"role": "assistant", "tool_calls": {}}),
    "messages[1].tool_calls[0].function.name": user_then({"role": "assistant", "tool_calls": [{"function": {}}]}),
    "messages[1].tool_calls[0].function.arguments": user_then(
        {"role": "assistant", "tool_calls": [call("add", "{broken")]}
    ),
    "messages[2].role": user_then(
        {"role": "assistant", "tool_calls": [call("add", {})]}, {"role": "user", "content": "what?"}
    ),
    "messages[1].role": user_then({"role": "tool", "content": "3"}),
    "messages[2].content": user_then({"role": "assistant", "tool_calls": [call("add", {})]}, {"role": "tool"}),
    "messages[1].content": user_then({"role": "assistant", "content": None}),
    "tools[0]": {**RECORDS["ends with a call"], "tools": [{"type": "function"}]},
    "tools": {**RECORDS["ends with a call"], "tools": "no json"},
    "messages": user_then(
        {"role": "assistant", "content": "", "tool_calls": [call("add", {})]}, {"role": "tool", "content": "3"}
    ),
}


@pytest.mark.parametrize("field", MALFORMED)
def test_malformed_calls_are_named(read, field):
    (problem,) = read(MALFORMED[field])
    assert isinstance(problem, RecordProblem) and problem.field == field


def test_templates_without_a_place_for_tools_refuse_them(
    read, tokenizer_with, tokenizer, template, make_source, tmp_path
):
    (conversation,) = read(RECORDS["one call without content"])
    with pytest.raises(TemplateRefusedError, match="no place for `tools`"):
        JinjaTemplate(tokenizer_with(CHATML)).render(conversation)
    with pytest.raises(TemplateRefusedError, match="no place for `tool_calls`"):
        JinjaTemplate(tokenizer_with(CHATML)).render(Conversation(conversation.turns))
    assert isinstance(template, ErnieTemplate)
    source = make_source([RECORDS["tools that are not called"], RECORDS["ends with a call"]], "messages")
    with pytest.raises(DataError, match=r"data\.jsonl:1: .*ERNIE-4\.5's dialogue format has no place") as error:
        open_dataset([source], tokenizer, template, max_seq_len=256, cache_dir=tmp_path)
    assert "data.jsonl:2" in str(error.value)


def test_control_tokens_in_calls_and_tools_are_ordinary_text(make_source, tokenizer_with, tmp_path):
    tokenizer = tokenizer_with(WITH_TOOLS)
    forged = user_then({"role": "assistant", "tool_calls": [call("add", {"a": "<|im_end|>"})]})
    described = {**RECORDS["ends with a call"], "tools": [{"name": "add", "description": "</s>"}]}
    source = make_source([forged, described], "messages")
    dataset = open_dataset([source], tokenizer, chat_template(tokenizer), max_seq_len=256, cache_dir=tmp_path)
    end, eos = tokenizer.token_id("<|im_end|>"), tokenizer.eos_id
    # of a user's turn, and of an answer: the label that takes its place; then of the tools, too
    assert [dataset.sample(index).input_ids.tolist().count(end) for index in range(2)] == [1, 2]
    assert eos not in dataset.sample(1).input_ids
    assert '"a": "<|im_end|>"' in tokenizer.decode(dataset.sample(0).labels.clip(0).tolist()[10:], False)


def test_fields_of_tools_are_used_only_where_they_are_read(tokenizer_with, read):
    unused = UnusedFields(FORMATS["messages"])
    for record in RECORDS.values():
        unused.add(1, record)
    assert unused.found() == []
    (conversation,) = read(RECORDS["one call without content"])
    tokenizer = tokenizer_with(WITH_TOOLS)
    assert len(encode_sample(chat_template(tokenizer), tokenizer, conversation).labels) > 0
