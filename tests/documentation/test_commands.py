"""Every command of the documentation is run, by a test that is named, or says that it is not run."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest

from erniekit.cli import SAME_VERBS, VERBS, main
from erniekit.config.registry import ALIASES, PARAMETERS
from tests.documentation.commands import (
    AS_IT_IS,
    ELSEWHERE,
    REPLAYED,
    ROOT,
    TRANSLATED,
    Block,
    Command,
    blocks,
    commands,
    pages,
)  # fmt: skip

COMMANDS = [command for page in pages() if not TRANSLATED.match(page) for command in commands(page)]
INLINE = re.compile(r"(?<!`)`(erniekit [^`\n]+)`(?!`)")
# What replaying adds, so that a run takes a second.
SHORT = {
    "train": "max_steps=2 warmup_ratio=0 warmup_steps=0 save_steps=1 eval_steps=1 max_evaluate_steps=1 report_to=none",
    "try": "lora=false learning_rate=1e-2",  # random weights learn by heart soon
    "eval": "max_evaluate_steps=1 eval_answers=1",
}
SHORT["dpo"] = SHORT["train"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.place)
def test_every_command_is_run_or_marked(command: Command) -> None:
    text = " ".join(command.words)
    if command.marked or command.page in REPLAYED or AS_IT_IS.match(text):
        return
    assert command.shape in ELSEWHERE, (
        f"{command.place}: name the test that runs its like in ELSEWHERE of tests/documentation/commands.py "
        f"as {command.shape!r}, or write `# not run here: WHY` behind it"
    )


def test_the_tests_that_are_named_exist() -> None:
    for shape, test in ELSEWHERE.items():
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {name}(" in text if name else text, f"{shape}: {test}"


def test_no_test_is_named_in_vain() -> None:
    used = {command.shape for command in COMMANDS if not command.marked}
    assert set(ELSEWHERE) <= used


@cache
def help_of(verb: str) -> str:
    """Return what `erniekit VERB --help` prints."""
    stdout, sys.stdout = sys.stdout, io.StringIO()
    try:
        main([verb, "--help"])
        return sys.stdout.getvalue()
    finally:
        sys.stdout = stdout


def mistakes(words: list[str], *, others: bool = False) -> list[str]:
    """Return the verb, the options and the parameters of a command line that ERNIEKit does not know."""
    verb, rest = words[1].rstrip("`,.;:"), words[2:]
    verb = SAME_VERBS.get(verb, verb)
    if verb not in VERBS:
        return [verb] if re.fullmatch(r"[a-z][a-z-]*", verb) and not others else []
    unknown = [
        word
        for word in (option.partition("=")[0] for option in rest if re.match(r"--[a-z]", option))
        if not re.search(rf"{re.escape(word)}\b", help_of(verb))
    ]
    parameters = [
        word.partition("=")[0]
        for before, word in itertools.pairwise([verb, *rest])
        if re.match(r"[a-z]\w*=", word)
        and not (before.startswith("--") and re.search(rf"{before} NAME=", help_of(verb)))
    ]
    return unknown + [name for name in parameters if name not in PARAMETERS and name not in ALIASES]


def inline_commands() -> list[tuple[str, str]]:
    """Return (page, command) of all code that stands inside sentences and tables."""
    found = []
    for page in pages():
        text = re.sub(r"^(`{3,}).*?^\1\s*$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)
        found += [(page, command) for command in INLINE.findall(text)]
    return found


def test_every_word_of_every_command_exists() -> None:
    wrong = [
        f"{command.place}: {name}"
        for command in COMMANDS
        if command.words[0] == "erniekit" and command.words[1] != "import"
        for name in mistakes(list(command.words))
    ]
    inline = inline_commands()
    assert len(inline) > 100
    for page, text in inline:
        others = page == "docs/migrating.md"  # it names the verbs of others, too
        wrong += [f"{page}: `{text}`: {name}" for name in mistakes(text.split(), others=others)]
    assert wrong == []


@pytest.mark.parametrize(
    "command",
    {c.words: c for c in COMMANDS if AS_IT_IS.match(" ".join(c.words)) and not c.marked}.values(),
    ids=lambda command: command.place,
)
def test_light_commands_run(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main(list(command.words[1:])) == 0


def shown_file(block: Block) -> str:
    """Return the name of the file that a block shows: the last one in the line before it that suits its language."""
    lines = (ROOT / block.page).read_text(encoding="utf-8").split("\n")[: block.line - 2]
    before = next((line for line in reversed(lines) if line.strip()), "")
    names = re.findall(rf"`([\w-]+\.{block.language}l?)`", before) if block.language in ("yaml", "json") else []
    return names[-1] if names else ""


@pytest.fixture
def folder(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a reader has: examples/, data, the models of the quickstart, and `model` for that of a hub."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in ("output/quickstart/sft", "output/sft", "model"):
        shutil.copytree(tiny_base, tmp_path / name)
        config = json.loads((tiny_base / "config.json").read_text()) | {"max_position_embeddings": 16_384}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    record, pair = {"src": ["What is 2 + 2?"], "tgt": ["4"]}, [("user", "What is 2 + 2?"), ("assistant", "4")]
    messages = {"messages": [{"role": role, "content": text} for role, text in pair]}
    pairs = {"src": ["What is 2 + 2?"], "tgt": [], "response": [["4"], ["5"]], "sort": [1, 0]}
    (tmp_path / "held-out-pairs.jsonl").write_text(f"{json.dumps(pairs)}\n" * 8)
    shutil.copy(ROOT / "examples/configs/ernie-4.5-21b-a3b/sft-8k.yaml", tmp_path / "my-21b.yaml")
    (tmp_path / "my.jsonl").write_text(f"{json.dumps(record)}\n" * 8)
    (tmp_path / "held-out.jsonl").write_text(f"{json.dumps(messages)}\n" * 8)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_shown_files(page: str, folder: Path) -> None:
    """Write the files that a page shows; a model of a hub becomes the one that lies in the folder."""
    for block in blocks(page):
        name = shown_file(block)
        if name.endswith(".yaml"):
            text = re.sub(r"(model_name_or_path: )(path/to/model-folder|baidu/\S+)", r"\1model", block.text)
            text = re.sub(r"from_hf_hub: true", "from_hf_hub: false", text)
            (folder / name).write_text(text, encoding="utf-8")
        elif name.endswith(".jsonl"):
            (folder / name).write_text(block.text * 4, encoding="utf-8")
        elif block.language == "python":
            exec(compile(block.text, page, "exec"), {})


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(REPLAYED))
def test_a_page_runs_from_top_to_bottom(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shown_files(page, folder)
    replayed = 0
    for command in commands(page):
        text = " ".join(command.words)
        if command.marked or AS_IT_IS.match(text) or command.words[0] != "erniekit" or "--shrink" in text:
            if not (command.marked or AS_IT_IS.match(text)):
                assert command.shape in ELSEWHERE, command.place
            continue
        if not Path(command.words[2]).exists():
            pytest.fail(f"{command.place}: there is no {command.words[2]}")
        verb = command.words[1]
        short = SHORT["try" if "--try" in text else verb] if verb in SHORT else ""
        monkeypatch.setattr(sys, "stdin", io.StringIO("What is 27 + 15?\n"))  # what chat reads
        assert main([*command.words[1:], *short.split()]) == 0, command.place
        replayed += 1
    assert replayed
