"""The application: its paths, and the little ones among them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from erniekit.serving.audio import speech, transcriptions
from erniekit.serving.chat import chat
from erniekit.serving.completions import completions
from erniekit.serving.endpoint import Endpoint, Reply
from erniekit.serving.served import Served
from erniekit.web.access import LOOPBACK_NAMES, App, Guard, error_object, is_loopback

OPEN_PATHS = ("/health",)


def application(served: Served) -> Starlette:
    """Return the application without its guard."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        served.engine.stop()

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", Endpoint("chat", chat), methods=["POST"]),
            Route("/v1/completions", Endpoint("completions", completions), methods=["POST"]),
            Route("/v1/audio/transcriptions", Endpoint("transcriptions", transcriptions), methods=["POST"]),
            Route("/v1/audio/speech", Endpoint("speech", speech), methods=["POST"]),
            Route("/v1/models", Endpoint("models", models), methods=["GET"]),
            Route("/v1/models/{model:path}", Endpoint("models", one_model), methods=["GET"]),
            Route("/health", health, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _refused},
        lifespan=lifespan,
    )
    app.state.served = served
    return app


def guarded(app: Starlette, *, host: str, api_key: str, max_body_bytes: int) -> App:
    """Return an application behind its guard.

    Args:
        host: on which the server listens; on loopback only requests to names of loopback are answered.
    """
    hosts = {*LOOPBACK_NAMES, host.strip("[]").lower()} if is_loopback(host) else None
    return Guard(app, hosts=hosts, api_key=api_key, open_paths=OPEN_PATHS, max_body_bytes=max_body_bytes)


async def models(request: Request, served: Served) -> Reply:
    """List the model, and the sets of adapters that clients may name in its place."""
    names = (served.name, *served.adapters)
    return Reply(JSONResponse({"object": "list", "data": [_model(served, name) for name in names]}))


async def one_model(request: Request, served: Served) -> Reply:
    """Describe one of them."""
    name = request.path_params["model"]
    served.adapters_of(name)
    return Reply(JSONResponse(_model(served, name)))


def _model(served: Served, name: str) -> dict[str, Any]:
    base = {} if name == served.name else {"parent": served.name}
    return {"id": name, "object": "model", "created": served.created, "owned_by": "erniekit", **base}


async def health(request: Request) -> Response:
    """Say whether requests are answered."""
    served: Served = request.app.state.served
    if served.stopping or not served.engine.alive:
        return JSONResponse({"status": "stopping"}, 503)
    return JSONResponse({"status": "ok", "model": served.name, "in_flight": served.places.taken})


async def metrics(request: Request) -> Response:
    """Return the figures for Prometheus."""
    content, kind = request.app.state.served.metrics.page()
    return Response(content, headers={"content-type": kind})


async def _refused(request: Request, error: Exception) -> Response:
    """Answer what no path answers."""
    assert isinstance(error, HTTPException)
    told = {404: f"there is no {request.url.path[:200]} here", 405: f"{request.method} is not for this path"}
    message = told.get(error.status_code, error.detail)
    return JSONResponse(error_object(error.status_code, message), error.status_code, error.headers)
