"""Serve a tiny model in this process, and ask it through ASGI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from erniekit.config.sections.serving import ServingParameters
from erniekit.inference.engine import ChatModel
from erniekit.inference.sampling import Sampling
from erniekit.inference.speaking.speaker import SpeechModel
from erniekit.serving.app import application, guarded
from erniekit.serving.open import Loading, open_served
from erniekit.serving.served import Served
from erniekit.web.access import App

GREEDY = Sampling(max_new_tokens=12)


@contextmanager
def serving(
    load: Callable[[], ChatModel | SpeechModel],
    adapters: dict[str, Path] | None = None,
    defaults: Sampling = GREEDY,
    **settings: Any,
) -> Iterator[Served]:
    """Serve a model inside the context."""
    served = open_served(Loading(load, "tiny", adapters or {}), replace(ServingParameters(), **settings), defaults)
    try:
        yield served
    finally:
        served.engine.stop()
        served.engine.join()


def app_of(served: Served, **guard: Any) -> App:
    return guarded(application(served), **{"host": "127.0.0.1", "api_key": "", "max_body_bytes": 1 << 20, **guard})


def ask(served: Served, path: str, body: Any = None, *, headers: dict[str, str] | None = None, **guard: Any) -> Any:
    """Ask once; return the response."""
    return ask_app(app_of(served, **guard), path, body, headers)


def ask_app(app: App, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
    """Ask an application once; return the response."""
    return asyncio.run(_ask(app, path, body, headers or {}))


async def _ask(app: App, path: str, body: Any, headers: dict[str, str]) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        if body is None:
            return await client.get(path, headers=headers)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post(path, content=content, headers=headers)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which has to end with [DONE]."""
    parts = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]
