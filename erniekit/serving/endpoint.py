"""One endpoint: errors become error objects, a client that leaves ends what it asked for, figures are counted."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from erniekit.data.media.errors import RecordingError
from erniekit.errors import UserError
from erniekit.serving.engine_thread import StoppedError
from erniekit.serving.errors import RefusedError
from erniekit.serving.served import Served
from erniekit.web.access import BodyTooLargeError, Receive, Scope, Send, error_object

logger = logging.getLogger(__name__)
SEND_SECONDS = 60.0  # a client that takes nothing for so long has left
EVENTS = "text/event-stream"
LEFT = 499  # the status of figures where the client left; nobody is told it
SHUTTING_DOWN = "the server is shutting down"

Body = Response | AsyncGenerator[bytes, None]
Handler = Callable[[Request, Served], Awaitable["Reply"]]


class Reply:
    """What is sent: a response, or a stream whose first part decides whether it begins at all."""

    def __init__(self, body: Body, media_type: str = EVENTS) -> None:
        self.body, self.media_type = body, media_type


class ClientLeftError(Exception):
    """Nobody waits for the answer any more."""


class Endpoint:
    """An ASGI application for one path.

    Args:
        name: in figures.
        handler: returns the reply; what it needs to hold until the reply is sent, a stream holds itself.
    """

    def __init__(self, name: str, handler: Handler) -> None:
        self._name, self._handler = name, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        served: Served = scope["app"].state.served
        began, sent = time.monotonic(), _Sent(send)
        try:
            await self._reply(request, served, sent)
        except (ClientLeftError, ClientDisconnect):
            served.metrics.left.inc()
            sent.status = LEFT
        finally:
            served.metrics.requests.labels(self._name, str(sent.status)).inc()
            served.metrics.seconds.labels(self._name).observe(time.monotonic() - began)

    async def _reply(self, request: Request, served: Served, sent: _Sent) -> None:
        try:
            if served.stopping:
                raise StoppedError
            reply = await self._handler(request, served)
            if isinstance(reply.body, Response):
                await reply.body(request.scope, request.receive, sent.send)
            else:
                await _until_left(request, _stream(reply.body, reply.media_type, sent))
        except (ClientLeftError, ClientDisconnect):
            raise
        except Exception as error:
            status, told, headers = _told(error, self._name)
            if not sent.begun:
                await JSONResponse(told, status, headers)(request.scope, request.receive, sent.send)
                return
            sent.status = status
            if not sent.tells_events:
                raise  # a stream of sound that breaks off is seen to be incomplete
            await sent.part(f"data: {json.dumps(told)}\n\n".encode(), last=True)


class _Sent:
    """Sends, and remembers what was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status, self.begun, self.tells_events = 0, False, False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.begun, self.status = True, message["status"]
        try:
            with anyio.fail_after(SEND_SECONDS):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientLeftError from None

    async def part(self, content: bytes, *, last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": content, "more_body": not last})


async def _stream(parts: AsyncGenerator[bytes, None], media_type: str, sent: _Sent) -> None:
    """Send the parts of a stream; nothing is sent before the first one is there."""
    sent.tells_events = media_type == EVENTS
    headers = [
        (b"content-type", media_type.encode()),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),  # proxies of nginx would hold parts back
    ]
    start = {"type": "http.response.start", "status": 200, "headers": headers}
    async with aclosing(parts):
        async for part in parts:
            if not sent.begun:
                await sent.send(start)
            await sent.part(part)
    if not sent.begun:
        await sent.send(start)
    await sent.part(b"", last=True)


async def _until_left(request: Request, work: Any) -> None:
    """Do some work, and stop it when the client leaves.

    Raises:
        ClientLeftError: it has left.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _left(request: Request) -> None:
    """Return when the client has left; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def once(request: Request, work: Awaitable[Any]) -> Any:
    """Return what some work brings, unless the client leaves before.

    Raises:
        ClientLeftError: it has left.
    """
    found: list[Any] = []

    async def keep() -> None:
        found.append(await work)

    await _until_left(request, keep())
    return found[0]


def _told(error: Exception, name: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, error object and headers of what went wrong."""
    if isinstance(error, RefusedError):
        headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
        return error.status, error_object(error.status, str(error), param=error.param, code=error.code), headers
    if isinstance(error, BodyTooLargeError):
        return 413, error_object(413, str(error), code="body_too_large"), {"Connection": "close"}
    if isinstance(error, HTTPException):  # of Starlette's parser of forms
        return error.status_code, error_object(error.status_code, error.detail), {}
    if isinstance(error, StoppedError):
        return 503, error_object(503, SHUTTING_DOWN, code="shutting_down"), {"Retry-After": "10"}
    if isinstance(error, RecordingError):  # its file is ours, and nothing to the client
        return 400, error_object(400, f"the recording: expected {error.expected}, got {error.got}"), {}
    if isinstance(error, UserError):
        return 400, error_object(400, str(error)), {}
    logger.exception(f"{name}: a request has failed", exc_info=error)
    return 500, error_object(500, "the server has made a mistake; its log says which", code="internal_error"), {}
