"""`erniekit params [NAME|WORD]`: explain a parameter, or search for one."""

from __future__ import annotations

import argparse
import textwrap

from erniekit.config.foreign import FOREIGN_NAMES
from erniekit.config.foreign_names import ForeignName
from erniekit.config.parameter import Alias, Parameter
from erniekit.config.reference_docs import alias_target, attribute_rows, example_line
from erniekit.config.registry import ALIASES, PARAMETERS, SECTIONS, did_you_mean, section_of
from erniekit.config.values import format_value
from erniekit.errors import ConfigurationError

WIDTH = 100


def run(arguments: list[str]) -> int:
    """Explain one parameter, list those that contain a word, or list all."""
    parser = argparse.ArgumentParser(
        prog="erniekit params",
        description="Explain a parameter of configuration files, search for one, or list all by section.",
    )
    parser.add_argument("words", nargs="*", metavar="NAME|WORD", help="a parameter's name, or words to search for")
    words = [word.casefold() for word in parser.parse_args(arguments).words]
    if not words:
        print(_overview())
    elif len(words) == 1 and words[0] in PARAMETERS:
        print(explain(PARAMETERS[words[0]]))
    elif len(words) == 1 and words[0] in ALIASES:
        print(_explain_alias(ALIASES[words[0]]))
    elif len(words) == 1 and words[0] in FOREIGN_NAMES and ("_" in words[0] or not _found(words)):
        print(_explain_foreign(FOREIGN_NAMES[words[0]]))
    else:
        print(_search(words))
    return 0


def explain(parameter: Parameter) -> str:
    """Return everything that a parameter's declaration says, as text."""
    rows = attribute_rows(parameter)
    width = max(len(label) for label, _ in rows) + 2
    lines = [f"{parameter.name}   ({section_of(parameter.name).title})", "", *_wrapped(parameter.meaning), ""]
    for label, text in rows:
        lines += textwrap.wrap(
            text.replace("`", ""), WIDTH, initial_indent=f"  {label:<{width}}", subsequent_indent=" " * (width + 2)
        )
    return "\n".join([*lines, "", f"  {example_line(parameter)}"])


def _explain_alias(alias: Alias) -> str:
    title = f"{alias.name}   (alias, {section_of(alias.name).title})"
    return "\n".join([title, "", *_wrapped(f"{alias.meaning} It expands to {alias_target(alias)}.".replace("`", ""))])


def _explain_foreign(foreign: ForeignName) -> str:
    title = f"{foreign.name}   (a name of {', '.join(foreign.suites)})"
    if foreign.word:
        word = foreign.word
        return f"{title}\n\n{explain(PARAMETERS[word]) if word in PARAMETERS else _explain_alias(ALIASES[word])}"
    rows = [
        f"  {foreign.name}: {format_value(value)}".ljust(44)
        + (", ".join(f"{name}: {format_value(meant)}" for name, meant in names.items()) or "done anyway")
        for value, names in foreign.values.items()
    ]
    why = foreign.why.replace("`", "")
    effect = f"It has no effect: {why}." if foreign.read and not rows else f"{why[:1].upper()}{why[1:]}." if why else ""
    return "\n".join([title, "", *rows, *textwrap.wrap(effect, WIDTH)])


def _overview() -> str:
    lines = []
    for section in SECTIONS:
        names = textwrap.wrap(", ".join(section.names), WIDTH, initial_indent="  ", subsequent_indent="  ")
        lines += [section.title, *names, ""]
    return "\n".join([*lines, "`erniekit params NAME` explains one, `erniekit params WORD` searches."])


def _search(words: list[str]) -> str:
    """List parameters and aliases that contain all the words; those with a word in the name come first."""
    found = _found(words)
    if not found:
        text = " ".join(words)
        raise ConfigurationError(
            f"no parameter has `{text}` in its name or description{did_you_mean(text, (*PARAMETERS, *ALIASES))}\n"
            "  `erniekit params` lists them all."
        )
    found.sort(key=lambda item: not any(word in item.name for word in words))
    width = max(len(item.name) for item in found) + 2
    return "\n".join(
        item.name.ljust(width) + textwrap.shorten(item.meaning, WIDTH - width, placeholder=" ...") for item in found
    )


def _found(words: list[str]) -> list[Parameter | Alias]:
    declared: list[Parameter | Alias] = [*PARAMETERS.values(), *ALIASES.values()]
    return [item for item in declared if _contains(item, words)]


def _contains(item: Parameter | Alias, words: list[str]) -> bool:
    text = f"{item.name} {item.meaning} {' '.join(item.choices)}".casefold()
    return all(word in text for word in words)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text.replace("`", ""), WIDTH)
