from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.data.conversation import Conversation, Turn
from erniekit.data.open_dataset import open_dataset
from erniekit.data.templates.ernie import (
    IGNORE_INDEX,
    ErnieTemplate,
    RewritesTurnsError,
    Segment,
    TemplateRefusedError,
    chat_template,
    encode_prompt,
    encode_sample,
)
from erniekit.data.templates.jinja import JinjaTemplate
from erniekit.data.templates.samples import render_samples
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import DataError, ModelFileError
from tests.data.conftest import CONTROL_TOKENS, write_tokenizer

CHATML = """{% for message in messages %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
# the shape of Llama-3's: bos once, headers, trimmed contents, raise_exception, {% generation %}
HEADERS = """{{ bos_token }}{% for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('role?') }}{% endif %}
{{- '[' + message.role + ']\\n\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}<|eot|>{% endgeneration %}
{%- else %}{{ message.content | trim + '<|eot|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]\\n\\n' }}{% endif %}"""
# the shape of Llama-2's: the user turn brings its own bos, the system text stands inside the first one
BRACKETS = """{% if messages[0].role == 'system' %}{% set system = '<<SYS>>' + messages[0].content + '<</SYS>>' %}
{%- set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}{% if message.role == 'user' %}
{{- bos_token + '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content + ' ' + eos_token }}{% endif %}{% endfor %}"""
ERNIE_LIKE = """{{- '<|begin_of_sentence|>' -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{- message.content + '\\n' -}}
{%- elif message.role == 'user' -%}{{- 'User: ' + message.content + '\\n' -}}
{%- else -%}{{- 'Assistant: ' + message.content + '<|end_of_sentence|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant: ' -}}{%- endif -%}"""
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "brackets": BRACKETS}

DIALOGUE = Conversation(
    (Turn("user", "q1"), Turn("assistant", "six", False), Turn("user", "q2"), Turn("assistant", "two", True)),
    "Be brief.",
)
CASES = {
    "with-system": DIALOGUE,
    "without-system": Conversation(DIALOGUE.turns),
    "unicode": Conversation((Turn("user", " Grüße 你好 {{ x }} "), Turn("assistant", '<b>& "quoted"</b>', True))),
}
RECORDED = Path(__file__).with_name("recorded_templates.json")  # what transformers renders


def as_messages(conversation: Conversation) -> list[dict[str, str]]:
    system = [{"role": "system", "content": conversation.system}] if conversation.system else []
    return system + [{"role": turn.role, "content": turn.content} for turn in conversation.turns]


@pytest.fixture(scope="module")
def folder_with(tmp_path_factory):
    def make(template: str, **config):
        control_tokens = (*CONTROL_TOKENS, "<|im_start|>", "<|im_end|>", "<|eot|>")
        folder = write_tokenizer(tmp_path_factory.mktemp("jinja"), control_tokens, **config)
        (folder / "chat_template.jinja").write_text(template)
        return load_tokenizer(folder)

    return make


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*TEMPLATES, "ernie"])
def test_texts_equal_those_recorded_from_transformers(folder_with, name, case):
    template = JinjaTemplate(folder_with({**TEMPLATES, "ernie": ERNIE_LIKE}[name]))
    rendered = "".join(part.text for part in template.render(CASES[case]))
    expected = json.loads(RECORDED.read_text(encoding="utf-8"))["texts"][name][case]
    assert expected.startswith(rendered)
    assert not expected[len(rendered) :].strip()  # what follows the last end-of-turn token is left out


def test_chatml_segments(folder_with):
    tokenizer = folder_with(CHATML)
    template = chat_template(tokenizer)
    assert [(part.text, part.trained) for part in template.render(DIALOGUE)] == [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n", False),
        ("six<|im_end|>", False),
        ("\n<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n", False),
        ("two<|im_end|>", True),
    ]
    assert template.stop_token_ids == (tokenizer.token_id("<|im_end|>"), tokenizer.eos_id)


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_targets_are_the_answer_and_its_end_and_prompts_are_prefixes(folder_with, source):
    tokenizer = folder_with(source)
    template = chat_template(tokenizer)
    sample = encode_sample(template, tokenizer, DIALOGUE)
    target_text = tokenizer.decode([int(t) for t in sample.labels if t != IGNORE_INDEX], skip_special_tokens=False)
    end = tokenizer.decode([template.stop_token_ids[0]], skip_special_tokens=False)
    assert target_text.strip().replace(" ", "") == f"two{end}"
    for turns in (1, 3):
        prompt = encode_prompt(template, tokenizer, Conversation(DIALOGUE.turns[:turns], DIALOGUE.system))
        assert sample.input_ids[: len(prompt)].tolist() == prompt
    assert encode_sample(template, tokenizer, DIALOGUE).labels[-1] == template.stop_token_ids[0]


def test_a_template_that_renders_like_ernie_becomes_ernies_own(folder_with):
    tokenizer = folder_with(ERNIE_LIKE)
    template = chat_template(tokenizer)
    assert isinstance(template, ErnieTemplate)
    # and indeed the texts are equal
    own, jinja = template.render(DIALOGUE), JinjaTemplate(tokenizer).render(DIALOGUE)
    assert [part.text for part in own] == [part.text for part in jinja]


@pytest.mark.parametrize(
    ("plain", "other"),
    [
        ("message.content + '<|end_of_sentence|>'", "message.content.split('</think>')[-1] + '<|end_of_sentence|>'"),
        ("'User: ' + message.content", "'User: ' + message.content | trim"),
        ("message.content + '\\n' -", "(message.content | trim) + '\\n' -"),
        ("{%- for message", "{%- if messages[-1].role == 'user' -%}{{- ' ' -}}{%- endif -%}{%- for message"),
        ("{%- for message", "{%- if messages | length > 6 -%}{{- ' ' -}}{%- endif -%}{%- for message"),
    ],
    ids=["drops thoughts", "trims questions", "trims a system text", "marks a prompt", "marks a long dialogue"],
)
def test_a_template_that_differs_anywhere_is_never_replaced(folder_with, plain, other):
    assert plain in ERNIE_LIKE
    template = chat_template(folder_with(ERNIE_LIKE.replace(plain, other, 1)))
    assert isinstance(template, JinjaTemplate)


def test_named_templates_are_chosen_as_transformers_does(folder_with, tmp_path):
    """`tool_use` where a dialogue lists tools, and there is such a template; else `default`."""
    called = "{%- for call in message.tool_calls or [] %}{{ call }}{% endfor %}"
    with_tools = "{{ tools | length }} tools\n" + CHATML.replace("<|im_end|>", called + "<|im_end|>")
    folder = write_tokenizer(
        tmp_path, (*CONTROL_TOKENS, "<|im_start|>", "<|im_end|>"),
        chat_template=[{"name": "default", "template": CHATML}, {"name": "tool_use", "template": with_tools}],
    )  # fmt: skip
    template = chat_template(load_tokenizer(folder))
    equipped = Conversation(DIALOGUE.turns, tools=({"name": "add"},))
    first, second, third = template.render_many([DIALOGUE, equipped, DIALOGUE])
    assert first == third == template.render(DIALOGUE) and first[0].text.startswith("<|im_start|>system")
    assert second[0].text.startswith("1 tools\n<|im_start|>user")

    (folder / "chat_template.jinja").write_text("new" + CHATML)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("newer" + with_tools)
    tokenizer = load_tokenizer(folder)
    texts = [chat_template(tokenizer).render(each)[0].text for each in (DIALOGUE, equipped)]
    assert texts[0].startswith("new<|im_start|>") and texts[1].startswith("newer1 tools")
    assert folder / "additional_chat_templates" / "tool_use.jinja" in tokenizer.files


def test_thoughts_that_a_template_leaves_out_are_never_lost(folder_with):
    """It mentions `reasoning_content`, and shows it of the first answer only."""
    shy = CHATML.replace(
        "{{ message['content'] }}", "{{ message.reasoning_content if loop.index == 2 }}{{ message.content }}"
    )
    template = chat_template(folder_with(shy))
    answers = [Turn("assistant", "six", True, thoughts="why six"), Turn("assistant", "two", True, thoughts="why two")]
    assert template.render(Conversation((DIALOGUE.turns[0], answers[0])))[-1].text == "why sixsix<|im_end|>"
    with pytest.raises(TemplateRefusedError, match="leaves out the `reasoning_content`"):
        template.render(Conversation((DIALOGUE.turns[0], answers[0], DIALOGUE.turns[2], answers[1])))


FORGETTING = CHATML.replace(
    "{{ message['content'] }}",
    "{{ message['content'] if loop.last or message.role != 'assistant' else 'gone' }}",
)


def test_answers_that_a_template_rewrites_later_are_samples_of_their_own(folder_with, make_source, tmp_path):
    tokenizer = folder_with(FORGETTING)
    template = chat_template(tokenizer)
    both = Conversation((*DIALOGUE.turns[:1], Turn("assistant", "six", True), *DIALOGUE.turns[2:]))
    with pytest.raises(RewritesTurnsError) as caught:
        template.render(both)
    assert str(tokenizer.template_path) in str(caught.value) and "gone" in str(caught.value)

    ((first, second),) = render_samples(template, [both], None)
    assert [(part.text, part.trained) for part in first.segments] == [
        ("<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n", False), ("six<|im_end|>", True),
    ]  # fmt: skip
    history = "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\ngone<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n"
    assert [(part.text, part.trained) for part in second.segments] == [
        (history + "<|im_start|>assistant\n", False), ("two<|im_end|>", True),
    ]  # fmt: skip
    # a dialogue of which only the last answer is trained needs no splitting, and prompts none either
    assert template.render(DIALOGUE)[-1] == Segment("two<|im_end|>", True)
    assert encode_prompt(template, tokenizer, Conversation(both.turns[:3])) == tokenizer.encode(
        history + "<|im_start|>assistant\n"
    )

    record = {"src": ["q1", "q2"], "tgt": ["six", "two"]}
    source = make_source([record, {"src": "q", "tgt": "a"}])
    options = {"max_seq_len": 256, "cache_dir": tmp_path / "cache"}
    dataset = open_dataset([source], tokenizer, template, **options)
    assert [dataset.location(index).rsplit(":")[-1] for index in range(3)] == ["1", "1", "2"] and len(dataset) == 3
    assert "1 split into a sample for each answer" in str(dataset.report)
    with pytest.raises(DataError, match=r"data\.jsonl:1: record: .*split_multi_turn"):
        open_dataset([source], tokenizer, template, **options, split_multi_turn=False)


def test_any_dialogue_can_be_split(folder_with, make_source, tmp_path):
    tokenizer = folder_with(CHATML)
    source = make_source([{"src": ["q1", "q2", "q3"], "tgt": ["six", "two", "one"], "label": [1, 0, 1]}])
    template, options = chat_template(tokenizer), {"max_seq_len": 256, "cache_dir": tmp_path / "cache"}
    whole = open_dataset([source], tokenizer, template, **options)
    split = open_dataset([source], tokenizer, template, **options, split_multi_turn=True)
    assert (len(whole), len(split)) == (1, 2) and whole.fingerprint != split.fingerprint
    ids, labels = whole.sample(0).input_ids, whole.sample(0).labels
    for index in range(2):  # each sample is the beginning of the dialogue, up to its answer
        part = split.sample(index)
        assert part.input_ids.tolist() == ids[: len(part.input_ids)].tolist()
        targets = [token for token in part.labels if token != IGNORE_INDEX]
        assert tokenizer.decode(targets) == ("six", "one")[index]
        assert set(labels.tolist()) >= set(targets)


def test_of_a_split_dialogue_the_answers_that_fit_are_kept(folder_with, make_source, tmp_path):
    tokenizer = folder_with(FORGETTING)
    records = [
        {"src": ["q", "long " * 60], "tgt": ["a", "b"]}, {"src": ["long " * 60, "q"], "tgt": ["a", "b"]},
        {"src": ["long " * 60, "long " * 60], "tgt": ["a", "b"]},
    ]  # fmt: skip
    dataset = open_dataset(
        [make_source(records)], tokenizer, chat_template(tokenizer), max_seq_len=60, over_length="truncate_turns",
        cache_dir=tmp_path / "cache",
    )  # fmt: skip
    (report,) = dataset.report.sources
    assert [dataset.location(index).rsplit(":")[-1] for index in range(len(dataset))] == ["1", "2"]
    assert (report.dropped, report.dropped_answers, report.truncated, report.kept) == (1, 2, 1, 2)


def test_a_generation_prompt_that_the_dialogue_does_not_repeat_is_refused(folder_with):
    thinking = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    template = chat_template(folder_with(thinking))
    with pytest.raises(DataError, match="begins answers where the generation prompt ends"):
        template.render(Conversation(DIALOGUE.turns[:1] + DIALOGUE.turns[3:]))
    (prompt,) = template.render(Conversation(DIALOGUE.turns[:3]))  # which `chat` feeds, is rendered all the same
    assert prompt.text.endswith("<|im_start|>assistant\n<think>\n")


def test_a_template_whose_answers_have_no_end_is_refused(folder_with):
    with pytest.raises(DataError, match="would not learn to stop"):
        chat_template(folder_with("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"))


def test_a_broken_template_names_its_line(folder_with):
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja: chat_template, line 2: "):
        chat_template(folder_with("{% for m in messages %}\n{% endif %}"))


def test_a_refused_dialogue_carries_the_templates_own_words(folder_with):
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system text, please') }}{% endif %}" + CHATML
    template = chat_template(folder_with(source))
    assert template.render(Conversation(DIALOGUE.turns))
    with pytest.raises(TemplateRefusedError, match="no system text, please"):
        template.render(DIALOGUE)


def test_an_expression_that_fails_is_told_as_the_templates_fault(folder_with):
    template = chat_template(folder_with("{% if messages[0].role == 'system' %}{{ 1 + '1' }}{% endif %}" + CHATML))
    with pytest.raises(TemplateRefusedError, match="unsupported operand"):
        template.render(DIALOGUE)


def test_templates_are_sandboxed(folder_with):
    with pytest.raises(DataError, match="chat_template"):
        chat_template(folder_with("{{ messages.__class__.__mro__[1].__subclasses__() }}" + CHATML))
    with pytest.raises(DataError, match="chat_template"):
        chat_template(folder_with("{{ messages.append(1) }}" + CHATML))


def test_helpers_that_templates_rely_on(folder_with):
    head = "{{ strftime_now('%Y')[:2] }}{{ {'a': '<ä>'} | tojson }}{% for i in range(9) %}{% break %}{% endfor %}\n"
    tokenizer = folder_with(head + CHATML)
    assert chat_template(tokenizer).render(DIALOGUE)[0].text.startswith('20{"a": "<ä>"}')
