"""Signals and standard streams, in processes of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FULL = Path("/dev/full")
VERB = """
import os, signal, sys
from erniekit.cli import main, {verb}
from erniekit.environment import import_paddle
def run(words):
    {body}
    return 0
{verb}.run = run
sys.exit(main(["{verb}"]))
"""


def run_verb(verb: str, body: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command line with the code of one verb replaced."""
    program = VERB.format(verb=verb, body=body)
    settings = {"stdout": subprocess.PIPE, "env": os.environ | {"PYTHONPATH": str(ROOT)}} | options
    return subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, cwd=ROOT, **settings)


def shell(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    line = command.replace("erniekit", f"{sys.executable} -m erniekit")
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, env=os.environ | variables)


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_ends_with_one_line_after_paddle_was_imported(number: str, code: int) -> None:
    result = run_verb("version", f"import_paddle(); os.kill(os.getpid(), signal.{number}); print('went on')")
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "terminated\n")


def test_a_verb_under_nohup_outlives_its_terminal() -> None:
    body = "os.kill(os.getpid(), signal.SIGHUP); print('went on')"
    result = run_verb("version", body, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert (result.returncode, result.stdout, result.stderr) == (0, "went on\n", "")


@pytest.mark.parametrize(("number", "code", "told"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_during_the_import_of_paddle_waits_for_its_end(
    tmp_path: Path, number: str, code: int, told: str
) -> None:
    (tmp_path / "paddle.py").write_text(
        f"import os, signal\nos.kill(os.getpid(), signal.{number})\nprint('loaded whole')\n"
        "def disable_signal_handler(): signal.signal(signal.SIGSEGV, signal.SIG_DFL)\n"
    )
    path = {"env": os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}}
    result = run_verb("version", "import_paddle(); print('went on')", **path)
    assert (result.returncode, result.stdout, result.stderr) == (code, "loaded whole\n", f"{told}\n")


@pytest.mark.parametrize(
    ("number", "code", "told"),
    [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated"), ("SIGHUP", 129, "terminated")],
)
def test_a_signal_that_a_destructor_swallows_comes_again(number: str, code: int, told: str) -> None:
    body = (
        f"type('Closing', (), {{'__del__': lambda self: os.kill(os.getpid(), signal.{number})}})()\n"
        "    print('swallowed', flush=True); os.read(os.pipe()[0], 1); print('went on')"  # waits without end
    )
    result = run_verb("version", body, timeout=30)
    assert (result.returncode, result.stdout, result.stderr) == (code, "swallowed\n", f"{told}\n")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["params", "version", "train --help", "help"])
def test_a_full_disk_under_stdout_is_one_line(words: str) -> None:
    result = shell(f"erniekit {words} > {FULL}")
    expected = (
        0 if words.startswith("train") else 1,
        "error: standard output cannot be written: No space left on device\n",
    )
    assert (result.returncode, result.stderr) == expected


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_training_run_outlives_its_output(unbuffered: str) -> None:
    body = "print('step 1', flush=True); print('step 2', flush=True); print('trained', file=sys.stderr)"
    with FULL.open("w") as full:
        result = run_verb("train", body, stdout=full, env=os.environ | {"PYTHONUNBUFFERED": unbuffered})
    assert result.returncode == 0
    assert result.stderr == "trained\nerror: standard output cannot be written: No space left on device\n"


def test_what_an_unbuffered_process_wrote_before_it_was_killed_is_there() -> None:
    body = "print('the last words'); os.kill(os.getpid(), signal.SIGKILL)"
    result = run_verb("train", body, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert (result.returncode, result.stdout) == (-signal.SIGKILL, "the last words\n")


def test_other_errors_of_the_system_keep_their_traceback() -> None:
    result = run_verb("version", "open('/absent')")
    assert result.returncode == 1 and "FileNotFoundError" in result.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closed: str) -> None:
    result = shell(f"erniekit version {closed}")
    assert (result.returncode, result.stderr) == (0, "")


def test_characters_that_the_terminal_lacks_are_escaped(tmp_path: Path) -> None:
    file = tmp_path / "配置.yaml"
    shutil.copy(ROOT / "examples/configs/quickstart/sft.yaml", file)
    result = shell(f"erniekit validate {file}", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stderr) == (0, "")
    assert "\\u914d\\u7f6e.yaml: valid" in result.stdout
