"""The configuration files of adapter folders: PEFT's `adapter_config.json` and its meaning here. Needs no Paddle."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from erniekit.errors import ModelFileError
from erniekit.json_files import read_json_object
from erniekit.model.lora.config import KAIMING, PISSA, REGULAR_EXPRESSION, LoraSettings, matches
from erniekit.model.lora.score import MODULES_KEY, saves_score

ADAPTER_CONFIG_FILE = "adapter_config.json"
PADDLENLP_CONFIG_FILE = "lora_config.json"

# Other settings that PEFT 0.17 stores, with the values that do not change the computation.
_NEUTRAL: dict[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "layer_replication": None,
    "lora_bias": False,
    "megatron_config": None,
    "modules_to_save": None,
    "target_parameters": None,
    "use_qalora": False,
}
_READ = {
    "alpha_pattern", "base_model_name_or_path", "exclude_modules", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_alpha", "lora_dropout", "peft_type", "r", "rank_pattern", "target_modules",
    "trainable_token_indices", "use_dora", "use_rslora",
}  # fmt: skip
_WITHOUT_EFFECT = {
    "auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "inference_mode", "loftq_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
_LARGEST = 1e30  # of a rank or an alpha: a float32 holds its products
# How A and B were initialised does not matter once they are trained, unless it also changed the frozen weights.
_INITS_THAT_KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")


def is_adapter_folder(folder: Path | str) -> bool:
    """Return whether `folder` contains adapters, PEFT's or paddlenlp's, instead of a full model."""
    return any((Path(folder) / name).is_file() for name in (ADAPTER_CONFIG_FILE, PADDLENLP_CONFIG_FILE))


def base_model_of(folder: Path | str) -> str | None:
    """Return the base model that the adapters in `folder` name, a hub id or a folder; None if they name none.

    A relative path is resolved against the adapters' folder, which may have been moved together with the base, else
    against the working directory. A revision is appended to a hub id, "organisation/name@revision".

    Raises:
        ModelFileError: the configuration cannot be read, or names something that is neither a path nor a hub id.
    """
    folder = Path(folder)
    name = ADAPTER_CONFIG_FILE if (folder / ADAPTER_CONFIG_FILE).is_file() else PADDLENLP_CONFIG_FILE
    config = read_json_object(folder / name)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base:
        return None
    try:
        named = Path(base).expanduser()
        found = next((path for path in (folder / named, named) if path.is_dir()), None)
        if base.isprintable():
            return str(found) if found else _hub_id(base, revision)
    except (OSError, ValueError, RuntimeError):  # too long; a character that no name has; the home of nobody
        pass
    raise ModelFileError(f"{folder / name}: base_model_name_or_path: {_shown(base)} is neither a folder nor a hub id")


def _hub_id(base: str, revision: Any) -> str:
    return f"{base}@{revision}" if isinstance(revision, str) and revision else base


def peft_config(
    settings: LoraSettings,
    targets: Sequence[str],
    linears: Sequence[str],
    base: str,
    rank_factor: int = 1,
    towers: tuple[str, ...] = (),
    token_ids: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Return `adapter_config.json` for adapters on `targets`, among all linear layers of the model.

    Args:
        towers: the prefixes of paths that lie in encoders and projectors.
        base: the base model, a folder or a hub id, which may end with "@revision".
        rank_factor: how many times larger the stored rank is than that in training; the scaling stays the same.
        token_ids: of the tokens whose rows are trained, by the name of the embedding or head.
    """
    growth = rank_factor**0.5 if settings.rslora else rank_factor
    targeted, excluded = target_names(targets, linears, towers)
    name, _, revision = (base, "", "") if Path(base).is_absolute() else base.partition("@")
    return {
        **_NEUTRAL,
        "alpha_pattern": {key: _number(alpha * growth) for key, alpha in settings.alpha_pattern.items()},
        "auto_mapping": None,
        "base_model_name_or_path": name,
        "exclude_modules": excluded or None,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": _number(settings.alpha * growth),
        "lora_dropout": settings.dropout,
        "peft_type": "LORA",
        "r": settings.rank * rank_factor,
        "rank_pattern": {key: rank * rank_factor for key, rank in settings.rank_pattern.items()},
        "revision": revision or None,
        "target_modules": targeted,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": {name: list(ids) for name, ids in token_ids.items()} if token_ids else None,
        "use_dora": settings.dora,
        "use_rslora": settings.rslora,
    }


def target_names(
    targets: Sequence[str], linears: Sequence[str], towers: tuple[str, ...] = ()
) -> tuple[list[str], list[str]]:
    """Return what PEFT calls `target_modules` and `exclude_modules`, which together name exactly the targets.

    The first are the last words of the targets' paths, if these name further layers in encoders and projectors only,
    which are then excluded; otherwise full paths. transformers 5 calls the decoder of a model with an encoder
    otherwise than its files do, so full paths of its layers would name nothing there.
    """
    words = {_last_word(path) for path in targets}
    others = {path for path in linears if _last_word(path) in words} - set(targets)
    if others and not all(path.startswith(towers) for path in others):
        return sorted(targets), []
    return sorted(words), sorted(others)


def _last_word(path: str) -> str:
    """Return the last word of a path; the full path if it ends with a number."""
    word = path.rpartition(".")[2]
    return path if word.isdigit() else word


def settings_from_peft(folder: Path, linears: Sequence[str], *, scored: bool = False) -> LoraSettings:
    """Read `adapter_config.json`; `target_modules` of the result are full paths among `linears`.

    Args:
        scored: whether the model is a reward model, whose score adapters bring along.

    Raises:
        ModelFileError: the file cannot be read, or the adapters need a computation that is not available here.
    """
    path = folder / ADAPTER_CONFIG_FILE
    values = read_json_object(path)
    problems = [
        f"{key}: {values[key]!r} is not available"
        for key, neutral in _NEUTRAL.items()
        if values.get(key) not in (neutral, None, [], {})
        and not (scored and key == MODULES_KEY and saves_score(values))
    ]
    problems += [
        f"{key}: {value!r}: this setting is not known here"
        for key, value in values.items()
        if value and key not in _NEUTRAL and key not in _READ and key not in _WITHOUT_EFFECT
    ]
    if values.get("peft_type") != "LORA":
        problems.append(f"peft_type: {values.get('peft_type')!r} is not available; only 'LORA' is")
    problems += _wrong_types(values)
    init = values.get("init_lora_weights", True)
    if init != PISSA and init not in _INITS_THAT_KEEP_THE_BASE:
        problems.append(
            f"init_lora_weights: {init!r} has changed the base weights, and the folder does not say how; "
            "save the adapters with PEFT's path_initial_model_for_weight_conversion"
        )
    if problems:
        raise ModelFileError(f"{path}: these adapters cannot be used:\n" + "\n".join(f"  {line}" for line in problems))
    return LoraSettings(
        rank=values["r"],
        alpha=float(values["lora_alpha"]),
        rslora=bool(values.get("use_rslora")),
        dropout=float(values.get("lora_dropout") or 0.0),
        dora=bool(values.get("use_dora")),
        init=PISSA if init == PISSA else KAIMING,
        target_modules=tuple(name for name in linears if _is_target(values, name)),
        rank_pattern=values.get("rank_pattern") or {},
        alpha_pattern={key: float(alpha) for key, alpha in (values.get("alpha_pattern") or {}).items()},
    )


def _wrong_types(values: Mapping[str, Any]) -> list[str]:
    def is_number(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _LARGEST

    def is_rank(value: Any) -> bool:
        return is_number(value) and isinstance(value, int)

    def maps_to(is_valid: Any, value: Any) -> bool:
        return isinstance(value, dict) and all(map(is_valid, value.values())) and all(map(_compiles, value))

    problems = []
    if not is_rank(values.get("r")):
        problems.append(f"r: expected a positive integer, got {values.get('r')!r}")
    if not is_number(values.get("lora_alpha")):
        problems.append(f"lora_alpha: expected a positive number, got {values.get('lora_alpha')!r}")
    for key, is_valid in (("rank_pattern", is_rank), ("alpha_pattern", is_number)):
        if not maps_to(is_valid, values.get(key) or {}):
            problems.append(f"{key}: expected regular expressions with positive numbers, got {values[key]!r}")
    for key in ("target_modules", "exclude_modules"):
        wanted = values.get(key)
        if isinstance(wanted, str):
            if not _compiles(wanted):
                problems.append(f"{key}: {wanted!r} is not a regular expression")
        elif wanted is not None and not (isinstance(wanted, list) and all(isinstance(word, str) for word in wanted)):
            problems.append(f"{key}: expected a list of names, got {wanted!r}")
    for key in ("use_rslora", "use_dora"):
        if not isinstance(values.get(key), (bool, type(None))):
            problems.append(f"{key}: expected true or false, got {_shown(values[key])}")
    dropout, layers, names = (values.get(key) for key in ("lora_dropout", "layers_to_transform", "layers_pattern"))
    if dropout and not (is_number(dropout) and dropout < 1):
        problems.append(f"lora_dropout: expected a number from 0 to below 1, got {_shown(dropout)}")
    if not all(type(layer) is int for layer in (layers if isinstance(layers, list) else [layers or 0])):
        problems.append(f"layers_to_transform: expected a layer's number or a list of them, got {_shown(layers)}")
    if not all(
        isinstance(word, str) and _compiles(word) for word in (names if isinstance(names, list) else [names or ""])
    ):
        problems.append(f"layers_pattern: expected a regular expression or a list of them, got {_shown(names)}")
    return problems


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _is_target(values: Mapping[str, Any], path: str) -> bool:
    """Return whether the configuration selects a layer, by PEFT's rules."""
    if any(matches(pattern, path) for pattern in _patterns(values.get("exclude_modules"))):
        return False
    if not any(matches(pattern, path) for pattern in _patterns(values.get("target_modules"))):
        return False
    layers = values.get("layers_to_transform")
    if layers in (None, []) or isinstance(values.get("target_modules"), str):
        return True
    containers = values.get("layers_pattern") or [r"[^.]*"]
    for container in [containers] if isinstance(containers, str) else containers:
        found = re.match(rf".*\.{container}\.(\d+)\.", path)
        if found:
            return int(found[1]) in ([layers] if isinstance(layers, int) else layers)
    return False


def _patterns(names: str | list[str] | None) -> list[str]:
    if isinstance(names, str):
        return [REGULAR_EXPRESSION + names]
    return names or []


def _compiles(pattern: Any) -> bool:
    try:
        re.compile(pattern)
    except (re.error, TypeError):
        return False
    return True


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value
