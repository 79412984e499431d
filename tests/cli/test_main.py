"""Finding the verb, exit codes, and staying light."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit import __version__
from erniekit.cli import MODULES, OTHER_VERBS, VERBS, main
from erniekit.errors import UserError

ROOT = Path(__file__).parents[2]
CALLS = (
    400_000  # of functions, built-in ones too, which are the same on every machine; tools/bench/startup.py has seconds
)
NEEDED = {"validate": ("tokenizers",)}  # whether a tokenizer can be read, only its library can tell
HEAVY = ("paddle", "paddlenlp", "numpy", "torch", "rich", "visualdl", "tokenizers")


def test_no_words_and_help_list_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["help"], ["--help"], ["-h"]):
        assert main(words) == 0
        text = capsys.readouterr().out
        for name, summary in VERBS.items():
            assert f"  {name} " in text and summary in text


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_module_and_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(importlib.import_module(f"erniekit.cli.{MODULES.get(verb, verb)}").run)
    assert main([verb, "--help"]) == 0
    assert f"usage: erniekit {verb}" in capsys.readouterr().out
    assert main(["help", verb]) == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["version"], ["--version"]):
        assert main(words) == 0
        assert capsys.readouterr().out == f"erniekit {__version__}\n"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("trian", "did you mean `train`?"),
        ("Validate", "did you mean `validate`?"),
        ("TRAIN", "did you mean `train`?"),
        ("xyz", "unknown verb;"),
    ],
)
def test_mistyped_verb_suggests_and_exits_2(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    captured = capsys.readouterr()
    assert hint in captured.err and captured.out == ""
    assert main(["help", word]) == 2


def _replace_run(monkeypatch: pytest.MonkeyPatch, raised: BaseException) -> None:
    def run(arguments: list[str]) -> int:
        raise raised

    monkeypatch.setattr("erniekit.cli.version.run", run)


def test_user_error_is_printed_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _replace_run(monkeypatch, UserError("sft.yaml:3: wrong"))
    assert main(["version"]) == 2
    assert capsys.readouterr().err == "error: sft.yaml:3: wrong\n"


def test_interrupt_is_130_and_defects_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_run(monkeypatch, KeyboardInterrupt())
    assert main(["version"]) == 130
    _replace_run(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["version"])


def test_wrong_option_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--loud"]) == 2
    assert "unrecognized arguments: --loud" in capsys.readouterr().err


@pytest.mark.parametrize(("verb", "needed"), [("train", "config"), ("dpo", "config"), ("eval", "model")])
def test_only_what_is_needed_is_asked_for(verb: str, needed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb]) == 2
    assert capsys.readouterr().err.endswith(f"the following arguments are required: {needed}\n")


def test_reader_that_goes_away_is_no_error() -> None:
    command = f"set -o pipefail; {sys.executable} -m erniekit params | head -1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, cwd=ROOT)
    assert result.stderr == b""
    assert result.returncode in (0, 141)  # 0 where everything was written before the reader went


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["help", "validate"],
        ["version"],
        ["params"],
        ["params", "learning_rate"],
        ["docs", "--check"],
        ["validate", "examples/configs/quickstart/sft.yaml"],
    ],
    ids=" ".join,
)
def test_light_verbs_import_nothing_heavy_and_do_little(words: list[str]) -> None:
    program = (
        "import sys; calls = []\n"
        "sys.setprofile(lambda frame, event, argument: calls.append(event) if event in ('call', 'c_call') else None)\n"
        "from erniekit.cli import main; code = main(sys.argv[1:]); sys.setprofile(None)\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules and name not in {NEEDED.get(words[0], ())!r}]\n"
        "print(f'\\n{code} {len(calls)}', *heavy)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=ROOT, check=True
    )
    code, calls, *heavy = result.stdout.splitlines()[-1].split()
    assert (code, heavy) == ("0", []), result.stderr
    assert int(calls) < CALLS


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sft", "my file.yaml", "seed=1"], "sft: unknown verb; write `erniekit train 'my file.yaml' seed=1`"),
        (["finetune"], "finetune: unknown verb; write `erniekit train`"),
        (["predict", "m"], "predict: unknown verb; write `erniekit generate m`"),
        (["gui", "."], "gui: unknown verb; write `erniekit ui .`"),
        (["serve", "run_chat.yaml"], "serve: unknown verb; write `erniekit server run_chat.yaml`"),
        (["tran"], "tran: unknown verb; did you mean `train`?; `erniekit help` lists them"),
        (["frobnicate"], "frobnicate: unknown verb; `erniekit help` lists them"),
    ],
)
def test_guessed_verbs_lead_to_the_right_one(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")


def test_verbs_that_are_led_to_exist() -> None:
    assert set(OTHER_VERBS.values()) <= set(VERBS)
    assert not set(OTHER_VERBS) & set(VERBS)
