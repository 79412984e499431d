"""Read the dictionaries of a `config.json` and write them. Needs neither Paddle nor NumPy.

A file of a decoder is one dictionary. One of a model with encoders has the decoder's keys in `text_config`, those of
each encoder in a dictionary of their own, such as `audio_config`, and the rest around them; one of a model that speaks
has the decoder's keys in `llm_config`. Messages then name `text_config.hidden_size`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from erniekit.model.architectures.architecture import Architecture, EncoderConfig, Key
from erniekit.model.architectures.config_keys import key_problems, key_remarks, shown
from erniekit.model.architectures.rope_parameters import ROPE_PARAMETERS, rope_parameters, with_keys_before_5
from erniekit.model.architectures.rope_scaling import rope_scaling_problems

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig

QUANTIZATION = "quantization_config"


class Reading(NamedTuple):
    """What the keys of a `config.json` say.

    Attributes:
        fields: of ModelConfig, but for `other_keys` and `remarks`.
        other_keys: the keys that are not used; of each dictionary within the file under its name.
        remarks: lines on what does not act here.
        problems: lines on what cannot be used; if there are any the rest must not be used.
    """

    fields: dict[str, Any]
    other_keys: dict[str, Any]
    remarks: list[str]
    problems: list[str]


def read_config(architecture: Architecture, values: Mapping[str, Any], ignored_keys: Sequence[str]) -> Reading:
    """Read the keys of a `config.json`; `ignored_keys` as of `ModelConfig.from_json`."""
    if architecture.text is None:
        return _read_decoder(architecture, values, ignored_keys)
    return _read_around_decoder(architecture, architecture.text, values, ignored_keys)


def _read_decoder(
    architecture: Architecture, values: Mapping[str, Any], ignored_keys: Sequence[str], path: str = ""
) -> Reading:
    """Read a dictionary that describes a decoder; `path` is in front of its keys in messages."""
    lines: list[str] = []
    kept = _without(values, ignored_keys)
    plain = with_keys_before_5(kept, architecture.rope_sets, lines)
    _replace_aliases(architecture.aliases, plain, lines)
    fields = _known_values(architecture, plain, lines)
    used = {*architecture.own_keys, *_fields_and_keys(architecture).values()}
    understood = {*used, *architecture.aliases, ROPE_PARAMETERS}
    problems = [path + line for line in lines]
    problems += key_problems(architecture, plain, understood, ignored_keys, path)
    if not problems:
        scaling_key = "rope_scaling" if values.get("rope_scaling") else ROPE_PARAMETERS
        lines = _inconsistencies(architecture, fields)
        lines += rope_scaling_problems(fields.get("rope_scaling"), scaling_key)
        problems = [path + line for line in lines]
    return Reading(fields, _without(plain, used), key_remarks(values, ignored_keys, path), problems)


def _read_around_decoder(
    architecture: Architecture, text: Architecture, values: Mapping[str, Any], ignored_keys: Sequence[str]
) -> Reading:
    """Read a file with a dictionary for the decoder and one for each encoder."""
    problems: list[str] = []
    text_key = architecture.text_key
    names = (text_key, *architecture.encoders)
    parts = {name: _part(values, name, problems) for name in names}
    types = {text_key: text.model_type} | {name: part.model_type for name, part in architecture.encoders.items()}
    for name, part in parts.items():
        if part.setdefault("model_type", types[name]) != types[name]:
            problems.append(f"{name}.model_type: {shown(part['model_type'])} is not supported; only {types[name]!r} is")
        if part.get(QUANTIZATION) is not None:
            problems.append(f"{name}.{QUANTIZATION}: it stands beside {name}, not in it")
    ignored = {name: _within(ignored_keys, f"{name}.") for name in parts}

    decoder = _read_decoder(text, parts[text_key], ignored[text_key], f"{text_key}.")
    fields = {**decoder.fields, "model_type": architecture.key, "own": dict(decoder.fields["own"])}
    other, remarks = {text_key: decoder.other_keys}, list(decoder.remarks)
    problems += decoder.problems
    for name, encoder in architecture.encoders.items():
        fields["own"][name], other[name] = _read_encoder(encoder, parts[name], ignored[name], f"{name}.", problems)
        remarks += key_remarks(parts[name], ignored[name], f"{name}.")

    outer_ignored = [key for key in ignored_keys if not key.startswith(tuple(f"{name}." for name in parts))]
    outer = _without(values, {*parts, *outer_ignored})
    _replace_aliases(architecture.aliases, outer, problems)
    used = {"model_type", *architecture.own_keys}
    fields["own"] |= {name: _own_value(name, key, outer, problems) for name, key in architecture.own_keys.items()}
    problems += key_problems(architecture, outer, {*used, *architecture.aliases}, outer_ignored)
    remarks += key_remarks(_without(values, parts), outer_ignored)
    return Reading(fields, {**_without(outer, used), **other}, remarks, problems)


def _read_encoder(
    encoder: EncoderConfig, values: Mapping[str, Any], ignored_keys: Sequence[str], path: str, problems: list[str]
) -> tuple[Any, dict[str, Any]]:
    """Return the sizes of an encoder, None where a problem was added, and the keys of its dictionary not used."""
    lines: list[str] = []
    kept = _without(values, ignored_keys)
    _replace_aliases(encoder.aliases, kept, lines)
    keys = {name: encoder.key_names.get(name, name) for name in encoder.keys}
    sizes = {name: _own_value(key, encoder.keys[name], kept, lines) for name, key in keys.items()}
    used = {"model_type", *keys.values()}
    lines = [path + line for line in lines]
    lines += key_problems(encoder, kept, {*used, *encoder.aliases}, ignored_keys, path)
    problems += lines
    return None if lines else encoder.sizes(**sizes), _without(kept, used)


def written_config(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of `config.json`, without those of the file itself (`architectures`, the type of weights).

    Keys that transformers 5 renamed stand under both names, so that it and transformers 4 read the same.
    """
    architecture = config.architecture
    if architecture.text is None:
        return _written_decoder(config, architecture, config.other_keys)
    other = _without(config.other_keys, (QUANTIZATION,))
    decoder = _written_decoder(config, architecture.text, other.get(architecture.text_key, {}))
    values = {
        **architecture.saved_keys,
        **other,
        "model_type": architecture.model_type,
        **{key: config.own[key] for key in architecture.own_keys},
        architecture.text_key: decoder,
    }
    for name, encoder in architecture.encoders.items():
        values[name] = _written_encoder(encoder, config.own[name], other.get(name, {}))
    copied = {key: decoder[key] for key in architecture.copied_keys}
    return {**values, **copied, **{alias: values[key] for alias, key in architecture.aliases.items()}}


def _written_decoder(config: ModelConfig, architecture: Architecture, other_keys: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: getattr(config, name) for name, key in _fields_and_keys(architecture).items()}
    own = {key: config.own[key] for key in architecture.own_keys if key in config.own}
    values = {**architecture.saved_keys, **_without(other_keys, (QUANTIZATION,)), **known, **own}
    return {
        **values,
        "model_type": architecture.model_type,
        **{alias: values[key] for alias, key in architecture.aliases.items()},
        ROPE_PARAMETERS: rope_parameters(values, architecture.rope_sets),
    }


def _written_encoder(encoder: EncoderConfig, sizes: Any, other_keys: Mapping[str, Any]) -> dict[str, Any]:
    values = {encoder.key_names.get(name, name): getattr(sizes, name) for name in encoder.keys}
    return {
        **encoder.saved_keys,
        **other_keys,
        **values,
        "model_type": encoder.model_type,
        **{alias: values[key] for alias, key in encoder.aliases.items()},
    }


_POSITIVE = 1.2e-38  # of float32: the smallest that "positive" lets through, for numbers that need not be whole
_LARGEST = {int: 2**31 - 1, float: 3.4e38}
_MOST_LAYERS = 2_000  # weights are listed one by one
_MOST_EXPERTS = 10_000
_MOST_LAYERS_OF_EXPERTS = 30_000  # layers x experts, for the same reason
_KEYS: dict[str, Key] = {
    "vocab_size": Key(int, 1, required=True),
    "hidden_size": Key(int, 1, required=True),
    "intermediate_size": Key(int, 1, required=True),
    "num_hidden_layers": Key(int, 1, required=True, most=_MOST_LAYERS),
    "num_attention_heads": Key(int, 1, required=True),
    "num_key_value_heads": Key(int, 1),
    "head_dim": Key(int, 1),
    "max_position_embeddings": Key(int, 1),
    "rope_theta": Key(float),
    "rope_scaling": Key(dict),
    "rms_norm_eps": Key(float, _POSITIVE, most=1),
    "initializer_range": Key(float, _POSITIVE, most=1000),
    "tie_word_embeddings": Key(bool),
    "model_type": Key(str),
}
_OPTIONAL_KEYS: dict[str, Key] = {  # of fields that some architectures have
    "use_bias": Key(bool),
    "attention_bias": Key(bool),
    "mlp_bias": Key(bool),
    "moe_num_experts": Key(int, 1, most=_MOST_EXPERTS),
    "moe_k": Key(int, 1),
    "moe_intermediate_size": Key(int, 1),
    "moe_num_shared_experts": Key(int, 0),
    "moe_layer_start_index": Key(int, 0),
    "moe_layer_end_index": Key(int, -1),
    "moe_layer_interval": Key(int, 1),
    "moe_norm_min": Key(float, 0),
    "num_nextn_predict_layers": Key(int, 0, most=_MOST_LAYERS),
}


def _fields_and_keys(architecture: Architecture) -> dict[str, str]:
    """The fields of ModelConfig that an architecture has, and the key of each in `config.json`."""
    names = (*_KEYS, *(name for name in _OPTIONAL_KEYS if name in architecture.own_fields))
    return {name: architecture.key_names.get(name, name) for name in names}


def _known_values(architecture: Architecture, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The fields of ModelConfig among `values`, with their types checked and the defaults filled in."""
    known: dict[str, Any] = dict(architecture.defaults)
    for name, key in _fields_and_keys(architecture).items():
        if values.get(key) is None and name in known:
            continue
        value = _checked_value(key, _KEYS.get(name) or _OPTIONAL_KEYS[name], values.get(key), problems)
        if value is not None:
            known[name] = value
    known["own"] = {name: _own_value(name, key, values, problems) for name, key in architecture.own_keys.items()}
    if not problems:
        heads = known["num_attention_heads"]
        known.setdefault("num_key_value_heads", heads)
        if "head_dim" not in known:
            if architecture.head_dim is None and known["hidden_size"] % heads:
                problems.append(f"hidden_size {known['hidden_size']} is not a multiple of num_attention_heads {heads}")
            known["head_dim"] = architecture.head_dim or known["hidden_size"] // heads
    return known


def _own_value(name: str, key: Key, values: dict[str, Any], problems: list[str]) -> Any:
    """Return the value of a key that only some architectures have, or its default; problems as of `_checked_value`."""
    if key.nullable and values.get(name, key) is None:
        return None
    value = _checked_value(name, key, values.get(name), problems)
    return key.default if value is None else value


def _checked_value(name: str, key: Key, value: Any, problems: list[str]) -> Any:
    """Return the value of a key, or None where it is absent or what is wrong with it was added to `problems`."""
    if value is None:
        if key.required:
            problems.append(f"{name}: missing")
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    most = _LARGEST.get(key.kind) if key.most is None else key.most
    if is_number and most is not None and value > most:
        limit = f"{most:,}" if isinstance(most, int) else f"{most:g}"
        problems.append(f"{name}: must be at most {limit}, got {str(value)[:20]}")
        return None
    if key.kind is float and is_number:
        value = float(value)
    if not isinstance(value, key.kind) or (key.kind is not bool and isinstance(value, bool)):
        problems.append(f"{name}: expected {key.kind.__name__}, got {shown(value)}")
        return None
    if is_number and _is_below(value, key.minimum):
        wanted = "positive" if key.minimum in (1, _POSITIVE) else f"at least {key.minimum:g}"
        problems.append(f"{name}: must be {wanted}, got {shown(value)}")
        return None
    if isinstance(value, float) and math.isnan(value):
        problems.append(f"{name}: expected a number, got {shown(value)}")
        return None
    return value


def _is_below(value: Any, minimum: float | None) -> bool:
    return minimum is not None and not value >= minimum  # so that not-a-number is refused as well


def _part(values: Mapping[str, Any], name: str, problems: list[str]) -> dict[str, Any]:
    part = values.get(name)
    if part is not None and not isinstance(part, dict):
        problems.append(f"{name}: expected dict, got {shown(part)}")
    return dict(part) if isinstance(part, dict) else {}


def _within(keys: Sequence[str], path: str) -> list[str]:
    return [key.removeprefix(path) for key in keys if key.startswith(path)]


def _without(values: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in left_out}


def _replace_aliases(aliases: Mapping[str, str], values: dict[str, Any], problems: list[str]) -> None:
    for alias, key in aliases.items():
        value = values.pop(alias, None)
        if value is None:
            continue
        if values.get(key) is not None and values[key] != value:
            problems.append(f"{key}: {shown(values[key])} contradicts {alias}: {shown(value)}; keep the right one")
        values[key] = value


def _inconsistencies(architecture: Architecture, known: dict[str, Any]) -> list[str]:
    problems = []
    if known["num_attention_heads"] % known["num_key_value_heads"]:
        problems.append(
            f"num_attention_heads {known['num_attention_heads']} is not a multiple of "
            f"num_key_value_heads {known['num_key_value_heads']}"
        )
    if known["rope_theta"] <= 1:
        problems.append(f"rope_theta: must be more than 1, got {known['rope_theta']!r}")
    if known["head_dim"] % 2:
        problems.append(f"head_dim {known['head_dim']} is odd; rotary position embeddings turn pairs")
    if known.get("moe_k", 0) > known.get("moe_num_experts", 0):
        chosen, experts = (architecture.key_names.get(name, name) for name in ("moe_k", "moe_num_experts"))
        problems.append(f"{chosen} {known['moe_k']} is more than {experts} {known['moe_num_experts']}")
    if known["num_hidden_layers"] * known.get("moe_num_experts", 0) > _MOST_LAYERS_OF_EXPERTS:
        experts = architecture.key_names.get("moe_num_experts", "moe_num_experts")
        problems.append(
            f"num_hidden_layers {known['num_hidden_layers']:,} x {experts} {known['moe_num_experts']:,}: at most "
            f"{_MOST_LAYERS_OF_EXPERTS:,}"
        )
    return problems
