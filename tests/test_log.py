"""What is logged, and how the command line and a program that embeds ERNIEKit show it."""

from __future__ import annotations

import importlib.util
import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.log import PACKAGE, STDERR_LOGGERS, console_logging

ROOT = Path(__file__).parents[1]
logger = logging.getLogger("erniekit.runners.train")


def test_a_library_shows_nothing_and_leaves_the_root_logger_alone() -> None:
    program = (
        "import logging; root = logging.getLogger(); before = (root.level, list(root.handlers), logging.lastResort)\n"
        "import erniekit.cli, erniekit.log, erniekit.config, erniekit.hub.download\n"
        "log = logging.getLogger('erniekit.runners.train'); log.info('progress'); log.warning('careful')\n"
        "assert (root.level, root.handlers, logging.lastResort) == before\n"
        "assert logging.getLogger('erniekit').level == logging.NOTSET and logging.getLogger('erniekit').propagate\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_console_shows_messages_alone_and_marks_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    with console_logging():
        logger.debug("details")
        logger.info("100% of {braces}")
        print("a verb's own line")
        logger.warning("resuming is not bit-exact")
        logger.error("could not write it")
    logger.warning("afterwards")
    shown = capsys.readouterr()
    assert shown.out == (
        "100% of {braces}\na verb's own line\nwarning: resuming is not bit-exact\ncould not write it\n"
    )
    assert shown.err == ""


@pytest.mark.parametrize("name", STDERR_LOGGERS)
def test_what_accompanies_answers_goes_to_standard_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.util.find_spec(name) is not None
    with console_logging():
        logging.getLogger(name).info("model: fetched")
    assert capsys.readouterr() == ("", "model: fetched\n")


def test_lines_follow_a_standard_output_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with console_logging():
        monkeypatch.setattr(sys, "stdout", other := io.StringIO())
        logger.info("step 1")
    assert other.getvalue() == "step 1\n"


def test_a_stream_that_cannot_be_written_is_the_verbs_concern(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with console_logging(), pytest.raises(BrokenPipeError):
        logger.info("step 1")


def test_a_handler_of_the_root_logger_shows_no_line_twice(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        with console_logging():
            logger.info("shown")
        logger.warning("routed")
    finally:
        logging.getLogger().removeHandler(handler)
    assert seen == ["routed"] and capsys.readouterr().out == "shown\n"


def test_an_embedding_program_routes_the_log_to_its_own_handler(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, str, str]] = []
    handler, package = logging.Handler(), logging.getLogger(PACKAGE)
    handler.emit = lambda record: seen.append((record.name, record.levelname, record.getMessage()))  # type: ignore[method-assign]
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    try:
        logger.info("step 1")
        logger.warning("careful")
    finally:
        package.removeHandler(handler)
        package.setLevel(logging.NOTSET)
    assert seen == [(logger.name, "INFO", "step 1"), (logger.name, "WARNING", "careful")]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_every_rank_shows_its_own_lines(rank: str) -> None:
    """The launcher keeps them in a file for each rank, and shows those of the first."""
    program = (
        "import logging\nfrom erniekit.log import console_logging\n"
        "with console_logging(): logging.getLogger('erniekit.training.trainer').info('saved the model')\n"
    )
    environment = {"PADDLE_TRAINER_ID": rank, "PADDLE_TRAINERS_NUM": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "saved the model\n", "")


def test_details_are_shown_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ERNIEKIT_LOG", "debug")
    with console_logging():
        logger.debug("AdamW: which weights decay")
    monkeypatch.delenv("ERNIEKIT_LOG")
    with console_logging():
        logger.debug("not this")
    assert capsys.readouterr().out == "AdamW: which weights decay\n"
