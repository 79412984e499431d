"""The model that the page talks with: a process of `erniekit server`, to which requests are passed on."""

from __future__ import annotations

import http.client
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from socket import SHUT_RDWR, socket
from typing import IO, Any, NamedTuple

from anyio import to_thread

from erniekit.errors import ConfigurationError
from erniekit.launch.local import free_port
from erniekit.redaction import HIDDEN, redacted
from erniekit.ui.models import abilities
from erniekit.ui.workspace import Workspace

HOST = "127.0.0.1"
KEY_VARIABLE = "ERNIEKIT_API_KEY"  # so that the key stands in no list of processes
PATHS = ("v1/chat/completions", "v1/audio/transcriptions", "v1/audio/speech", "v1/models")
_ANSWER_SECONDS, _HEALTH_SECONDS, _END_SECONDS = 600.0, 2.0, 10.0


class Answer(NamedTuple):
    """An answer whose body is still to be read, and the connection that it comes through."""

    response: http.client.HTTPResponse
    socket: socket


def server_command(folder: str, port: int) -> list[str]:
    """Return the command that answers for a model folder."""
    return [sys.executable, "-m", "erniekit", "server", folder, f"port={port}"]


class Talk:
    """At most one process that answers; it ends with the page's server."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._model, self._abilities, self._port, self._key = "", dict[str, bool](), 0, ""
        self._turn = threading.Lock()  # two requests do not start or end it at once

    def start(self, folder: str) -> dict[str, Any]:
        """Start to answer for another model; return `state`.

        Raises:
            UserError: it is no model folder, or lies elsewhere.
        """
        found = abilities(self._workspace, folder)
        with self._turn:
            self._end()
            self._begin(folder, found)
        return self.state()

    def _begin(self, folder: str, found: dict[str, bool]) -> None:
        self._model, self._abilities = folder, found
        self._port, self._key = free_port(HOST), secrets.token_urlsafe(32)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            server_command(folder, self._port),
            cwd=self._workspace.root,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, KEY_VARIABLE: self._key, "PYTHONUNBUFFERED": "1"},
        )

    def state(self) -> dict[str, Any]:
        """Return the model with `state`: "none", "loading", "ready" or "failed", and what the process said last."""
        state = "none" if self._process is None else "failed" if self._process.poll() is not None else "loading"
        if state == "loading" and self._is_healthy():
            state = "ready"
        said = self._said() if state in ("loading", "failed") else ""
        return {
            "model": self._model,
            "state": state,
            "said": redacted(said.replace(self._key, HIDDEN) if self._key else said),
            **self._abilities,
        }

    def stop(self) -> None:
        """End the process, if there is one."""
        with self._turn:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if self._output is not None:
            self._output.close()
        self._output, self._model, self._abilities = None, "", {}

    def ask(self, method: str, path: str, body: bytes, content_type: str) -> Answer:
        """Pass a request on and return the answer, whose body is still to be read.

        Raises:
            ConfigurationError: nobody answers.
        """
        if self._process is None:
            raise ConfigurationError("no model is loaded; choose one first")
        connection = http.client.HTTPConnection(HOST, self._port, timeout=_ANSWER_SECONDS)
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": content_type}
        try:
            connection.request(method, f"/{path}", body=body or None, headers=headers)
            stream = connection.sock
            return Answer(connection.getresponse(), stream)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ConfigurationError(f"the model does not answer: {error}") from None

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=_HEALTH_SECONDS)
        try:
            connection.request("GET", "/health", headers={"Authorization": f"Bearer {self._key}"})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _said(self, size: int = 4000) -> str:
        if self._output is None:
            return ""
        descriptor = self._output.fileno()  # its position belongs to the process that writes, too
        length = os.fstat(descriptor).st_size
        return os.pread(descriptor, size, max(0, length - size)).decode("utf-8", errors="replace")


async def body_of(answer: Answer) -> AsyncIterator[bytes]:
    """Yield the body as it comes. When the page no longer listens, the connection ends, and with it the decoding."""
    try:
        while chunk := await to_thread.run_sync(answer.response.read1, 65536, abandon_on_cancel=True):
            yield chunk
    finally:
        with suppress(OSError):
            answer.socket.shutdown(SHUT_RDWR)  # also wakes the thread that still reads


def passed_headers(headers: http.client.HTTPMessage) -> dict[str, str]:
    """Return the headers of an answer that the page needs."""
    return {name: headers[name] for name in ("Content-Type", "Retry-After") if name in headers}
