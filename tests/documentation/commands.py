"""The commands of the documentation, and which test runs each of them.

A line of a ```bash block is run by `test_commands.py` where its page is in `REPLAYED` or the command in `AS_IT_IS`; or
another test runs its like, which `ELSEWHERE` names; or it says itself `# not run here: WHY`, in its own comment or
in the first line of its block, for readers to see.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^ *(?P<fence>`{3,})(?P<language>\w*)\n(?P<text>.*?)^ *(?P=fence)\s*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"(?:^|\s)#(.*)$", re.MULTILINE)
MARK = re.compile(r"not run here: \S|此处不运行：\S")


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is that of its first line of text."""

    page: str
    line: int
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """A line of a shell block; `words` are those of the command, `marked` says that nobody runs it."""

    page: str
    line: int
    words: tuple[str, ...]
    marked: bool

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"

    @property
    def shape(self) -> str:
        """The program, its verb and the names of its options: what a test elsewhere is looked up by."""
        program, *rest = self.words
        if program not in ("erniekit", "make", "python"):
            return program
        options = sorted({word.partition("=")[0] for word in rest if word.startswith("--")})
        verb = next((word for word in rest if not word.startswith("-")), "")
        return " ".join([program, verb, *(options if program == "erniekit" else [])])


def pages() -> list[str]:
    """Return every page of the documentation that is written by hand."""
    found = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
    return ["README.md", "README.zh.md", "CONTRIBUTING.md"] + [page for page in found if "docs/parameters/" not in page]


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        yield Block(page, text.count("\n", 0, match.start()) + 2, match["language"], match["text"])


def commands(page: str) -> list[Command]:
    """Return the commands of a page in their order; a line that ends in a backslash goes on in the next one."""
    found: list[Command] = []
    for block in blocks(page):
        if block.language not in ("bash", "sh", "shell", "console"):
            continue
        all_marked = bool(MARK.search(block.text.partition("\n")[0])) and block.text.startswith("#")
        number = block.line
        for line in re.sub(r"\\\n", "\\\\\f", block.text).split("\n"):
            words = tuple(shlex.split(line.replace("\\\f", " "), comments=True))
            if words:
                comment = COMMENT.search(line)
                marked = all_marked or bool(comment and MARK.search(comment[1]))
                found.append(Command(page, number, words, marked))
            number += 1 + line.count("\f")
    return found


# Their commands run in their order in an empty folder with examples/, on the files that the page shows.
REPLAYED = {
    "README.md",
    "docs/getting-started.md",
    "docs/preference-training.md",
    "docs/tutorials/own-data.md",
    "docs/tutorials/lora-on-one-gpu.md",
    "docs/tutorials/dpo.md",
}
# These run in the repository, word by word.
AS_IT_IS = re.compile(r"erniekit (params|validate examples/|env|version|help)")
# Translations have the commands of their English pages: test_chinese.py.
TRANSLATED = re.compile(r"README\.zh\.md|docs/zh/")
# The shape of a command -> the test that runs its like: FILE::NAME, or a file alone.
ELSEWHERE = {
    # with two steps of each of their configurations
    "make quickstart": "tests/runners/test_examples.py",
    "make quickstart-asr": "tests/runners/test_examples.py",
    "make quickstart-units": "tests/runners/test_examples.py",
    "make quickstart-tts": "tests/runners/test_examples.py",
    "make test": ".ci/run",
    "erniekit chat": "tests/cli/test_chat.py",
    "erniekit codes": "tests/runners/test_codes.py",
    "erniekit codes --decode --output": "tests/runners/test_codes.py::test_codes_become_sound_again",
    "erniekit eval": "tests/runners/test_evaluate.py",
    "erniekit export --output": "tests/export/test_export.py::test_the_verb",
    "erniekit export --dtype --output": "tests/export/test_export.py",
    "erniekit export --format --output": "tests/export/test_export.py",
    "erniekit generate --prompt": "tests/inference/test_engine.py::test_the_verbs",
    "erniekit generate --prompt --temperature": "tests/inference/test_engine.py::test_the_verbs",
    "erniekit generate --max-new-tokens --prompts --temperature": "tests/inference/test_prompts.py",
    "erniekit import --output": "tests/cli/test_import.py::test_files_are_written_and_never_replaced",
    "erniekit import --model-folder --output": "tests/cli/test_import.py::test_files_are_written_and_never_replaced",
    "erniekit pack --output": "tests/runners/test_pack.py::test_the_verb_and_the_preview",
    "erniekit preview": "tests/runners/test_overfit_and_preview.py",
    "erniekit plot": "tests/runners/test_plot.py",
    "erniekit plot --no-text --output": "tests/runners/test_plot.py::test_several_runs_as_a_picture_and_as_text",
    "erniekit plot --figures --smooth --x": "tests/runners/test_plot.py::test_charts_hold_what_was_asked_for",
    "erniekit rewards": "tests/runners/test_rewards.py::test_the_verb_prints_a_table_or_lines",
    "erniekit rewards --answers": "tests/runners/test_rewards.py::test_the_verb_prints_a_table_or_lines",
    "erniekit server": "tests/serving/test_process.py",
    "erniekit server --adapters": "tests/serving/test_adapters.py",
    "erniekit speak --output --text": "tests/cli/test_speak.py::test_one_text_becomes_one_file",
    "erniekit speak --output --texts": "tests/cli/test_speak.py::test_a_file_of_texts",
    "erniekit speak --first-seconds --output --texts": "tests/cli/test_speak.py",
    "erniekit speak --output --text --voice --voice-text": "tests/cli/test_speak.py::test_one_text_becomes_one_file",
    "erniekit train": "tests/runners/test_train.py",
    "erniekit train --nproc": "tests/launch/test_job.py::test_nproc_says_how_many",
    "erniekit train --shrink": "tests/runners/test_shrink.py::test_an_example_runs_two_steps_in_miniature",
    "erniekit train --try": "tests/runners/test_overfit_and_preview.py",
    "erniekit transcribe": "tests/cli/test_transcribe.py::test_a_process",
    "erniekit transcribe --output": "tests/cli/test_transcribe.py::test_one_file_chooses_its_format",
    "erniekit ui": "tests/cli/test_ui.py::test_the_page_is_served_until_a_signal",
    "erniekit ui --open": "tests/cli/test_ui.py::test_the_page_is_served_until_a_signal",
    "erniekit validate": "tests/cli/test_validate.py",
    "erniekit validate --data": "tests/cli/test_validate.py::test_data_is_read_on_request",
    "python paddle.distributed.launch": "tests/runners/test_several_machines.py",
    "python3": ".ci/run",  # which makes the environment that it tests
    "echo": "tests/runners/test_run_control.py::test_a_run_obeys_saves_and_stops",
}
