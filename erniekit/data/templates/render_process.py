"""Render the chat templates of model folders in a process of its own, under limits of time and memory.

A chat template is somebody else's program. jinja2's sandbox keeps it from the machine, but not from running for ever or
from taking all memory, and a single operation such as `10 ** 10 ** 8` cannot be interrupted from within. The system
ends this process when it exceeds a limit, and the error names the template. All templates of a program share it.

A request is one line of JSON, answered by one line for each of its items, as soon as it is known.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECONDS = 5.0  # of processor time for rendering one text
FEW_MESSAGES = 20  # all texts of so short a dialogue share that time
MEMORY_BYTES = 2 << 30
MAX_CHARACTERS = 100_000_000  # of one text
_PACKAGES = Path(__file__).parents[3]  # where `erniekit` is imported from

Reply = dict[str, Any]


class LimitExceededError(Exception):
    """A template took too much time or memory; the text says which."""


class RenderProcess:
    """The parent's end of the process. It is started by the first request, and again after a limit was exceeded."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, source: str, variables: dict[str, Any], items: Sequence[dict[str, Any]]) -> list[Reply]:
        """Return the reply to each item; see `_answer` for their fields.

        Args:
            source: the template.
            variables: what the template sees beside the fields of an item.

        Raises:
            LimitExceededError: an item exceeded a limit.
        """
        request = json.dumps({"source": source, "variables": variables, "items": items}).encode() + b"\n"
        with self._lock:
            process = self._process = self._process or _start()
            assert process.stdin is not None and process.stdout is not None
            complete = False
            try:
                process.stdin.write(request)
                process.stdin.flush()
                lines = [process.stdout.readline() for _ in items]
                complete = bool(lines) and lines[-1].endswith(b"\n")
            except BrokenPipeError:  # it ended before it read the request
                pass
            finally:
                if not complete:  # also on an exception such as KeyboardInterrupt: the rest of an answer is in the pipe
                    self.close()
        replies = [json.loads(line) for line in lines] if complete else [{"limit": _reason(process.returncode)}]
        for reply in replies:
            if "limit" in reply:
                raise LimitExceededError(reply["limit"])
        return replies

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            try:
                process.communicate(timeout=SECONDS)  # its end of input ends it
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()

    def forget(self) -> None:
        """Leave the process to the parent of a forked process, whose pipes this copy must neither use nor keep open."""
        process, self._process, self._lock = self._process, None, threading.Lock()
        if process is not None and process.stdin is not None and process.stdout is not None:
            process.stdin.close()
            process.stdout.close()
            process.returncode = 0  # the parent waits for it


RENDER_PROCESS = RenderProcess()
atexit.register(RENDER_PROCESS.close)
os.register_at_fork(after_in_child=RENDER_PROCESS.forget)


def _start() -> subprocess.Popen[bytes]:
    # -I and -S: neither the user's environment nor site packages' start-up files; the paths of this process serve both
    program = f"import sys; sys.path[:] = {[str(_PACKAGES), *sys.path]!r}; from {__name__} import serve; "
    program += f"serve({SECONDS!r}, {MEMORY_BYTES!r})"
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals to this program's group are not its; the end of its input ends it
    )


def _reason(return_code: int) -> str:
    if return_code in (-signal.SIGPROF, -signal.SIGXCPU):
        return f"it needs more than {SECONDS:g} s of processor time to render one text"
    if return_code in (-signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT):
        return f"its rendering was ended from outside, by {signal.Signals(-return_code).name}"
    return f"it needs more than {MEMORY_BYTES / 2**30:.2g} GiB of memory, or recurses too deeply, to render one text"


# The child's end.


def serve(seconds: float, memory_bytes: int) -> None:
    """Answer requests until the parent closes its end.

    Args:
        seconds, memory_bytes: the limits of this process.
    """
    global SECONDS, MEMORY_BYTES
    SECONDS, MEMORY_BYTES = seconds, memory_bytes
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        for item in request["items"]:
            reply = json.dumps(_answer(request["source"], request["variables"], item)) + "\n"
            sys.stdout.buffer.write(reply.encode())
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.flush()


_compiled: dict[str, Any] = {}


def _answer(source: str, variables: dict[str, Any], item: dict[str, Any]) -> Reply:
    """Return the reply to one item, by the name of its kind: the names of `variables` that the template expects, a
    `text`, `segments`; or the reason: `refused`, `rewrites`, `limit`, and `line` where the template itself is broken.

    An item is {} (for the variables), or has `messages` and `tools`; with `end_of_turn` and `trained` its segments are
    wanted, else its text, with the header of the next answer where `header` is true.
    """
    import jinja2

    from erniekit.data.templates import rendering

    def render(messages: Sequence[Any], header: bool) -> str:
        if len(messages) > FEW_MESSAGES:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
        text = _compiled[source].render(
            messages=messages, tools=item["tools"], documents=None, add_generation_prompt=header, **variables
        )
        if len(text) > MAX_CHARACTERS:
            raise MemoryError
        text.encode()  # half of a surrogate pair is no text
        return text

    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        if source not in _compiled:
            _compiled[source] = rendering.compile_template(rendering.environment(), source)
        if not item:
            return {"variables": sorted(rendering.variables_of(rendering.environment(), source))}
        if "end_of_turn" not in item:
            return {"text": render(item["messages"], item["header"])}
        return {"segments": rendering.segments_of(render, item["messages"], item["trained"], item["end_of_turn"])}
    except rendering.RewritesTurnsError as error:
        return {"rewrites": str(error)}
    except rendering.RefusedError as error:
        return {"refused": str(error)}
    except jinja2.TemplateSyntaxError as error:
        return {"refused": str(error.message), "line": error.lineno}
    except MemoryError:
        return {"limit": f"it needs more than {MEMORY_BYTES / 2**30:.2g} GiB of memory, or renders a text without end"}
    except RecursionError:
        return {"limit": "it recurses too deeply"}
    except Exception as error:  # whatever the expressions of a template raise, for example "a" + none
        return {"refused": str(error) or type(error).__name__}
