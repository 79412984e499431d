"""`erniekit help [VERB]`: list the verbs, or show the help of one verb."""

from __future__ import annotations

import argparse

from erniekit import __version__
from erniekit.cli import VERBS, main


def run(arguments: list[str]) -> int:
    """List the verbs, or show the help of one verb."""
    parser = argparse.ArgumentParser(
        prog="erniekit help", description="Show the verbs of ERNIEKit, or the help of one."
    )
    parser.add_argument("verb", nargs="?", help="the verb to explain")
    verb = parser.parse_args(arguments).verb
    if verb and verb != "help":
        return main([verb, "--help"])
    print(overview())
    return 0


def overview() -> str:
    """Return the text of `erniekit help`."""
    width = max(map(len, VERBS)) + 2
    lines = [f"  {name:<{width}}{summary}" for name, summary in VERBS.items()]
    return "\n".join(
        [
            f"erniekit {__version__}: fine-tune large language models from a configuration file",
            "",
            "usage: erniekit VERB ...",
            "",
            *lines,
            "",
            "`erniekit help VERB` explains one of them, `erniekit params NAME` a parameter of configuration files.",
        ]
    )
