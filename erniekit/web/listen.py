"""Listen on a port, and serve an application until a signal ends it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from erniekit.environment import is_importable
from erniekit.errors import UserError


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes any that is free.

    Raises:
        UserError: a package is missing, or the port is taken.
    """
    if missing := [name for name in ("starlette", "uvicorn") if not is_importable(name)]:
        raise UserError(f"{' and '.join(missing)} not installed: pip install 'erniekit[server]'")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserError(f"port {port} of {host} cannot be used: {error.strerror}; write another port") from None
    listener.listen(128)
    return listener


def serve(app: Any, listener: socket.socket, *, on_ready: Callable[[], None] | None = None, grace_s: int = 5) -> None:
    """Serve until SIGINT or SIGTERM; open requests get `grace_s` seconds."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if on_ready is not None and self.started:
                on_ready()

    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=grace_s)
    Server(config).run(sockets=[listener])
