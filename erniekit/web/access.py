"""Who may ask: a guard in front of an ASGI application.

A page of another site that is open in the same browser can send requests to a service on loopback, and after its name
has been made to point to 127.0.0.1 it can also read the answers (DNS rebinding). So a request has to name a host that
is meant, and comes from no other origin. Programs send no `Origin`.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
UNAUTHORIZED, FORBIDDEN, TOO_LARGE = 401, 403, 413
DRAINED_BYTES = 64 << 20  # of a body that is too large: a client that still sends would not hear the answer
ERROR_TYPES = {  # as OpenAI names them
    UNAUTHORIZED: "authentication_error",
    FORBIDDEN: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is that of this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def error_object(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of a refusal as OpenAI's API has it."""
    kind = ERROR_TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Guard:
    """Passes on what may be asked, and answers the rest.

    Args:
        app: what answers.
        hosts: the names that the header `Host` may have, without ports; None: any.
        api_key: what `Authorization: Bearer` has to hold; "": nothing is asked for.
        open_paths: answered without the key.
        max_body_bytes: of a request; None: no limit.
    """

    def __init__(
        self,
        app: App,
        *,
        hosts: Collection[str] | None = LOOPBACK_NAMES,
        api_key: str = "",
        open_paths: Collection[str] = (),
        max_body_bytes: int | None = None,
    ) -> None:
        self._app, self._key, self._open = app, api_key.encode(), frozenset(open_paths)
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._most = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket: nothing here speaks it, and no page of others may open one
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if (refusal := self._refusal(scope["path"], headers)) is not None:
            if refusal[0] == TOO_LARGE:
                await _drain(receive)
            await _answer(send, *refusal)
            return
        limited = _LimitedBody(receive, self._most)
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, limited.receive, watched)
        except BodyTooLargeError as error:
            if begun:
                raise
            await _answer(send, TOO_LARGE, str(error), "body_too_large")

    def _refusal(self, path: str, headers: dict[bytes, str]) -> tuple[int, str, str] | None:
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        name = _host_name(f"//{host}")
        if self._hosts is not None and name not in self._hosts:
            return FORBIDDEN, f"this service is not for the host {name[:80]!r}", "host_refused"
        if origin is not None and _place_of(origin) != host.lower():
            return FORBIDDEN, "pages of other sites may not ask this service", "origin_refused"
        if self._key and path not in self._open:
            scheme, _, given = headers.get(b"authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._key):
                what = "a wrong API key" if given else "no API key; send it as `Authorization: Bearer KEY`"
                return UNAUTHORIZED, f"the request has {what}", "invalid_api_key"
        length = headers.get(b"content-length", "")
        if self._most is not None and length.isdigit() and int(length) > self._most:
            return TOO_LARGE, str(BodyTooLargeError(self._most)), "body_too_large"
        return None


class BodyTooLargeError(Exception):
    """A body turned out to be larger than it may be: what the application may answer itself."""

    def __init__(self, most: int) -> None:
        super().__init__(f"the body has more than {most:,} bytes")


class _LimitedBody:
    """Passes messages on, and counts the bytes of the body."""

    def __init__(self, receive: Receive, most: int | None) -> None:
        self._receive, self._most, self._read = receive, most, 0

    async def receive(self) -> Message:
        message = await self._receive()
        self._read += len(message.get("body", b""))
        if self._most is not None and self._read > self._most:
            if message.get("more_body"):
                await _drain(self._receive)
            raise BodyTooLargeError(self._most)
        return message


async def _drain(receive: Receive) -> None:
    """Read what is left of a body, up to a limit."""
    read, more = 0, True
    while more and read < DRAINED_BYTES:
        message = await receive()
        read, more = read + len(message.get("body", b"")), message.get("more_body", False)


def _host_name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # such as an address of IPv6 without its end
        return ""


def _place_of(origin: str) -> str | None:
    """Return host and port of an origin in lower case; None where it has none, such as "null"."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


async def _answer(send: Send, status: int, message: str, code: str) -> None:
    body = json.dumps(error_object(status, message, code=code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    if status == TOO_LARGE:
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
