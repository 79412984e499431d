"""Training on the dialogue formats of the supported families, against texts that transformers rendered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from erniekit.data.conversation import Conversation
from erniekit.data.formats.registry import read_records
from erniekit.data.templates.ernie import (
    IGNORE_INDEX,
    ErnieTemplate,
    assemble,
    chat_template,
    encode_prompt,
    published_files,
)
from erniekit.data.templates.samples import render_samples
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import DataError
from tests.data.conftest import CONTROL_TOKENS, write_tokenizer
from tests.data.published_templates import DIALOGUES, FAMILIES, REFUSED

RECORDED = Path(__file__).with_name("recorded_published_templates.json")
CASES = [(family, case) for family in FAMILIES for case in DIALOGUES]


def write_family(folder: Path, family: str) -> Path:
    template, special, words, named = FAMILIES[family]
    write_tokenizer(folder, (*CONTROL_TOKENS, *special), chat_template=template, **named)
    path = str(folder / "tokenizer.json")
    library = Tokenizer.from_file(path)
    library.add_tokens([AddedToken(word, normalized=False) for word in words])
    library.save(path)
    return folder


def answers_of(case: str) -> list[int]:
    """The positions of the trained answers among the messages."""
    messages = DIALOGUES[case]["messages"]
    return [n for n, each in enumerate(messages) if each["role"] == "assistant" and each.get("weight", 1)]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    made = {}

    def open_(family):
        if family not in made:
            tokenizer = load_tokenizer(write_family(tmp_path_factory.mktemp("family"), family))
            made[family] = (tokenizer, chat_template(tokenizer))
        return made[family]

    return open_


@pytest.fixture
def conversation(tmp_path):
    def read(case: str) -> Conversation:
        path = tmp_path / "data.jsonl"
        path.write_text(json.dumps(DIALOGUES[case]), encoding="utf-8")
        ((_, record),) = read_records(path, "messages")
        return record

    return read


@pytest.mark.parametrize(("family", "case"), [each for each in CASES if each not in REFUSED])
def test_samples_are_what_transformers_renders_up_to_each_answer(opened, conversation, family, case):
    tokenizer, template = opened(family)
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["texts"][family][case]
    (samples,) = render_samples(template, [conversation(case)], None)
    assert not isinstance(samples, DataError), samples
    positions, learned = answers_of(case), []
    last = positions if len(samples) > 1 else positions[-1:]
    assert len(samples) == len(last)
    for position, sample in zip(last, samples, strict=True):
        encoded = assemble(sample.segments, tokenizer.encode_batch([part.text for part in sample.segments]), template)
        ids = [*encoded.input_ids.tolist(), tokenizer.token_id(END.get(family, tokenizer.special_tokens["eos_token"]))]
        before, whole = recorded["before"][str(position)], recorded["with"][str(position)]
        if family == "glm4":  # the header of the next message ends an answer
            ids[-1] = tokenizer.token_id(
                "<|observation|>" if DIALOGUES[case]["messages"][position].get("tool_calls") else "<|user|>"
            )
            assert ids[-1] in template.stop_token_ids
            whole += tokenizer.decode(ids[-1:], skip_special_tokens=False)
        if family == "mistral":  # its system text goes with the answer's coming; what is trained is what chat feeds
            whole = before + whole[whole.rindex(before[-7:]) + 7 :]
        prompt = encode_prompt(template, tokenizer, replace(sample.conversation, turns=sample.conversation.turns[:-1]))
        if (
            family.startswith("ernie") and family != "ernie-thinking"
        ):  # its answers follow a space, and are tokenized apart from it
            assert whole.startswith(tokenizer.decode(ids, skip_special_tokens=False))
            assert tokenizer.decode(prompt, skip_special_tokens=False) == before
            assert ids[: len(prompt)] == prompt
        else:
            assert prompt == tokenizer.encode(before) == ids[: len(prompt)]
            expected = tokenizer.encode(whole)
            assert ids == expected[: len(ids)]
            rest = tokenizer.decode(expected[len(ids) :], skip_special_tokens=False)
            assert rest.strip() in ("", GENERATION.strip())
        learned.append(tokenizer.decode([t for t in encoded.labels if t != IGNORE_INDEX], skip_special_tokens=False))
    contents = [DIALOGUES[case]["messages"][position] for position in positions]
    text = "".join(learned)
    for message in contents:
        assert message["content"].split("</think>")[-1].strip() in text
        assert message.get("reasoning_content", "") in text
    assert "Count" not in text and "1 + 2" not in text


END = {
    "ernie": "<|end_of_sentence|>", "ernie-written": "<|end_of_sentence|>",
    "ernie-thinking": "<|im_end|>", "gemma3": "<end_of_turn>",
}  # fmt: skip
GENERATION = "<|im_start|>assistant\n<think>\n"  # with which ERNIE-4.5-Thinking's template always ends


@pytest.mark.parametrize(("family", "case"), sorted(REFUSED))
def test_what_a_family_has_no_place_for_is_refused_with_the_reason(opened, conversation, family, case):
    _, template = opened(family)
    (refused,) = render_samples(template, [conversation(case)], None)
    assert isinstance(refused, DataError)
    assert any(word in str(refused) for word in ("no place for", "tools or tool calls", "reasoning_content", "thought"))


def test_a_model_without_a_template_is_published_with_one(opened, tmp_path):
    without = load_tokenizer(write_tokenizer(tmp_path))
    assert [path.name for path in published_files(without)][-1] == "chat_template.jinja"
    for family in ("ernie", "ernie-written"):
        tokenizer, template = opened(family)
        assert isinstance(template, ErnieTemplate) and published_files(tokenizer) == tokenizer.files
    assert (
        published_files(load_tokenizer(write_tokenizer(tmp_path / "other", CONTROL_TOKENS[:3])))[-1].suffix == ".json"
    )


def test_answers_that_the_next_header_ends(opened, conversation):
    """GLM-4 learns which header follows: a tool's after calls, the user's otherwise, and stops at both."""
    tokenizer, template = opened("glm4")
    ((sample,),) = render_samples(template, [conversation("tools")], None)
    ends = [part.text.rpartition("<")[1:] for part in sample.segments if part.trained]
    assert ends == [("<", "|observation|>"), ("<", "|user|>"), ("<", "|user|>")]
    assert "".join(part.text for part in sample.segments).count("<|observation|>") == 1
    words = ("<|user|>", "<|observation|>", "<|endoftext|>")
    assert template.stop_token_ids == tuple(tokenizer.token_id(word) for word in words)


def test_which_families_rewrite_turns(opened, conversation):
    """Those whose templates only append keep a dialogue in one sample."""
    for family, case, count in (
        ("qwen3", "two answers", 2), ("qwen3", "thoughts", 2), ("qwen3", "tools", 3), ("mistral", "two answers", 2),
        ("llama3", "tools", 1), ("qwen2.5", "tools", 1), ("granite", "tools", 1), ("gemma3", "two answers", 1),
    ):  # fmt: skip
        (samples,) = render_samples(opened(family)[1], [conversation(case)], None)
        assert (family, case, len(samples)) == (family, case, count)
