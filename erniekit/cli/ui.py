"""`erniekit ui [FOLDER]`: a page in the browser for the configurations, runs and models of a folder."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from erniekit.cli.ranks import parse_with_overrides
from erniekit.errors import UserError
from erniekit.terminal import escape_control_characters
from erniekit.web.packages import require_packages

PORT = 8600


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="erniekit ui",
        description="Show a page in the browser: write configurations, see data and memory, start and watch runs, talk "
        "with models. It is for you alone: it listens on this machine only, and wants the token that is printed.",
        epilog="From another machine: ssh -L 8600:127.0.0.1:8600 HOST, and open the printed address there. Runs that "
        "the page starts go on when it ends.",
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(), help="the only folder that it shows; default: this one"
    )
    parser.add_argument(
        "--port", type=_port, default=PORT, metavar="N", help=f"to listen on; 0 takes any that is free (default {PORT})"
    )
    parser.add_argument(
        "--also", action="append", type=Path, default=[], metavar="DIR", help="a folder that runs may read, too"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser of this machine")
    options = parse_with_overrides(parser, arguments)
    folder: Path = options.folder.expanduser()
    for named in (folder, *options.also):
        if not named.expanduser().is_dir():
            raise UserError(f"{named}: there is no such folder; name the one that has your configurations and runs")
    require_packages("ui")
    from erniekit.web.listen import bind, serve, url_of

    listening = bind("127.0.0.1", options.port)
    listening.listen()  # so that whoever reads the address can connect
    from erniekit.ui.app import make_app
    from erniekit.ui.workspace import Workspace

    workspace, token = Workspace.of(folder, tuple(options.also)), secrets.token_urlsafe(24)
    os.chdir(workspace.root)  # paths of configurations are relative to it
    address = f"{url_of(listening)}/#token={token}"
    told = f"the page of {workspace.root} is at\n  {address}\nCtrl-C ends it; runs go on"
    print(escape_control_characters(told), flush=True)
    if options.open:
        import webbrowser

        webbrowser.open(address)
    serve(make_app(workspace, token), listening)
    return 0


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text}")
    return int(text)
