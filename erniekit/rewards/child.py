"""The child's end of `erniekit.rewards.process`: run one reward in a process that may hang, exit or use up memory.

The first line that comes in says which reward it is; a reply says what the reward wants to be given. Every further line
is one call; what it computes goes out as lines of JSON. What the reward prints goes to standard error.

This module imports neither Paddle nor NumPy.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from erniekit.rewards import rules

MANY = "completions"  # a function that takes these scores all answers at once, as for trl and ms-swift
ONE = ("completion", "solution_str")  # one that takes one of these scores one answer, the second as for verl
_HERE = str(Path(__file__).parent)
_MOST_FRAMES = 3  # of a user's function that an error shows
_ENDS = (Exception, SystemExit, KeyboardInterrupt)  # what a function may end with


class RefusedError(Exception):
    """The reward cannot be opened; the text says why."""


def serve() -> None:
    """Answer calls until the parent closes its end."""
    _watch_the_parent()
    replies = os.fdopen(os.dup(1), "wb")
    lines = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)  # what the reward prints must not get among the replies
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    def reply(**values: Any) -> None:
        replies.write(json.dumps(values).encode() + b"\n")
        replies.flush()

    program = json.loads(lines.readline())
    memory = int(program["memory_bytes"])
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        function = open_function(program)
        reply(wants=wanted_names(function))
    except RefusedError as error:
        reply(failed=f"cannot be opened: {error}")
        return
    except _ENDS as error:
        reply(failed=f"cannot be opened: it {told(error)}")
        return
    for line in lines:
        call = json.loads(line)
        try:
            if "all" in call:
                reply(result=as_numbers(function(**call["all"])))
            else:
                for arguments in call["each"]:
                    reply(result=as_number(function(**arguments)))
        except MemoryError:
            reply(memory=True)
        except _ENDS as error:
            reply(failed=told(error))


def _watch_the_parent() -> None:
    """Start a process that ends this one, and those that the reward has started, where the parent has ended.

    A thread could not do that: a pattern that backtracks, for example, lets no other thread of Python run. The process
    is nobody's child, so that a reward that waits for its own children does not meet it, and shares nothing but the
    group and the input, which has no other end once the parent is gone.
    """
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return
    if os.fork():
        os._exit(0)
    try:
        for number in (1, 2):
            os.close(number)  # whose ends tell the parent that the reward has ended
        poll = select.poll()
        poll.register(0, 0)  # no event but the end of the other side
        poll.poll()
        os.killpg(0, signal.SIGKILL)
    finally:
        os._exit(0)


def open_function(program: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function that computes a reward.

    Args:
        program: `regex` (the pattern), `json_schema` (the path of a file) or `python`: `MODULE.FUNCTION` or
            `FILE.py:FUNCTION`.

    Raises:
        RefusedError: there is no such function, or it cannot be called as one that scores.
    """
    if "regex" in program:
        pattern = re.compile(program["regex"])
        return lambda completion: rules.regex(completion, pattern)
    if "json_schema" in program:
        try:
            schema = json.loads(Path(program["json_schema"]).read_text(encoding="utf-8"))
            validator = rules.schema_validator(schema)
        except (OSError, ValueError) as error:
            raise RefusedError(f"{program['json_schema']} cannot be read as a JSON schema: {error}") from None
        return lambda completion: rules.json_schema(completion, validator)
    sys.path[:] = program["paths"]
    module, name = _module_of(program["python"])
    function = getattr(module, name, None)
    if function is None:
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RefusedError(f"{_place(module)} has no function {name} (it has {', '.join(there) or 'none'})")
    if inspect.isclass(function):
        function = function()  # a class whose objects are called, as ms-swift's
    if not callable(function):
        raise RefusedError(f"{name} in {_place(module)} is no function")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise RefusedError(f"{name} in {_place(module)} is a coroutine (`async def`); write a plain function")
    return function


def _module_of(named: str) -> tuple[ModuleType, str]:
    """Return the module and the name of the function in it."""
    file, colon, name = named.rpartition(":")
    if not colon:
        dotted, _, name = named.rpartition(".")
        return importlib.import_module(dotted), name
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise RefusedError(f"{path} does not exist")
    sys.path.insert(0, str(path.parent))  # so that it finds the modules beside it
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise RefusedError(f"{path} is no Python file")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, name


def _place(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or module.__name__


def wanted_names(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what a function wants: `many` (whether all answers at once), the `names` that it takes, those that are
    `needed`, and whether it takes `others`, too.

    Raises:
        RefusedError: it takes no answers.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise RefusedError("its parameters cannot be read; write a Python function around it") from None
    if any(each.kind is each.POSITIONAL_ONLY for each in parameters):
        raise RefusedError("it has parameters that cannot be given by name (before `/`)")
    others = any(each.kind is each.VAR_KEYWORD for each in parameters)
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    names = [each.name for each in named]
    needed = [each.name for each in named if each.default is each.empty]
    one = [name for name in names if name in ONE]
    if MANY in names and not one:
        many = True
    elif MANY not in names and len(one) == 1:
        many = False
    else:
        raise RefusedError(
            f"it takes {', '.join(names) or 'nothing'}, and has to take either `completions` (it then scores all "
            "answers at once) or `completion` (one answer)"
        )
    return {"many": many, "names": names, "needed": needed, "others": others}


def as_numbers(result: Any) -> dict[str, Any]:
    """Return the `numbers` that a function gave for many answers; or what it gave instead: `one` number, `no_list`, or
    at `place` (from 0) `no_number`."""
    if hasattr(result, "tolist"):  # arrays and tensors
        result = result.tolist()
    if isinstance(result, (list, tuple)):
        numbers = []
        for place, item in enumerate(result):
            found = as_number(item)
            if "number" not in found:
                return {"place": place, **found}
            numbers.append(found["number"])
        return {"numbers": numbers}
    found = as_number(result)
    return {"one": found["number"]} if "number" in found else {"no_list": found["no_number"]}


def as_number(item: Any) -> dict[str, Any]:
    """Return the `number` that a function gave for one answer, or what it is instead: `no_number`."""
    if not isinstance(item, (bool, int, float)) and hasattr(item, "item"):  # of arrays and tensors
        try:
            item = item.item()
        except (TypeError, ValueError, RuntimeError):
            return {"no_number": _kind(item)}
    if not isinstance(item, (bool, int, float)):
        return {"no_number": _kind(item)}
    try:
        return {"number": float(item)}
    except OverflowError:
        return {"no_number": "a number that is too large"}


def _kind(item: Any) -> str:
    if item is None:
        return "nothing (None)"
    kind = type(item).__name__
    hint = " with the key 'score'" if isinstance(item, dict) and "score" in item else ""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}{hint}"


def told(error: BaseException) -> str:
    """Return an exception as a user reads it: its type, its text, and the lines of the user's code that raised it."""
    if isinstance(error, SystemExit):
        return f"calls sys.exit({'' if error.code is None else error.code!r}){_frames(error)}"
    return f"raises {type(error).__name__}: {str(error)[:500]}{_frames(error)}"


def _frames(error: BaseException) -> str:
    frames: Sequence[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((_HERE, "<frozen"))]
    if len(own) > _MOST_FRAMES:
        own = [own[0], *own[1 - _MOST_FRAMES :]]
    return f" ({', '.join(f'{f.filename}:{f.lineno} in {f.name}' for f in own)})" if own else ""
