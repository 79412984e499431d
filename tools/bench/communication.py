"""What the ranks of a layout send to each other in one training step: counted, and by the formulas.

    python tools/bench/communication.py [--hidden 64] [--layers 8] [--length 256] [--micro-batches 4] [--write]

Trains as `erniekit train` does on rows of full length, for two and for six steps: the difference counts steps alone,
without what starts and ends a run. Counted are the bytes that a rank hands to the sockets of a group of ranks, float32.
The formulas are those of `distributed/planning/communication.py`, by which `erniekit validate --world-size` estimates
layouts that are not here. Prints a Markdown table: for every layout and group the rank that sends most. The pair of
stages that shares a tied embedding counts with its pipeline. (Messages of up to 32 KB the CPU backend sends to all
ranks at once, which for more than two is more than the formulas count; rows of the default length are longer.)
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.distributed.ranks import run_ranks
from tools.bench.marked import ESTIMATES, with_table
from tools.parity.layout_run import ROOT, make_model
from tools.parity.layouts import LAYOUTS, MODELS, Layout

STEPS = 2, 6
BY_NAME = {layout.name: layout for layout in LAYOUTS}
AXES = ("data", "pipeline", "sharding", "tensor")
SHOWN = (
    "dp2", "tp2", "tp4", "tp2 + sp", "pp2", "sharding1 x 2", "sharding2 x 2", "sharding3 x 2", "tp2 x pp2 + sp",
    "ep2 over mp", "ep2 over data",
)  # fmt: skip


def train_and_count(parameters: dict[str, Any]) -> dict[str, int]:
    """What every rank executes. Returns the bytes it has sent in the group of each axis."""
    from erniekit.config import Config
    from erniekit.distributed.cpu_backend import bytes_sent
    from erniekit.runners.train import run_training

    run_training(Config.from_mapping(parameters, verb="train"))
    from paddle.distributed import fleet

    groups = fleet.get_hybrid_communicate_group()
    of_axes = (
        groups.get_data_parallel_group(),
        groups.get_pipe_parallel_group(),
        groups.get_sharding_parallel_group(),
        groups.get_model_parallel_group(),
    )
    axes = {group.id: axis for axis, group in zip(AXES, of_axes, strict=True) if group.nranks > 1}
    counted: dict[str, int] = {}
    for number, size in bytes_sent().items():
        axis = axes.get(number, "pipeline" if "pipeline" in axes.values() else "others")
        counted[axis] = counted.get(axis, 0) + size
    return counted


def counted_bytes(layout: Layout, parameters: Mapping[str, Any]) -> list[dict[str, float]]:
    """The bytes that each rank sends in a step, by axis."""
    from tools.bench import communication  # ranks find the function by its module, which this script's own is not

    few, many = (
        run_ranks(
            communication.train_and_count, layout.ranks, timeout=300, parameters={**parameters, "max_steps": steps}
        )
        for steps in STEPS
    )
    between = STEPS[1] - STEPS[0]
    return [
        {axis: (size - less.get(axis, 0)) / between for axis, size in more.items()}
        for less, more in zip(few, many, strict=True)
    ]


def computed_bytes(layout: Layout, parameters: Mapping[str, Any], settings: Mapping[str, Any]) -> list[dict[str, int]]:
    """The same by the formulas."""
    from erniekit.config import Config
    from erniekit.distributed.planning.communication import step_bytes
    from erniekit.distributed.planning.memory import Workload
    from erniekit.distributed.topology import topology_from
    from erniekit.model.architectures.model_config import ModelConfig

    config = Config.from_mapping({**parameters, "max_steps": 1}, verb="train")
    topology = topology_from(config, layout.ranks)
    work = Workload(
        batch_size=config.training.per_device_train_batch_size,
        max_seq_len=config.training.max_seq_len,
        accumulation=config.training.gradient_accumulation_steps,
        sharding=int(config.distributed.sharding.removeprefix("stage")) if topology.sharding > 1 else 0,
    )
    model = ModelConfig.from_json(dict(settings))
    ranks = []
    for rank in range(layout.ranks):
        sent = step_bytes(model, work, topology, pp_stage=topology.coordinates(rank).pipeline)
        experts = sent.pop("experts")
        if topology.expert_axis is not None:
            sent[topology.expert_axis] += experts
        ranks.append(sent)
    return ranks


def write_rows(path: Path, length: int) -> None:
    """A text long enough for rows of exactly `length` tokens, and more of them than the steps take."""
    words = " ".join(str(number % 97) for number in range(200 * length))
    path.write_text(json.dumps({"text": words}) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="tokens of a row; a micro-batch is one row")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a rank, in a step")
    parser.add_argument("--layouts", nargs="+", choices=BY_NAME, default=SHOWN, metavar="NAME", help=", ".join(SHOWN))
    parser.add_argument("--write", action="store_true", help=f"put the table into {ESTIMATES.relative_to(ROOT)}")
    args = parser.parse_args()
    table = [
        "| layout | group | MB a rank sends in a step | by the formulas | counted / formulas |",
        "|---|---|---:|---:|---:|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.jsonl"
        write_rows(text, args.length)
        for name in args.layouts:
            layout = BY_NAME[name]
            kind = "moe" if layout.experts else "dense"
            settings = MODELS[kind] | {
                "hidden_size": args.hidden,
                "intermediate_size": 2 * args.hidden,
                "num_hidden_layers": args.layers,
                "head_dim": args.hidden // MODELS[kind]["num_attention_heads"],
            }
            model = Path(folder) / kind
            if not model.exists():
                run_ranks(make_model, 1, model_folder=str(model), settings=settings)
            parameters = {
                "stage": "PT", "model_name_or_path": str(model), "continue_training": True,
                "train_dataset_path": str(text), "train_dataset_type": "text", "max_seq_len": args.length,
                "packing": False, "random_shuffle": False, "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": args.micro_batches, "save_strategy": "no", "do_eval": False,
                "report_to": "none", "output_dir": str(Path(folder) / "run"), "overwrite_output_dir": True,
                "data_cache_dir": str(Path(folder) / "cache"), **layout.parameters,
            }  # fmt: skip
            counted, computed = counted_bytes(layout, parameters), computed_bytes(layout, parameters, settings)
            table += rows(name, counted, computed)
            print(table[-1], file=sys.stderr, flush=True)
    print("\n".join(table))
    if args.write:
        ESTIMATES.write_text(with_table("communication", "\n".join(table), ESTIMATES), encoding="utf-8")


def rows(name: str, counted: list[dict[str, float]], computed: list[dict[str, int]]) -> list[str]:
    """A row for each group of the layout: the rank that sends most."""
    lines = []
    for axis in AXES:
        sent, by_formula = max(
            (own.get(axis, 0.0), formula[axis]) for own, formula in zip(counted, computed, strict=True)
        )
        if sent or by_formula:
            ratio = f"{sent / by_formula:.3f}" if by_formula else "-"
            lines.append(f"| {name} | {axis} | {sent / 1e6:.3f} | {by_formula / 1e6:.3f} | {ratio} |")
    return lines


if __name__ == "__main__":
    main()
