"""The complete schema: every section, parameter, alias and rule, by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from erniekit.config.parameter import Alias, Parameter, Rule, Section, When
from erniekit.config.sections import (
    acceleration,
    basic,
    checkpoint,
    codes,
    distillation,
    distributed,
    dpo,
    evaluation,
    fp8,
    generation,
    grpo,
    kto,
    lora,
    memory,
    moe,
    precision,
    reward_model,
    rewards,
    serving,
    sft,
    speaking,
    speech,
    training,
    units,
    vocabulary,
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
    vocabulary.SECTION,
    units.SECTION,
    speech.SECTION,
    kto.SECTION,
    reward_model.SECTION,
    distillation.SECTION,
    rewards.SECTION,
    grpo.SECTION,
    generation.SECTION,
    codes.SECTION,
    speaking.SECTION,
    serving.SECTION,
)
PARAMETERS: Mapping[str, Parameter] = {item.name: item for section in SECTIONS for item in section.parameters}
ALIASES: Mapping[str, Alias] = {alias.name: alias for section in SECTIONS for alias in section.aliases}
RULES: tuple[Rule, ...] = tuple(rule for section in SECTIONS for rule in section.rules)


def section_of(name: str) -> Section:
    """Return the section that declares a parameter or an alias."""
    return next(section for section in SECTIONS if name in section.names)


def unmet_needs(parameter: Parameter, values: Mapping[str, Any]) -> list[When]:
    """Return the conditions of a parameter that `values` do not meet; [] if it has an effect.

    A condition is met if it holds and the conditions of the parameter that it names are met, too: `buffer_size` needs
    `greedy_intokens`, which needs `packing`.
    """
    unmet: list[When] = []
    for need in parameter.needs:
        reasons = unmet_needs(PARAMETERS[need.name], values) if need.holds(values) else [need]
        if not reasons:
            return []
        unmet += reasons
    return unmet


def suggestion(word: str, known: list[str] | tuple[str, ...]) -> str:
    """Return the known name that `word` is most similar to, or "" if none is similar.

    Every word of the name must be similar to one of the known name: `learn_rate` is meant for `learning_rate`, but
    `input_dir` not for `output_dir`.
    """
    by_folded = {item.casefold(): item for item in known}
    folded = word.strip().casefold()
    close = difflib.get_close_matches(folded, list(by_folded), n=5, cutoff=0.65)
    return next((by_folded[item] for item in close if _is_meant(folded, item)), "")


_WORD = re.compile(r"[^\W_]+")


def _is_meant(word: str, known: str) -> bool:
    parts = _WORD.findall(known)
    return all(any(_similar(part, other) for other in parts) for part in _WORD.findall(word))


def _similar(part: str, other: str) -> bool:
    prefix = min(len(part), len(other)) >= 3 and (part.startswith(other) or other.startswith(part))
    return prefix or difflib.SequenceMatcher(None, part, other).ratio() >= 0.75


def did_you_mean(word: str, known: list[str] | tuple[str, ...]) -> str:
    """Return "; did you mean `x`?" for an error message, or "" if no known name is similar."""
    meant = suggestion(word, known)
    return f"; did you mean `{meant}`?" if meant else ""
