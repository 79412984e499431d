"""The command line: dispatch a verb to its module and turn errors into exit codes.

Each module `erniekit.cli.VERB`, or the one that `MODULES` names, has `run(arguments: list[str]) -> int`, which returns
the exit code. Only the module of the chosen verb is imported.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import shlex
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType

from erniekit.cli.process import Terminated, raise_on_termination, standard_streams
from erniekit.distributed.rank import Launcher, attach
from erniekit.errors import UserError
from erniekit.log import console_logging
from erniekit.memory_shortage import memory_shortage_told
from erniekit.terminal import escape_control_characters

VERBS = {
    "train": "train a model from a configuration file",
    "dpo": "train a model on pairs of a preferred and a rejected answer",
    "eval": "measure how good a trained model is on held-out data",
    "validate": "check configuration files and show the resolved values, without running anything",
    "preview": "show the first samples as the model will see them",
    "rewards": "score answers by the rewards of a configuration, to try them before training",
    "pack": "tokenise and pack training data once, for training runs to replay",
    "score": "let a reward model score answers",
    "chat": "talk to a model",
    "ui": "show a page in the browser: configurations, data, runs, models",
    "generate": "answer prompts with a model",
    "transcribe": "write down what is said in recordings",
    "speak": "speak texts with a model that was trained on codes of recordings",
    "server": "answer others over HTTP, as OpenAI's API does",
    "codes": "turn recordings into codes of a codec, and codes into sound",
    "import": "convert another program's configuration to one of ours",
    "export": "write a trained model to a folder that others can load",
    "split": "write a model's weights in shards of another size",
    "plot": "draw loss, learning rate, throughput and gradient norm of runs",
    "params": "explain a parameter, or search for one",
    "docs": "write the reference of all parameters",
    "env": "show versions, devices and what works on this machine",
    "version": "print the version",
    "help": "show this text, or the help of a verb",
}
MODULES = {"import": "import_files"}  # of verbs whose word no Python module can have
SAME_VERBS = {"-h": "help", "--help": "help", "-V": "version", "--version": "version", "webui": "ui"}
# Words that other programs use as verbs, and the command that does the same here.
OTHER_VERBS = {
    **dict.fromkeys(("sft", "finetune", "fine-tune", "finetuning", "pretrain", "pt", "lora", "run"), "train"),
    **dict.fromkeys(("infer", "inference", "predict"), "generate"),
    **dict.fromkeys(("asr", "recognize", "recognise"), "transcribe"),
    **dict.fromkeys(("tts", "say", "synthesize", "synthesise"), "speak"),
    **dict.fromkeys(("evaluate", "evaluation", "test"), "eval"),
    **dict.fromkeys(("merge", "convert"), "export"),
    **dict.fromkeys(("check", "lint"), "validate"),
    **dict.fromkeys(("units", "encode", "codec"), "codes"),
    **dict.fromkeys(("serve", "api", "deploy"), "server"),
    "tokenize": "pack",
    "cli": "chat",
    **dict.fromkeys(("webchat", "gui", "web"), "ui"),
    "info": "env",
    **dict.fromkeys(("plots", "curve", "curves", "draw"), "plot"),
}
SUCCESS, PROBLEMS, USAGE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `erniekit VERB ...`.

    Returns:
            0 on success, 1 if a check failed, 2 for an error that the user can fix, 130 after Ctrl-C, 141 if standard
        output was closed, 143 after SIGTERM, 129 after SIGHUP.
    """
    launcher = attach()
    sys.excepthook = _show_defect
    try:
        return _main(list(sys.argv[1:] if arguments is None else arguments), launcher)
    except Exception as error:  # a defect of ERNIEKit: keep the traceback
        if launcher is None:
            raise
        launcher.report_error(error)
        return PROBLEMS


def _show_defect(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write a traceback, whose message may quote files of others."""
    sys.stderr.write(escape_control_characters("".join(traceback.format_exception(kind, error, trace))))


def _main(words: list[str], launcher: Launcher | None) -> int:
    verb = _verb(words[0]) if words else "help"
    with standard_streams(
        output_may_fail=verb in ("train", "dpo")
    ) as output:  # training goes on when nobody reads its output
        try:
            with raise_on_termination(), console_logging():
                code = _run(verb, words[1:], launcher)
                sys.stdout.flush()
        except OSError as error:
            if output is None or error is not output.failure:
                raise
            code = BROKEN_PIPE if isinstance(error, BrokenPipeError) else PROBLEMS
        if output is not None and output.failure and code != BROKEN_PIPE:
            print(f"error: standard output cannot be written: {output.failure.strerror}", file=sys.stderr)
        return code


def _run(verb: str, words: list[str], launcher: Launcher | None) -> int:
    if verb not in VERBS:
        print(f"error: {escape_control_characters(_unknown_verb(verb, words))}", file=sys.stderr)
        return USAGE
    try:
        with memory_shortage_told(verb):
            return int(importlib.import_module(f"erniekit.cli.{MODULES.get(verb, verb)}").run(words))
    except UserError as error:
        if launcher is None:
            print(f"error: {error}", file=sys.stderr)
        else:
            launcher.report_error(error)  # the launcher prints it once for all ranks
        return USAGE
    except (OSError, RuntimeError) as error:
        if not (told := _impossible_path(error)):
            raise
        print(f"error: {escape_control_characters(told)}", file=sys.stderr)
        return USAGE
    except Terminated as stop:
        print("terminated", file=sys.stderr)
        return int(stop.code or 0)
    except SystemExit as stop:  # argparse exits this way after --help and wrong arguments
        return stop.code if isinstance(stop.code, int) else USAGE if stop.code else SUCCESS
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _impossible_path(error: OSError | RuntimeError) -> str:
    """Return the message about an argument that names no possible path; "" for any other error."""
    if isinstance(error, OSError):
        too_long = error.errno == errno.ENAMETOOLONG
        return f"{str(error.filename)[:80]}...: the name is too long for a file system" if too_long else ""
    no_home = "home directory" in str(error)  # of `Path.expanduser`
    return "a path begins with ~ and a name, and there is no such user; write the whole path" if no_home else ""


def _verb(word: str) -> str:
    return SAME_VERBS.get(word, word)


def _unknown_verb(word: str, rest: Sequence[str]) -> str:
    """Return what to write in place of a verb that does not exist."""
    if meant := OTHER_VERBS.get(word.lower()):
        return f"{word}: unknown verb; write `{' '.join(['erniekit', meant, *map(shlex.quote, rest)])}`"
    close = difflib.get_close_matches(word.lower(), VERBS, n=1, cutoff=0.7)
    hint = f"; did you mean `{close[0]}`?" if close else ""
    return f"{word}: unknown verb{hint}; `erniekit help` lists them"
