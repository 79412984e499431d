"""The page as an ASGI application: its files, and endpoints that take and give JSON.

Everything below `/api` wants the token that `erniekit ui` prints; the files of the page tell nothing and want none. The
page sends it in a header, which other pages cannot do, and no cookie exists that a browser would send for them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from erniekit import __version__
from erniekit.config import Config
from erniekit.config.registry import PARAMETERS
from erniekit.errors import ConfigurationError, UserError
from erniekit.redaction import redacted
from erniekit.ui import commands, files, models, runs
from erniekit.ui.check import answer, check_text
from erniekit.ui.layout import layout_of
from erniekit.ui.schema import schema
from erniekit.ui.talk import PATHS, Talk, body_of, passed_headers
from erniekit.ui.workspace import OutsideError, Workspace
from erniekit.ui.yaml_text import with_value
from erniekit.web.access import App, Guard, Message, Receive, Scope, Send

STATIC = Path(__file__).parent / "static"
MOST_BYTES = 64_000_000  # of a request: a recording of half an hour; a configuration has at most 1 MB
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Cache-Control": "no-store",
}


def make_app(workspace: Workspace, token: str) -> App:
    """Return the application for one working folder, which only who knows the token can use."""
    talk = Talk(workspace)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(talk.stop)

    api = Starlette(routes=_endpoints(workspace, talk), exception_handlers={UserError: _refused})
    page = Starlette(
        routes=[
            Route("/", _index),
            Mount("/static", StaticFiles(directory=STATIC)),
            Mount("/api", Guard(api, api_key=token, max_body_bytes=MOST_BYTES)),
        ],
        lifespan=lifespan,
    )
    return _with_headers(Guard(page, max_body_bytes=MOST_BYTES))


def _with_headers(app: App) -> App:
    """Add `HEADERS` to every answer."""
    added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        await app(scope, receive, send_with_headers if scope["type"] == "http" else send)

    return answered


async def _index(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


async def _refused(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": redacted(str(error))}, status_code=403 if isinstance(error, OutsideError) else 422)


def _short(folder: Path) -> str:
    """Return a path with `~` for the home of the user."""
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder != home and folder.is_relative_to(home) else str(folder)


Work = Callable[[dict[str, Any]], Any]


def _endpoints(workspace: Workspace, talk: Talk) -> list[Route]:
    """Return the endpoints; each calls one function, in a thread, with the values of the request."""
    described = schema()

    def session(values: dict[str, Any]) -> dict[str, Any]:
        return {"folder": _short(workspace.root), "version": __version__}

    def check(values: dict[str, Any]) -> dict[str, Any]:
        text = _text(values, "text")
        return answer(text, check_text(text, _text(values, "path", "config.yaml"), workspace))

    def change(values: dict[str, Any]) -> dict[str, Any]:
        name, value = _text(values, "name"), values.get("value")
        if name not in PARAMETERS or not isinstance(value, (str, type(None))):
            raise ConfigurationError(f"{name}: is no parameter")
        text = with_value(_text(values, "text"), PARAMETERS[name], value)
        return answer(text, check_text(text, _text(values, "path", "config.yaml"), workspace))

    def layout(values: dict[str, Any]) -> dict[str, Any]:
        ranks = _number(values, "ranks", 0, 100_000) or None
        return layout_of(_valid(values, workspace, ranks), ranks)

    def started(values: dict[str, Any]) -> dict[str, Any]:
        return runs.start_run(workspace, _text(values, "path"), resume=values.get("resume") is True)

    def command(values: dict[str, Any]) -> dict[str, Any]:
        return {"told": runs.send_command(workspace, _text(values, "output"), _text(values, "command"))}

    def stopped(values: dict[str, Any]) -> dict[str, Any]:
        talk.stop()
        return talk.state()

    async def preview(request: Request) -> Response:
        values = await _values(request)
        await run_in_threadpool(_valid, values, workspace, None)
        counts = {"rows": _number(values, "rows", 1, 8), "documents": _number(values, "documents", 1, 100)}
        name = _text(values, "path", "config.yaml")
        return JSONResponse(await commands.preview(_text(values, "text"), name, workspace.root, **counts))

    async def ask(request: Request) -> Response:
        path = request.path_params["path"]
        if path not in PATHS:
            raise ConfigurationError(f"{path}: is no endpoint of the model")
        kind = request.headers.get("Content-Type", "application/json")
        answered = await run_in_threadpool(talk.ask, request.method, path, await request.body(), kind)
        status, headers = answered.response.status, passed_headers(answered.response.headers)
        return StreamingResponse(body_of(answered), status_code=status, headers=headers)

    calls: dict[tuple[str, str], Work] = {
        ("GET", "/session"): session,
        ("GET", "/schema"): lambda values: described,
        ("GET", "/files"): lambda values: files.configurations(workspace),
        ("GET", "/file"): lambda values: files.read_configuration(workspace, _text(values, "path")),
        ("POST", "/file"): lambda values: files.save_configuration(
            workspace, _text(values, "path"), _text(values, "text"), _text(values, "version", "")
        ),
        ("POST", "/check"): check,
        ("POST", "/change"): change,
        ("POST", "/layout"): layout,
        ("GET", "/runs"): lambda values: runs.run_list(workspace),
        ("GET", "/run"): lambda values: runs.run_state(workspace, _text(values, "output"), _text(values, "cursor", "")),
        ("GET", "/run/parameters"): lambda values: runs.run_parameters(workspace, _text(values, "output")),
        ("POST", "/run/start"): started,
        ("POST", "/run/command"): command,
        ("GET", "/models"): lambda values: models.model_folders(workspace),
        ("GET", "/talk"): lambda values: talk.state(),
        ("POST", "/talk/start"): lambda values: talk.start(_text(values, "folder")),
        ("POST", "/talk/stop"): stopped,
    }
    routes = [Route(path, _endpoint(work), methods=[method]) for (method, path), work in calls.items()]
    routes.append(Route("/preview", preview, methods=["POST"]))
    return [*routes, Route("/talk/{path:path}", ask, methods=["GET", "POST"])]


def _endpoint(work: Work) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(work, await _values(request)))

    return endpoint


async def _values(request: Request) -> dict[str, Any]:
    """Return what a request says: the query of a GET, the JSON object of a POST."""
    if request.method == "GET":
        return dict(request.query_params)
    try:
        values = await request.json()
    except (ValueError, RecursionError):
        raise ConfigurationError("the request is no JSON") from None
    if not isinstance(values, dict):
        raise ConfigurationError("the request is no JSON object")
    return values


def _text(values: dict[str, Any], name: str, default: str | None = None) -> str:
    value = values.get(name, default)
    if not isinstance(value, str) or (default is None and name != "text" and not value):
        raise ConfigurationError(f"{name}: the request has none")
    return value


def _number(values: dict[str, Any], name: str, least: int, most: int) -> int:
    value = values.get(name, least)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigurationError(f"{name}: write a number from {least:,} to {most:,}")
    return value


def _valid(values: dict[str, Any], workspace: Workspace, ranks: int | None) -> Config:
    """Return the configuration of a request.

    Raises:
        ConfigurationError: it has problems.
    """
    checked = check_text(_text(values, "text"), _text(values, "path", "config.yaml"), workspace, ranks=ranks)
    if checked.config is None:
        raise ConfigurationError("\n".join(problem["text"] for problem in checked.problems))
    return checked.config
