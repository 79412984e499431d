"""Our jinja rendering against transformers' apply_chat_template."""

from __future__ import annotations

import pytest

from erniekit.data.conversation import Conversation, Turn
from erniekit.data.jinja_template import JinjaTemplate
from erniekit.data.template import encode_prompt
from erniekit.data.tokenizer import load_tokenizer
from tests.data.conftest import CONTROL_TOKENS, write_tokenizer
from tests.data.test_jinja_template import DIALOGUE, ERNIE_LIKE, TEMPLATES

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

CASES = {
    "with-system": DIALOGUE,
    "without-system": Conversation(DIALOGUE.turns),
    "unicode": Conversation((Turn("user", " Grüße 你好 {{ x }} "), Turn("assistant", "<b>& \"quoted\"</b>", True))),
}  # fmt: skip


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    def load(source: str):
        control_tokens = (*CONTROL_TOKENS, "<|im_start|>", "<|im_end|>", "<|eot|>")
        folder = write_tokenizer(tmp_path_factory.mktemp("jinja"), control_tokens, chat_template=source)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
        return load_tokenizer(folder), theirs

    return load


def as_messages(conversation: Conversation) -> list[dict[str, str]]:
    system = [{"role": "system", "content": conversation.system}] if conversation.system else []
    return system + [{"role": turn.role, "content": turn.content} for turn in conversation.turns]


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


def test_named_tokens_and_vocabulary_equal_those_of_transformers(both):
    ours, theirs = both(TEMPLATES["chatml"])
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert ours.vocab_size == len(theirs)
