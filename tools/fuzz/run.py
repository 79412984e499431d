#!/usr/bin/env python3
"""Give ERNIEKit hostile input and look for what no input may cause.

    tools/fuzz/run.py                              every target, 60 seconds each
    tools/fuzz/run.py config data --seconds 3600   an hour each
    tools/fuzz/run.py data --seed 3 --case 1207    one case again, with what it prints
    tools/fuzz/run.py data --keep tests/fuzz/cases   keep the files of what is found, for a test

Targets: config (YAML files and overrides), data (records, tables, encodings), model (config.json, tokenizers,
safetensors, adapters), template (chat templates). A case calls the command line in a process of its own kind. A finding
is a traceback, an exit code other than 0 and 2, a control character on the terminal, no answer within the time, more
memory than a case of this size may take, or a file that `validate` accepts and the verb refuses.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import config_cases
import data_cases
import model_cases
import template_cases
from case import SECONDS, Case, problem_of, write_case

TARGETS: dict[str, ModuleType] = {
    "config": config_cases,
    "data": data_cases,
    "model": model_cases,
    "template": template_cases,
}
ADDRESSES = 6 << 30  # bytes of addresses beyond those at the start; an allocation above is refused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], metavar="TARGET")
    parser.add_argument("--seconds", type=float, default=60, help="how long each target runs (default 60)")
    parser.add_argument("--cases", type=int, default=1 << 60, help="at most so many cases of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="run this case only, and show what it prints")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the input of each finding below this folder")
    options = parser.parse_args()
    os.chdir(Path(__file__).parents[2])
    findings = 0
    for target in options.targets or TARGETS:
        numbers = range(options.case, options.case + 1) if options.case is not None else range(options.cases)
        begun, done = time.monotonic(), 0
        for number, problem in run_cases(
            target, options.seed, numbers, options.seconds, shown=options.case is not None
        ):
            done += 1
            if problem:
                findings += 1
                print(f"{target} --seed {options.seed} --case {number}: {problem}", flush=True)
                if options.keep:
                    write_case(
                        case_of(target, options.seed, number), options.keep / target / f"{options.seed}-{number}"
                    )
        print(f"{target}: {done:,} cases in {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{findings} findings")
    return 1 if findings else 0


def case_of(target: str, seed: int, number: int) -> Case:
    """Return a case; the same for the same arguments."""
    return TARGETS[target].draw(random.Random(f"{target} {seed} {number}"))


def run_cases(target: str, seed: int, numbers: range, seconds: float, shown: bool = False) -> Iterator[tuple[int, str]]:
    """Run cases in a worker, a new one after each that does not answer; yield the number and the problem ("": none)."""
    deadline = time.monotonic() + seconds
    waiting = iter(numbers)
    number = next(waiting, None)
    while number is not None and time.monotonic() < deadline:
        with worker(target, seed, shown) as (ask, answers):
            while number is not None and time.monotonic() < deadline:
                ask.write(f"{number}\n")
                ask.flush()
                ready, _, _ = select.select([answers], [], [], 2 * SECONDS)
                answer = answers.readline() if ready else ""
                yield number, json.loads(answer) if answer else "it hangs" if not ready else "the process died"
                number = next(waiting, None)
                if not answer:
                    break


@contextlib.contextmanager
def worker(target: str, seed: int, shown: bool) -> Iterator[tuple[io.TextIOBase, io.TextIOBase]]:
    """Fork a process that reads numbers of cases and answers with their problems."""
    asked, ask = os.pipe()
    answers, answer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(ask)
        os.close(answers)
        try:
            with open(asked) as numbers, open(answer, "w") as out:
                serve(target, seed, numbers, out, shown)
        finally:
            os._exit(0)
    os.close(asked)
    os.close(answer)
    try:
        with open(ask, "w") as out, open(answers) as found:
            yield out, found
    except BrokenPipeError:
        pass
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def serve(target: str, seed: int, numbers: io.TextIOBase, out: io.TextIOBase, shown: bool) -> None:
    """Answer numbers of cases, each with its problem on a line, as JSON."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if target == "template":  # many run into the limit, which is five seconds for users
        from erniekit.data.templates import render_process

        render_process.SECONDS = 0.5
    resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESSES, resource.RLIM_INFINITY))
    for line in iter(numbers.readline, ""):
        folder = Path(tempfile.mkdtemp(prefix="erniekit-fuzz-"))
        try:
            case = case_of(target, seed, int(line))
            write_case(case, folder)
            problem = problem_of(case, folder, shown)
        except Exception as error:
            problem = f"the fuzzer itself failed: {type(error).__name__}: {error}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        out.write(json.dumps(problem) + "\n")
        out.flush()


if __name__ == "__main__":
    sys.exit(main())
