"""`erniekit version`."""

from __future__ import annotations

import argparse

from erniekit import __version__


def run(arguments: list[str]) -> int:
    """Print the version."""
    argparse.ArgumentParser(prog="erniekit version", description="Print the version of ERNIEKit.").parse_args(arguments)
    print(f"erniekit {__version__}")
    return 0
