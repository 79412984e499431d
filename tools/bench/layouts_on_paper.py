"""What the example configurations of ERNIE-4.5 21B and 300B would take on their GPUs: computed, nothing is run.

    python tools/bench/layouts_on_paper.py [--write | --check]

Of each configuration: memory of the rank that takes most, bytes that the busiest rank sends in a
step by axis, and the share of a step in which stages wait. The formulas are those of `erniekit validate --world-size`
(distributed/planning/memory.py, distributed/planning/communication.py, distributed/stages.py). `--write` puts the
table into docs/layout-estimates.md, `--check` compares it with the table there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from marked import ESTIMATES, with_table

from erniekit.build.layout import plan_layout
from erniekit.config import Config
from erniekit.distributed.topology import Topology
from erniekit.model.architectures.published import published_model

ROOT = Path(__file__).parents[2]
MODELS = ("ernie-4.5-21b-a3b", "ernie-4.5-300b-a47b")
MEMORY = ("parameters", "gradients", "optimizer", "activations", "logits", "workspace", "total")
AXES = ("tensor", "experts", "pipeline", "sharding")
LETTERS = {"tensor": "tp", "pipeline": "pp", "sharding": "sharding"}


def table() -> str:
    """The Markdown between the marks."""
    head = ["configuration", "layout", "ranks", *(f"{name}" for name in MEMORY), *(f"sent: {axis}" for axis in AXES)]
    lines = ["| " + " | ".join([*head, "waiting"]) + " |", "|---|---|" + "---:|" * (len(head) - 1)]
    alike: dict[tuple[str, ...], list[str]] = {}  # SFT and DPO of a length take the same
    for path in configurations():
        name, *cells = row(path)
        alike.setdefault(tuple(cells), []).append(name)
    lines += ["| " + " | ".join([_joined(names), *cells]) + " |" for cells, names in alike.items()]
    return "\n".join(lines)


def _joined(names: list[str]) -> str:
    """["21b/sft-8k", "21b/dpo-8k"] as "21b/sft-8k, dpo-8k"."""
    return ", ".join([names[0], *(name.partition("/")[2] for name in names[1:])])


def configurations() -> Iterator[Path]:
    for model in MODELS:
        yield from sorted((ROOT / "examples/configs" / model).glob("*.yaml"), key=_order)


def row(path: Path) -> list[str]:
    config = Config.load(path)
    model = published_model(config.basic.model_name_or_path)
    assert model is not None
    plan = plan_layout(config, model)
    topology, max_memory, max_traffic = plan.topology, plan.max_memory, plan.max_traffic
    return [
        f"{path.parent.name.removeprefix('ernie-4.5-')}/{path.stem}",
        _layout(topology),
        str(topology.world_size),
        *(f"{max_memory[name] / 1e9:.1f}" for name in MEMORY),
        *(f"{max_traffic[axis] / 1e9:.1f}" if max_traffic[axis] else "" for axis in AXES),
        f"{plan.bubble:.0%}" if topology.pipeline > 1 else "",
    ]


def _layout(topology: Topology) -> str:
    parts = [f"{letters}{topology.degree(axis)}" for axis, letters in LETTERS.items() if topology.degree(axis) > 1]
    return " x ".join(parts) or "one GPU"


def _order(path: Path) -> tuple[str, int, bool]:
    method, _, length = path.stem.rpartition("-")
    return method.removeprefix("sft").removeprefix("dpo"), int(length.removesuffix("k")), path.stem.startswith("dpo")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/layout-estimates.md")
    parser.add_argument("--check", action="store_true", help="only check that the table there is up to date")
    arguments = parser.parse_args()
    if not (arguments.write or arguments.check):
        print(table())
        return 0
    made = with_table("computed", table(), ESTIMATES)
    if arguments.check and made != ESTIMATES.read_text(encoding="utf-8"):
        print(f"stale: {ESTIMATES}; run python {sys.argv[0]} --write", file=sys.stderr)
        return 1
    if arguments.write:
        ESTIMATES.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
