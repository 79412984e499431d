"""`erniekit validate CONFIG...`: every problem of every file, or what the file comes to."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from erniekit.cli.overrides import parse_with_overrides
from erniekit.errors import UserError
from erniekit.parameters import Config
from erniekit.parameters.dpo import reference_way
from erniekit.parameters.schema import PARAMETERS, SECTIONS
from erniekit.parameters.values import shown
from erniekit.runners.checks import check_paths, check_positions
from erniekit.runners.hub_cache import local_model_folder

if TYPE_CHECKING:
    from erniekit.model.configuration import ModelConfig

VALUE_WIDTH = 48


def run(arguments: list[str]) -> int:
    """Check each file and print its resolved configuration, or all its problems; 2 if any file has one."""
    parser = argparse.ArgumentParser(
        prog="erniekit validate",
        description="Check configuration files and show what they come to: values, their origins, and what follows.",
        epilog="Example: erniekit validate sft.yaml learning_rate=1e-4 --data",
    )
    parser.add_argument(
        "words", nargs="+", metavar="CONFIG | name=value", help="files, and parameters that override them"
    )
    parser.add_argument("--all", action="store_true", help="show the parameters that keep their defaults, too")
    parser.add_argument("--data", action="store_true", help="read the data: exact steps and how well it packs")
    parser.add_argument(
        "--verb",
        default="train",
        choices=("train", "preview", "chat", "generate", "export"),
        help="check for this verb",
    )
    options = parse_with_overrides(parser, arguments)
    overrides = [word for word in options.words if "=" in word and not Path(word).exists()]
    files = [word for word in options.words if word not in overrides]
    if not files:
        parser.error("name at least one configuration file")
    codes: list[int] = []
    for file in files:
        if codes:
            print()
        codes.append(_validate(file, overrides, options))
    return max(codes)


def _validate(file: str, overrides: list[str], options: argparse.Namespace) -> int:
    try:
        config = Config.load(file, overrides, verb=options.verb)
        if options.verb in ("train", "preview"):
            check_paths(config)
            _check_positions(config)
        data = "\n\n" + _data_summary(config) if options.data else ""  # first: it also counts the steps
        print(report(config, with_defaults=options.all) + data)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _check_positions(config: Config) -> None:
    """Raise ConfigurationError where the model is there and its positions end before `max_seq_len` does."""
    model = _model_config(config)
    if not isinstance(model, str):
        check_positions(config, model)


def report(config: Config, *, with_defaults: bool = False) -> str:
    """The resolved configuration as text: what the user set, what follows from it, derived numbers, messages."""
    chosen = [name for name in PARAMETERS if config.is_set(name)]
    following = [name for name in PARAMETERS if not config.is_set(name) and config.origin(name) != "default"]
    blocks = [f"{config.path}: valid for `erniekit {config.verb}`"]
    blocks += _block("set", _rows(config, chosen))
    blocks += _block("follows from other values", _rows(config, following))
    if with_defaults:
        for section in SECTIONS:
            names = [item.name for item in section.parameters if config.origin(item.name) == "default"]
            blocks += _block(f"defaults of {section.title}", _rows(config, names))
    if config.verb == "train":
        blocks += _block("comes to", derived_numbers(config))
    lines = [*config.messages, *config.without_effect_on_cpu()]
    if lines:
        blocks.append("\n".join(["notes", *(f"  {line}" for line in lines)]))
    return "\n\n".join(blocks)


def derived_numbers(config: Config) -> list[tuple[str, ...]]:
    """What follows from the configuration without reading data: batch, steps, size of the model, memory."""
    training = config.training
    if budget := config.acceleration.batch_tokens:
        passes = training.gradient_accumulation_steps
        batch = f"{passes} x samples of similar length, at most {passes * budget:,} tokens with padding"
        return [("global batch", batch), ("steps", _steps(config)), *_model_numbers(config)]
    packs = training.per_device_train_batch_size * training.gradient_accumulation_steps
    rows = f"{packs} {'pack' if config.acceleration.packing else 'sample'}{'s' if packs > 1 else ''}"
    batch = f"{rows} of up to {training.max_seq_len:,} tokens, at most {packs * training.max_seq_len:,} tokens"
    return [("global batch", batch), ("steps", _steps(config)), *_model_numbers(config)]


def _steps(config: Config) -> str:
    if not config.basic.do_train:
        return "none: do_train is false"
    if config.training.max_steps > 0:
        return f"{config.training.max_steps:,}"
    from erniekit.runners.known_steps import known_steps

    known = known_steps(config)
    return "depend on the data; --data counts them" if known is None else f"{known:,} (counted before on this data)"


def _model_config(config: Config) -> ModelConfig | str:
    """The shape of the model, or why it is unknown, which is no problem of the configuration: it may be made later."""
    from erniekit.model.configuration import ModelConfig

    try:
        folder = local_model_folder(config)
        if folder is None:
            return f"{config.basic.model_name_or_path} is not here yet; training fetches it"
        return ModelConfig.from_folder(folder)
    except UserError as error:
        return str(error)


def _most_rows(config: Config) -> int:
    """Rows of a micro-batch at full length; with a budget of tokens, as many as it holds."""
    budget = config.acceleration.batch_tokens
    return -(-budget // config.training.max_seq_len) if budget else config.training.per_device_train_batch_size


def _model_numbers(config: Config) -> list[tuple[str, ...]]:
    from erniekit.model.adapters.settings import adapter_parameter_count
    from erniekit.model.memory_estimate import training_memory
    from erniekit.runners.adapters import adapter_plan

    model = _model_config(config)
    if isinstance(model, str):
        return [("parameters", f"unknown: {model}"), ("memory", "unknown without the model's shape")]
    layers = model.num_hidden_layers
    recomputed = max(0, layers - config.memory.no_recompute_layers) if config.memory.recompute else 0
    adapters = adapter_plan(config, model)
    shapes = model.weight_shapes()
    trained = adapter_parameter_count(shapes, adapters.settings) if adapters else model.parameter_count()
    memory = training_memory(
        model,
        trainable=trained,
        batch_size=_most_rows(config),
        max_seq_len=config.training.max_seq_len,
        recomputed_layers=recomputed,
        fused_head=config.memory.use_fused_head_and_loss_fn,
        dense_mask=config.uses_dense_mask,
        reference_copy=config.basic.stage == "DPO" and reference_way(config.dpo, lora=config.lora.lora) == "copy",
    )
    parts = ", ".join(f"{name} {_size(size)}" for name, size in memory.items() if size and name != "total")
    return [
        ("parameters", f"{model.parameter_count():,}" + (f", {trained:,} trained" if adapters else "")),
        ("memory", f"about {_size(memory['total'])} for full packs: {parts.replace('_', ' ')}"),
    ]


def _data_summary(config: Config) -> str:
    from erniekit.runners.preview import data_summary

    return str(data_summary(config))


def _rows(config: Config, names: Iterable[str]) -> list[tuple[str, ...]]:
    return [(name, shown(config[name]), config.origin(name)) for name in names]


def _block(title: str, rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    name_width = max(len(row[0]) for row in rows) + 2
    value_width = max((min(len(row[1]), VALUE_WIDTH) for row in rows if len(row) > 2), default=0) + 2
    lines = [
        f"  {row[0]:<{name_width}}" + (f"{row[1]:<{value_width}}{row[2]}" if len(row) > 2 else row[1]) for row in rows
    ]
    return ["\n".join([title, *lines])]


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"
