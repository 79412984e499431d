"""Words of a command line of which some are options, and others parameters written name=value."""

from __future__ import annotations

import argparse


def parse_with_overrides(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Parse words in any order; who writes a parameter as an option is told how parameters are written."""
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown[0], arguments)}")
    return options


def at_least_one(text: str) -> int:
    """The value of an option that counts something."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return int(text)


def _hint(option: str, arguments: list[str]) -> str:
    from erniekit.parameters.schema import ALIASES, PARAMETERS

    name, _, value = option.lstrip("-").partition("=")
    name = name.replace("-", "_")
    if name not in PARAMETERS and name not in ALIASES:
        return ""
    following = arguments[arguments.index(option) + 1 :] if option in arguments else []
    value = value or (following[0] if following and "=" not in following[0] else "VALUE")
    return f"; parameters are written name=value: {name}={value}"
