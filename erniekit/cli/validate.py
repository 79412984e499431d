"""`erniekit validate CONFIG...`: list every problem of each file, or show its resolved values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from erniekit.build.checks import check_paths, check_positions
from erniekit.build.layout import LayoutPlan, known_model_config, plan_layout
from erniekit.cli.layout_report import layout_blocks
from erniekit.cli.ranks import at_least_one, parse_with_overrides
from erniekit.config import Config
from erniekit.config.registry import PARAMETERS, SECTIONS
from erniekit.config.values import format_value
from erniekit.distributed.topology import topology_from
from erniekit.errors import UserError
from erniekit.terminal import escape_control_characters

VALUE_WIDTH = 48


def run(arguments: list[str]) -> int:
    """Check each file and print its resolved configuration, or all its problems. Return 2 if any file has a problem."""
    parser = argparse.ArgumentParser(
        prog="erniekit validate",
        description="Check configuration files and show the resolved values, their origins, and derived numbers.",
        epilog="Example: erniekit validate sft.yaml learning_rate=1e-4 --data",
    )
    parser.add_argument(
        "words", nargs="+", metavar="CONFIG | name=value", help="files, and parameters that override them"
    )
    parser.add_argument("--all", action="store_true", help="also show the parameters that keep their defaults")
    parser.add_argument(
        "--data", action="store_true", help="read the data: count the steps and report how well it packs"
    )
    parser.add_argument(
        "--world-size",
        type=at_least_one,
        metavar="N",
        help="check the layout for a job of N ranks: which rank holds which shard, and the estimated memory of each",
    )
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
    if options.world_size and options.verb != "train":
        parser.error(f"--world-size applies to training, and --verb is {options.verb}; drop one of them")
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
            _check_model(config, options.world_size)
        data, longest = _read_data(config, options.world_size) if options.data else ("", None)
        print(report(config, options.world_size, longest, with_defaults=options.all) + data)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _check_model(config: Config, world_size: int | None) -> None:
    """Check that the model has enough positions and that the layout fits the ranks and, if it is known, the model.

    Raises:
        ConfigurationError: the model has fewer positions than `max_seq_len`, or the layout does not fit.
    """
    model = known_model_config(config)
    if isinstance(model, str):
        topology_from(config, world_size)
    else:
        check_positions(config, model)
        plan_layout(config, model, world_size)


def report(
    config: Config,
    world_size: int | None = None,
    longest_document: int | None = None,
    *,
    with_defaults: bool = False,
) -> str:
    """Return the resolved configuration as text: values set, values derived, numbers and messages.

    Args:
        world_size: number of ranks; None: as few as the layout needs.
        longest_document: in tokens, if the data has been read.
    """
    chosen = [name for name in PARAMETERS if config.is_set(name)]
    derived = [name for name in PARAMETERS if not config.is_set(name) and config.origin(name) != "default"]
    blocks = [f"{config.path}: valid for `erniekit {config.verb}`"]
    blocks += _block("set", _rows(config, chosen))
    blocks += _block("follows from other values", _rows(config, derived))
    if with_defaults:
        for section in SECTIONS:
            names = [item.name for item in section.parameters if config.origin(item.name) == "default"]
            blocks += _block(f"defaults of {section.title}", _rows(config, names))
    if config.verb == "train":
        model, topology = known_model_config(config), topology_from(config, world_size)
        plan = model if isinstance(model, str) else plan_layout(config, model, world_size, longest_document)
        blocks += _block("derived numbers", derived_numbers(config, topology.dp_world_size, plan))
        if world_size or topology.world_size > 1:
            blocks += layout_blocks(config, topology, None if isinstance(plan, str) else plan)
    lines = [*config.messages, *config.ignored_on_cpu()]
    if lines:
        blocks.append("\n".join(["notes", *(f"  {line}" for line in lines)]))
    return escape_control_characters("\n\n".join(blocks))


def derived_numbers(config: Config, dp_world_size: int, plan: LayoutPlan | str) -> list[tuple[str, ...]]:
    """Return rows with the batch, the steps, the size of the model and its memory.

    Args:
        dp_world_size: number of data-parallel ranks, which share a global batch.
        plan: the layout, or the reason why there is none.
    """
    training = config.training
    per_dp_rank = f" on each of {dp_world_size} dp ranks" if dp_world_size > 1 else ""
    if budget := config.acceleration.batch_tokens:
        passes = training.gradient_accumulation_steps
        batch = f"{passes} x samples of similar length, at most {passes * budget:,} tokens with padding"
        return [("global batch", batch + per_dp_rank), ("steps", _steps(config, dp_world_size)), *_model_numbers(plan)]
    packs = training.per_device_train_batch_size * training.gradient_accumulation_steps * dp_world_size
    rows = f"{packs} {'pack' if config.acceleration.packing else 'sample'}{'s' if packs > 1 else ''}"
    batch = f"{rows} of up to {training.max_seq_len:,} tokens, at most {packs * training.max_seq_len:,} tokens"
    return [("global batch", batch), ("steps", _steps(config, dp_world_size)), *_model_numbers(plan)]


def _steps(config: Config, dp_world_size: int) -> str:
    if not config.basic.do_train:
        return "none: do_train is false"
    if config.training.max_steps > 0:
        return f"{config.training.max_steps:,}"
    from erniekit.build.step_count import cached_step_count

    known = cached_step_count(config, dp_world_size=dp_world_size)
    return "depend on the data; --data counts them" if known is None else f"{known:,} (counted before on this data)"


def _model_numbers(plan: LayoutPlan | str) -> list[tuple[str, ...]]:
    from erniekit.model.lora.config import adapter_parameter_count

    if isinstance(plan, str):
        return [("parameters", f"unknown: {plan}"), ("memory", "unknown without the model's shape")]
    adapters, memory = plan.work.adapters, plan.max_memory
    trained = f", {adapter_parameter_count(plan.model, adapters):,} trained" if adapters else ""
    parts = ", ".join(f"{name} {_size(size)}" for name, size in memory.items() if size and name != "total")
    return [
        ("parameters", f"{plan.model.parameter_count():,}{trained}"),
        ("memory", f"about {_size(memory['total'])} for full packs: {parts.replace('_', ' ')}"),
    ]


def _read_data(config: Config, world_size: int | None) -> tuple[str, int | None]:
    """Read the data; return a summary as text, and the length of the longest training sample in tokens."""
    from erniekit.runners.preview import data_summary, longest_sample

    summary = data_summary(config, topology_from(config, world_size).dp_world_size)
    return "\n\n" + escape_control_characters(summary), longest_sample(config)


def _rows(config: Config, names: Iterable[str]) -> list[tuple[str, ...]]:
    return [(name, format_value(config[name]), config.origin(name)) for name in names]


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
