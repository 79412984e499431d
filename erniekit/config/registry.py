"""The whole schema: every section, parameter, alias and rule, found by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from erniekit.config.parameter import Alias, Parameter, Rule, Section, When
from erniekit.config.sections import (
    acceleration,
    basic,
    checkpoint,
    distributed,
    dpo,
    evaluation,
    fp8,
    generation,
    lora,
    memory,
    moe,
    precision,
    sft,
    training,
)

SECTIONS: tuple[Section, ...] = (
    basic.SECTION,
    evaluation.SECTION,
    training.SECTION,
    distributed.SECTION,
    memory.SECTION,
    checkpoint.SECTION,
    acceleration.SECTION,
    precision.SECTION,
    sft.SECTION,
    lora.SECTION,
    dpo.SECTION,
    fp8.SECTION,
    moe.SECTION,
    generation.SECTION,
)
PARAMETERS: Mapping[str, Parameter] = {item.name: item for section in SECTIONS for item in section.parameters}
ALIASES: Mapping[str, Alias] = {alias.name: alias for section in SECTIONS for alias in section.aliases}
RULES: tuple[Rule, ...] = tuple(rule for section in SECTIONS for rule in section.rules)


def section_of(name: str) -> Section:
    """The section that declares a parameter or an alias."""
    return next(section for section in SECTIONS if name in section.names)


def unmet_needs(parameter: Parameter, values: Mapping[str, Any]) -> list[When]:
    """Why a parameter has no effect beside `values`; [] where it has.

    A need is met where its condition holds and the needs of the parameter that it names are met, too: `buffer_size`
    needs `greedy_intokens`, and that needs `packing`.
    """
    unmet: list[When] = []
    for need in parameter.needs:
        reasons = unmet_needs(PARAMETERS[need.name], values) if need.holds(values) else [need]
        if not reasons:
            return []
        unmet += reasons
    return unmet


def suggestion(word: str, known: list[str] | tuple[str, ...]) -> str:
    """The known word that was probably meant, or ""."""
    by_folded = {item.casefold(): item for item in known}
    close = difflib.get_close_matches(word.strip().casefold(), list(by_folded), n=1, cutoff=0.65)
    return by_folded[close[0]] if close else ""


def did_you_mean(word: str, known: list[str] | tuple[str, ...]) -> str:
    """ "; did you mean `x`?" or ""."""
    meant = suggestion(word, known)
    return f"; did you mean `{meant}`?" if meant else ""
