"""How a side of the attention benchmark is measured. NumPy only."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[3])]
from attention_case import Heads, Inputs, Sample, inputs, samples
from turns import serve

from erniekit.model.freed_memory import keep_freed_memory

WARM_UP = 256  # tokens of a call before memory is looked at: libraries are loaded then

Call = Callable[[], list[Any]]  # one pass: tensors of the output and, after a backward pass, of the gradients
Prepare = Callable[[list[Sample], Inputs, str, bool], Call]  # samples, numbers, way, with the backward pass


def _resident(name: str) -> float:
    """MB of this process: VmRSS now, or VmHWM at most."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(name + ":")[1].split()[0]) / 1024


def serve_calls(prepare: Prepare) -> None:
    """What a side does: its first call goes into `--answers` (arrays, and `peak`, the MB it took with the plan or mask
    that it needs), then it makes the calls that are asked for. All sides keep freed memory, as training does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mask", required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--heads", type=Heads.of, required=True)
    parser.add_argument("--way", required=True)
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--answers", type=Path, required=True)
    args = parser.parse_args()
    keep_freed_memory()
    small = "full causal" if args.mask.startswith("equal") else args.mask
    prepare(samples(small, WARM_UP), inputs(WARM_UP, args.heads), args.way, args.backward)()
    numbers = inputs(args.length, args.heads)
    before = _resident("VmRSS")
    call = prepare(samples(args.mask, args.length), numbers, args.way, args.backward)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest so far
    tensors = call()
    peak = _resident("VmHWM") - before
    np.savez(args.answers, *(tensor.numpy() for tensor in tensors), peak=peak)

    def step(_: int) -> tuple[float, int]:
        call()
        return 0.0, args.length

    serve(step)
