"""`erniekit validate CONFIG...`: list every problem of each file, or show its resolved values."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from erniekit.build.checks import refuse_packed_data
from erniekit.build.input_paths import report_missing_paths
from erniekit.build.layout import LayoutPlan, known_model_config, plan_layout
from erniekit.build.local_paths import with_local_paths
from erniekit.build.preflight import preflight
from erniekit.cli.dpo import require_pairs
from erniekit.cli.eval import evaluation_config
from erniekit.cli.layout_report import layout_blocks
from erniekit.cli.ranks import at_least_one, parse_with_overrides
from erniekit.config import Config
from erniekit.config.object_urls import is_url
from erniekit.config.parse import read_pairs
from erniekit.config.recognition import likely_verb
from erniekit.config.registry import PARAMETERS, SECTIONS
from erniekit.config.values import format_value
from erniekit.distributed.topology import topology_from
from erniekit.errors import UserError
from erniekit.export.trained_model import check_export
from erniekit.terminal import escape_control_characters

VALUE_WIDTH = 48
VERBS = ("train", "dpo", "eval", "preview", "pack", "chat", "generate", "export", "codes")
LOADED_FOR = {"dpo": "train", "eval": "train", "pack": "preview"}


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
        choices=VERBS,
        help="check for this verb: whether it would begin (default: train, or what the file is for: chat or export)",
    )
    options = parse_with_overrides(parser, arguments)
    overrides = [word for word in options.words if "=" in word and not os.path.exists(word)]
    files = [word for word in options.words if word not in overrides]
    if not files:
        parser.error("name at least one configuration file")
    if options.world_size and options.verb not in (None, "train", "dpo", "eval"):
        parser.error(f"--world-size applies to training, and --verb is {options.verb}; drop one of them")
    codes: list[int] = []
    for file in files:
        if codes:
            print()
        codes.append(_validate(file, overrides, options))
    return max(codes)


def _validate(file: str, overrides: list[str], options: argparse.Namespace) -> int:
    try:
        verb = options.verb or _verb_of(Path(file), overrides)
        config = with_local_paths(_load(file, overrides, verb), fetches=options.data)
        notes = preflight(config, world_size=options.world_size).notes
        if verb == "pack":
            refuse_packed_data(config)
        if verb == "export" and not is_url(config.basic.output_dir):
            check_export(Path(file), config)
        data, longest = _read_data(config, options.world_size) if options.data else ("", None)
        text = report(config, options.world_size, longest, notes=notes, verb=options.verb, with_defaults=options.all)
        print(text + data)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _verb_of(file: Path, overrides: list[str]) -> str:
    """Return the verb that a file is for, by the names in it."""
    if not file.is_file():  # a stream, which can be read only once
        return "train"
    names = {name for name, _, _ in read_pairs(file)}
    return likely_verb(names | {word.partition("=")[0] for word in overrides})


def _load(file: str, overrides: list[str], verb: str) -> Config:
    """Load a configuration as the verb does, with missing files among the problems."""
    if verb == "eval":
        words = {word.partition("=")[0]: word for word in ("do_train=false", "do_eval=true", *overrides)}
        config = Config.load(file, list(words.values()), verb="train") if Path(file).is_file() else None
        if config is not None and is_url(config.basic.output_dir):  # which model is there, only its store could tell
            return config
        return evaluation_config(Path(file), overrides)
    implied = {"stage": "DPO"} if verb == "dpo" else None
    loaded = Config.load(
        file, overrides, verb=LOADED_FOR.get(verb, verb), implied=implied, inspect=report_missing_paths
    )
    if verb == "dpo":
        require_pairs(loaded)
    return loaded


def report(
    config: Config,
    world_size: int | None = None,
    longest_document: int | None = None,
    *,
    notes: Sequence[str] = (),
    verb: str = "",
    with_defaults: bool = False,
) -> str:
    """Return the resolved configuration as text: values set, values derived, numbers and messages.

    Args:
        world_size: number of ranks; None: as few as the layout needs.
        longest_document: in tokens, if the data has been read.
        notes: what `preflight` found to have no effect.
        verb: for which the configuration is valid; by default the one that it was loaded for.
    """
    chosen = [name for name in PARAMETERS if config.is_set(name)]
    derived = [name for name in PARAMETERS if not config.is_set(name) and config.origin(name) != "default"]
    blocks = [f"{config.path}: valid for `erniekit {verb or config.verb}`"]
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
    ignored = config.ignored_on_gpu() if config.basic.device.startswith("gpu") else config.ignored_on_cpu()
    lines = [*config.messages, *notes, *ignored]
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
    seconds = config.speech.batch_seconds if config.stage.reads_codes else 0.0
    if seconds or config.acceleration.batch_tokens:
        passes = training.gradient_accumulation_steps
        most = f"{passes * seconds:g} seconds" if seconds else f"{passes * config.acceleration.batch_tokens:,} tokens"
        batch = f"{passes} x samples of similar length, at most {most} with padding"
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
    rows: list[tuple[str, ...]] = [
        ("parameters", f"{plan.model.parameter_count():,}{trained}"),
        ("memory", f"about {_size(memory['total'])} for full packs: {parts.replace('_', ' ')}"),
    ]
    return rows + [("", f"not counted: {what}") for what in plan.not_counted]


def _read_data(config: Config, world_size: int | None) -> tuple[str, int | None]:
    """Read the data; return a summary as text, and the length of the longest training sample in tokens."""
    if config.verb == "codes":
        from erniekit.runners.codes import records_summary

        return "\n\n" + escape_control_characters(records_summary(config)), None
    from erniekit.runners.preview import data_summary, longest_sample

    summary = data_summary(config, topology_from(config, world_size).dp_world_size)
    return "\n\n" + escape_control_characters(summary), longest_sample(config)


def _rows(config: Config, names: Iterable[str]) -> list[tuple[str, ...]]:
    return [(name, format_value(config.urls.get(name, config[name])), config.origin(name)) for name in names]


def _block(title: str, rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    name_width = max(len(row[0]) for row in rows) + 2
    value_width = max((min(len(row[1]), VALUE_WIDTH) for row in rows if len(row) > 2), default=0)
    lines = [
        f"  {row[0]:<{name_width}}" + (f"{row[1]:<{value_width}}  {row[2]}" if len(row) > 2 else row[1]) for row in rows
    ]
    return ["\n".join([title, *lines])]


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"
