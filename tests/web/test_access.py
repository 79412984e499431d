"""Who may ask a service of ERNIEKit: hosts, origins, keys, sizes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from erniekit.web.access import Guard, is_loopback


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = b""
    while (message := await receive()).get("more_body"):
        body += message["body"]
    body += message.get("body", b"")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(len(body)).encode()})


def ask(guard: Guard, path: str = "/v1/x", parts: tuple[bytes, ...] = (b"",), **headers: str) -> tuple[int, str]:
    messages = [
        {"type": "http.request", "body": part, "more_body": number + 1 < len(parts)}
        for number, part in enumerate(parts)
    ]
    sent: list[dict] = []

    async def receive() -> dict:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"host": "127.0.0.1:8188", **headers}
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]
    asyncio.run(guard({"type": "http", "path": path, "headers": encoded}, receive, send))
    return sent[0]["status"], sent[1]["body"].decode()


@pytest.mark.parametrize("host", ["127.0.0.1:8188", "localhost", "LOCALHOST:1", "[::1]:8188"])
def test_names_of_loopback_are_answered(host: str) -> None:
    assert ask(Guard(echo), host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::1", "127.0.0.1@evil.example"])
def test_other_hosts_are_refused(host: str) -> None:
    status, body = ask(Guard(echo), host=host)
    assert status == 403 and json.loads(body)["error"]["code"] == "host_refused"
    assert ask(Guard(echo, hosts=None), host=host)[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9999", ""])
def test_pages_of_other_origins_are_refused(origin: str) -> None:
    status, body = ask(Guard(echo), origin=origin)
    assert status == 403 and json.loads(body)["error"]["code"] == "origin_refused"
    assert ask(Guard(echo), origin="http://127.0.0.1:8188")[0] == 200


def test_a_key_is_asked_for() -> None:
    guard = Guard(echo, api_key="a-secret", open_paths=("/health",))
    assert ask(guard, authorization="Bearer a-secret")[0] == 200
    assert ask(guard, authorization="bearer  a-secret ")[0] == 200
    for given in ({}, {"authorization": "Bearer other"}, {"authorization": "a-secret"}, {"authorization": "Bearer ä"}):
        status, body = ask(guard, **given)
        error = json.loads(body)["error"]
        assert status == 401 and error["type"] == "authentication_error" and "a-secret" not in body
    assert ask(guard, "/health")[0] == 200 and ask(guard, "/healthy")[0] == 401


def test_bodies_are_limited_by_their_length_and_as_they_come() -> None:
    guard = Guard(echo, max_body_bytes=10)
    assert ask(guard, parts=(b"12345", b"67890")) == (200, "10")
    assert ask(guard, content_length="11")[0] == 413
    status, body = ask(guard, parts=(b"12345", b"678901"))
    assert status == 413 and json.loads(body)["error"]["code"] == "body_too_large"


def test_loopback_is_this_machine_alone() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "127.8.9.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.1", "example.org", "")))
