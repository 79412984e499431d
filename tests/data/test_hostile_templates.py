"""Chat templates are programs of others: they end with a sentence, in time, whatever they do."""

from __future__ import annotations

import os
import time

import pytest

from erniekit.data.conversation import Conversation, Turn
from erniekit.data.templates import render_process
from erniekit.data.templates.ernie import chat_template
from erniekit.data.templates.render_process import RENDER_PROCESS
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import UserError
from tests.data.conftest import CONTROL_TOKENS, write_tokenizer
from tests.data.test_jinja_template import CHATML

DIALOGUE = Conversation((Turn("user", "q"), Turn("assistant", "a", True)))
TIME, MEMORY, DEPTH = "s of processor time", "GiB of memory", "recurses too deeply"
HOSTILE = {
    "nested loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", TIME),
    "one operation that lasts": ("{{ ((10 + messages | length) ** (10 ** 8)) | string | length }}", TIME),
    "lorem ipsum": ("{{ lipsum(n=10**9) }}", TIME),
    "a text that doubles": (
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        f"{TIME}|{MEMORY}",
    ),
    "a list that doubles": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        f"{TIME}|{MEMORY}",
    ),
    "a wide format": ("{{ '%1000000000s' % 'x' }}", f"{TIME}|{MEMORY}"),
    "a huge constant": ("{{ 'a' * 10**10 }}", MEMORY),
    "a huge text": ("{{ 'a' * 100000000 }}", f"{TIME}|{MEMORY}"),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", DEPTH),
    "brackets": ("{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", DEPTH),
    "loops within loops": ("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, "nested blocks"),
    "a break outside": ("{% break %}", "outside loop"),
    "half a character": ("{{ '\\ud800' }}", "surrogates"),
    "a message that steers the terminal": ("{{ raise_exception('\x1b[31mred') }}", r"\\x1b\[31mred"),
    "a missing filter": ("{{ 1 | nothing }}", "nothing"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def little_time(monkeypatch):
    monkeypatch.setattr(render_process, "SECONDS", 0.3)
    monkeypatch.setattr(render_process, "MEMORY_BYTES", 400 << 20)
    RENDER_PROCESS.close()
    yield
    RENDER_PROCESS.close()  # the next test has one with the usual limits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("hostile"), (*CONTROL_TOKENS, "<|im_start|>", "<|im_end|>"))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_with_a_sentence(folder, name):
    source, reason = HOSTILE[name]
    (folder / "chat_template.jinja").write_text(source + CHATML)
    began = time.process_time(), os.times().children_user
    with pytest.raises(UserError, match=reason) as caught:
        chat_template(load_tokenizer(folder)).render(DIALOGUE)
    assert str(caught.value).startswith(f"{folder}/chat_template.jinja: chat_template")
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 500
    assert time.process_time() - began[0] < 2 and os.times().children_user - began[1] < 2

    (folder / "chat_template.jinja").write_text(CHATML)  # and the next template is rendered as ever
    assert chat_template(load_tokenizer(folder)).render(DIALOGUE)[-1].text == "a<|im_end|>"


def test_a_template_that_only_turns_hostile_with_the_data(folder):
    (folder / "chat_template.jinja").write_text(
        "{% if messages[0].content == 'q' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
        "{% endfor %}{% endif %}" + CHATML
    )
    template = chat_template(load_tokenizer(folder))
    with pytest.raises(UserError, match=TIME):
        template.render(DIALOGUE)
    other = Conversation((Turn("user", "other"), Turn("assistant", "a", True)))
    assert template.render(other)[-1].text == "a<|im_end|>"


def test_a_template_that_is_no_text(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe" + CHATML.encode())
    with pytest.raises(UserError, match=r"chat_template\.jinja: cannot be read: it is not UTF-8"):
        load_tokenizer(folder)


def test_a_forked_process_starts_its_own(folder):
    """The pipes of its parent's would mix both programs' answers."""
    (folder / "chat_template.jinja").write_text(CHATML)
    template = chat_template(load_tokenizer(folder))
    used = RENDER_PROCESS._process
    child = os.fork()
    if child == 0:
        same = template.render(DIALOGUE)[-1].text == "a<|im_end|>" and RENDER_PROCESS._process.pid != used.pid
        RENDER_PROCESS.close()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert template.render(DIALOGUE)[-1].text == "a<|im_end|>" and RENDER_PROCESS._process is used


def test_an_end_from_outside_is_told_as_such_and_the_next_text_is_rendered(folder):
    (folder / "chat_template.jinja").write_text(CHATML)
    template = chat_template(load_tokenizer(folder))
    RENDER_PROCESS._process.terminate()
    with pytest.raises(UserError, match="SIGTERM"):
        template.render(DIALOGUE)
    assert template.render(DIALOGUE)[-1].text == "a<|im_end|>"
