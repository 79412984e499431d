"""Our jinja rendering against transformers' apply_chat_template."""

from __future__ import annotations

import json

import pytest
import transformers

from erniekit.data.conversation import Conversation
from erniekit.data.formats.registry import read_records
from erniekit.data.templates.ernie import encode_prompt
from erniekit.data.templates.jinja import JinjaTemplate
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from tests.data.conftest import CONTROL_TOKENS, write_tokenizer
from tests.data.test_jinja_template import CASES, ERNIE_LIKE, RECORDED, TEMPLATES, as_messages
from tests.data.test_tool_calls import RECORDS, WITH_TOOLS

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    def load(source: str):
        control_tokens = (*CONTROL_TOKENS, "<|im_start|>", "<|im_end|>", "<|eot|>")
        folder = write_tokenizer(tmp_path_factory.mktemp("jinja"), control_tokens, chat_template=source)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
        return load_tokenizer(folder), theirs

    return load


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*TEMPLATES, "ernie"])
def test_texts_and_tokens_equal_those_of_transformers(both, name, case):
    conversation = CASES[case]
    tokenizer, theirs = both({**TEMPLATES, "ernie": ERNIE_LIKE}[name])
    ours = JinjaTemplate(tokenizer)
    expected = theirs.apply_chat_template(as_messages(conversation), tokenize=False)
    rendered = "".join(part.text for part in ours.render(conversation))
    # what follows the last end-of-turn token is never a target and is left out of samples
    assert expected.startswith(rendered)
    assert not expected[len(rendered) :].strip()

    asked = Conversation(conversation.turns[:-1], conversation.system)
    expected = theirs.apply_chat_template(as_messages(asked), tokenize=False, add_generation_prompt=True)
    assert "".join(part.text for part in ours.render(asked)) == expected
    if len(asked.turns) == 1:  # one segment: nothing is tokenised apart
        assert encode_prompt(ours, tokenizer, asked) == theirs.encode(expected, add_special_tokens=False)


def test_white_space_of_texts_is_kept_as_transformers_keeps_it(both, tmp_path):
    code = "\n  code:\n    x\n"
    messages = [{"role": role, "content": code} for role in ("system", "user", "user", "assistant")]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": messages}), encoding="utf-8")
    ((_, conversation),) = read_records(path, "messages")
    tokenizer, theirs = both(TEMPLATES["chatml"])
    expected = theirs.apply_chat_template(messages, tokenize=False)
    rendered = "".join(part.text for part in JinjaTemplate(tokenizer).render(conversation))
    assert expected.startswith(rendered) and not expected[len(rendered) :].strip()


@pytest.mark.parametrize("name", RECORDS)
def test_tools_and_calls_render_as_transformers_renders_them(both, name, tmp_path):
    record = RECORDS[name]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
    ((_, conversation),) = read_records(path, "messages")
    tokenizer, theirs = both(WITH_TOOLS)
    ours = JinjaTemplate(tokenizer)
    expected = theirs.apply_chat_template(record["messages"], tools=record.get("tools"), tokenize=False)
    rendered = "".join(part.text for part in ours.render(conversation))
    assert expected.startswith(rendered) and not expected[len(rendered) :].strip()

    asked = Conversation(conversation.turns[:-1], conversation.system, conversation.tools)
    expected = theirs.apply_chat_template(
        record["messages"][:-1], tools=record.get("tools"), tokenize=False, add_generation_prompt=True
    )
    assert "".join(part.text for part in ours.render(asked)) == expected


def test_named_tokens_and_vocabulary_equal_those_of_transformers(both):
    ours, theirs = both(TEMPLATES["chatml"])
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert ours.vocab_size == len(theirs)


def test_the_recorded_texts_are_those_of_transformers(both):
    """`python -m tests.parity.test_template` writes them anew."""
    assert json.loads(RECORDED.read_text(encoding="utf-8"))["texts"] == record(lambda source: both(source)[1])


def record(load) -> dict[str, dict[str, str]]:
    sources = {**TEMPLATES, "ernie": ERNIE_LIKE}
    return {
        name: {case: load(source).apply_chat_template(as_messages(CASES[case]), tokenize=False) for case in CASES}
        for name, source in sources.items()
    }


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    def load(source: str):
        folder = write_tokenizer(Path(tempfile.mkdtemp()), (*CONTROL_TOKENS, "<|im_start|>", "<|im_end|>", "<|eot|>"))
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
        theirs.chat_template = source
        return theirs

    content = {"made_with": f"transformers {transformers.__version__}", "texts": record(load)}
    RECORDED.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
