"""Refuse requests of other hosts, origins and users, and bodies that are too long, before an application sees them."""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Guard:
    """An ASGI application in front of another one.

    Args:
        hosts: names that the Host header may have, without port.
        api_key: that requests must bring as `Authorization: Bearer KEY`; None: none.
        same_origin: refuse requests with an Origin other than this host.
        max_body_bytes: of a request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Sequence[str],
        api_key: str | None = None,
        same_origin: bool = True,
        max_body_bytes: int = 10_000_000,
    ) -> None:
        self._app, self._hosts, self._key = app, frozenset(hosts), api_key
        self._same_origin, self._most = same_origin, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if refusal := self._refusal(scope, headers):
            await _answer(send, *refusal)
            return
        taken, answered = 0, False

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._most:
                raise _TooLongError
            return message

        async def noted(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self._app(scope, counted, noted)
        except _TooLongError:
            if answered:
                raise
            await _answer(send, 413, f"the body is longer than {self._most:,} bytes")

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if _name(host) not in self._hosts:
            return 421, f"{host[:100]!r} is no name of this server"
        origin = headers.get("origin")
        if self._same_origin and origin is not None and origin != f"{scope.get('scheme', 'http')}://{host}":
            return 403, "requests of other pages are refused"
        if self._key is not None:
            kind, _, key = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(key.encode(), self._key.encode()):
                return 401, "the key is missing or wrong"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._most:
            return 413, f"the body is longer than {self._most:,} bytes"
        return None


class _TooLongError(Exception):
    pass


def _name(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


async def _answer(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
