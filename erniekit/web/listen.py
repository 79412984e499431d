"""Listen on a port, and end cleanly: uvicorn with a socket that is bound before anything is loaded."""

from __future__ import annotations

import errno
import resource
import socket
from collections.abc import Callable
from types import FrameType

from erniekit.errors import UserError
from erniekit.web.access import App

OPEN_FILES = 65_536  # connections and files of this process, as far as the system lets it
BACKLOG = 1024  # connections that wait to be accepted


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to a port; 0 takes a free one (`address_of` says which).

    Nobody can connect before `serve` listens.

    Raises:
        UserError: the port is taken, or the host is not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise UserError(f"host: {host[:80]!r} is no host name or address: {error}") from None
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            why = "another program listens there\n  Write another port, or port=0 for any that is free."
        elif error.errno == errno.EACCES:
            why = "ports below 1024 belong to the administrator\n  Write a port from 1024 upwards."
        else:
            why = error.strerror or str(error)
        raise UserError(f"port: {host}:{port} cannot be used: {why}") from None
    return listening


def address_of(listening: socket.socket) -> tuple[str, int]:
    """Return host and port of a socket."""
    name = listening.getsockname()
    return name[0], name[1]


def url_of(listening: socket.socket) -> str:
    """Return the URL under which a socket is reached."""
    host, port = address_of(listening)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: App,
    listening: socket.socket,
    *,
    grace_seconds: float = 10.0,
    on_ready: Callable[[], None] = lambda: None,
    on_signal: Callable[[], None] = lambda: None,
) -> None:
    """Answer requests in the calling thread, until SIGTERM or SIGINT.

    Then nothing new is accepted, and what is under way may end. The signal is raised again behind that, so that the
    command ends as it would without a service; a second one ends everything at once.

    Args:
        grace_seconds: how long answers under way may take to end.
        on_ready: called when others can connect.
        on_signal: called when a signal comes, in this thread; it must not block.
    """
    import uvicorn

    allow_open_files(OPEN_FILES)
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(grace_seconds)),
        backlog=BACKLOG,
    )
    server = uvicorn.Server(config)
    handle_exit = server.handle_exit

    def told(number: int, frame: FrameType | None) -> None:
        on_signal()
        handle_exit(number, frame)

    server.handle_exit = told  # type: ignore[assignment, method-assign]
    try:
        listening.listen(BACKLOG)  # whoever comes from now on is answered when the application has started
    except OSError as error:
        host, port = address_of(listening)
        raise UserError(f"port: {host}:{port}: another program has begun to listen there: {error.strerror}") from None
    on_ready()
    server.run(sockets=[listening])


def allow_open_files(wanted: int) -> int:
    """Let this process open up to `wanted` files and connections, or as many as the system allows; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
