"""The two forms of the rotary keys of `config.json`: those before transformers 5, and `rope_parameters` since.

    before 5                                             since 5
    rope_theta: 1e6                                      rope_parameters:
    rope_scaling: {rope_type: yarn, factor: 4.0}           {rope_theta: 1e6, rope_type: yarn, factor: 4.0}
    partial_rotary_factor: 0.5                             {..., partial_rotary_factor: 0.5}

Models whose layers have several rope tables have one such set for each type of layer in `rope_parameters`
(`Architecture.rope_sets`). The first form is what the rest of this folder reads; a file may have either or both, and
what is saved has both. Needs neither Paddle nor NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from erniekit.model.architectures.config_keys import shown, shown_key
from erniekit.model.architectures.rope_scaling import scaling_kind

ROPE_PARAMETERS = "rope_parameters"
_PARTIAL = "partial_rotary_factor"
_LENGTH = "original_max_position_embeddings"


class RopeKeys(NamedTuple):
    """The keys before transformers 5 of one set of rotary parameters.

    Attributes:
        theta: of the base of the frequencies.
        scaling: of their scaling; None: the set is never scaled.
    """

    theta: str = "rope_theta"
    scaling: str | None = "rope_scaling"


def with_keys_before_5(
    values: Mapping[str, Any], rope_sets: Mapping[str, RopeKeys], problems: list[str]
) -> dict[str, Any]:
    """Return the keys of a `config.json` without `rope_parameters`: what it says stands in the keys before 5.

    Args:
        rope_sets: see `Architecture.rope_sets`.
        problems: gets a line for each pair of values that contradict each other, and for a wrong form.
    """
    merged = {key: value for key, value in values.items() if key != ROPE_PARAMETERS}
    for keys in rope_sets.values() or [RopeKeys()]:
        scaling = merged.get(keys.scaling) if keys.scaling else None
        if isinstance(scaling, dict):  # transformers 5 reads these there as well
            _merge(merged, keys.theta, scaling.get("rope_theta"), f"{keys.scaling}.rope_theta", problems)
            _merge(merged, _PARTIAL, scaling.get(_PARTIAL), f"{keys.scaling}.{_PARTIAL}", problems)
            merged[str(keys.scaling)] = {key: scaling[key] for key in scaling if key not in ("rope_theta", _PARTIAL)}
    for where, keys, parameters in _sets_of(values.get(ROPE_PARAMETERS), rope_sets, problems):
        _merge(merged, keys.theta, parameters.get("rope_theta"), f"{where}.rope_theta", problems)
        _merge(merged, _PARTIAL, parameters.get(_PARTIAL), f"{where}.{_PARTIAL}", problems)
        _merge_scaling(merged, keys.scaling, parameters, where, problems)
    return merged


def rope_parameters(values: Mapping[str, Any], rope_sets: Mapping[str, RopeKeys]) -> dict[str, Any]:
    """Return `rope_parameters` as transformers 5 writes it, from the keys before 5 in `values`."""

    def one_set(keys: RopeKeys) -> dict[str, Any]:
        scaling = (values.get(keys.scaling) if keys.scaling else None) or {}
        rest = {key: value for key, value in scaling.items() if key not in ("type", "rope_type")}
        partial = {} if values.get(_PARTIAL) is None else {_PARTIAL: values[_PARTIAL]}
        return {"rope_theta": values[keys.theta], "rope_type": scaling_kind(scaling), **rest, **partial}

    return {name: one_set(keys) for name, keys in rope_sets.items()} if rope_sets else one_set(RopeKeys())


def _sets_of(
    parameters: Any, rope_sets: Mapping[str, RopeKeys], problems: list[str]
) -> list[tuple[str, RopeKeys, dict[str, Any]]]:
    """Return each set in `rope_parameters`: its place for messages, its keys before 5, and what it says."""
    if parameters is None:
        return []
    if not isinstance(parameters, dict):
        problems.append(f"{ROPE_PARAMETERS}: expected dict, got {shown(parameters)}")
        return []
    nested = [name for name, value in parameters.items() if isinstance(value, dict)]
    if not rope_sets:
        if nested:
            problems.append(
                f"{ROPE_PARAMETERS}: all layers of this model have one set of parameters, but here are "
                f"several: {', '.join(map(shown_key, nested))}"
            )
            return []
        return [(ROPE_PARAMETERS, RopeKeys(), parameters)]
    if set(parameters) - set(rope_sets) or [name for name in parameters if name not in nested and parameters[name]]:
        got = ", ".join(map(shown_key, parameters))
        problems.append(f"{ROPE_PARAMETERS}: expected a set for each of {', '.join(rope_sets)}, got {got}")
        return []
    return [(f"{ROPE_PARAMETERS}.{name}", rope_sets[name], parameters[name]) for name in nested]


def _merge(merged: dict[str, Any], key: str, value: Any, name: str, problems: list[str]) -> None:
    if value is None:
        return
    if merged.get(key) is not None and merged[key] != value:
        problems.append(f"{key}: {shown(merged[key])} contradicts {name}: {shown(value)}; keep the right one")
        return
    merged[key] = value


def _merge_scaling(
    merged: dict[str, Any], key: str | None, parameters: dict[str, Any], where: str, problems: list[str]
) -> None:
    scaling = {name: value for name, value in parameters.items() if name not in ("rope_theta", _PARTIAL)}
    if scaling_kind(scaling) == "yarn" and scaling.get(_LENGTH) == merged.get("max_position_embeddings"):
        # transformers 5 adds this entry where there is none; before 5 it would take the place of the factor
        del scaling[_LENGTH]
    if not _meaning(scaling, merged):
        scaling = {}
    if key is None:
        if scaling:
            problems.append(
                f"{where}: rope_type {shown(scaling_kind(scaling))} is not supported there; only 'default' is"
            )
        return
    if key in merged and _meaning(merged[key], merged) != _meaning(scaling, merged):
        problems.append(f"{key}: {shown(merged[key])} contradicts {where}: {shown(parameters)}; keep the right one")
        return
    merged.setdefault(key, scaling or None)


def _meaning(scaling: Any, merged: Mapping[str, Any]) -> Any:
    """Return what a scaling says, so that two ways of writing it are equal; nothing is {}."""
    if not isinstance(scaling, dict):
        return {} if scaling is None else scaling
    said = {name: value for name, value in scaling.items() if name not in ("type", "rope_type") and value is not None}
    kind = scaling_kind(scaling)
    if kind == "yarn" and said.get(_LENGTH) == merged.get("max_position_embeddings"):
        said.pop(_LENGTH, None)
    return {} if kind == "default" and not said else {"rope_type": kind, **said}
