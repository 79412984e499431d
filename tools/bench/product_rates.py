"""What a processor does at best while a comparison runs: its product rates, and what makes it slower on purpose.

    python tools/bench/product_rates.py [--environments .peers]     # prints one line for each library and thread count

A ratio of two trainers depends on how fast products are beside everything else, so tables say the rate of their run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIDE = Path(__file__).resolve().parent / "sides/products.py"
Rates = dict[str, dict[str, float]]  # "1" and "2" threads -> dtype -> GF/s


def product_rates(python: Path | str, library: str, threads: tuple[int, ...] = (1, 2)) -> Rates:
    """Measure a library's product rates in its own environment: "paddle" or "torch"."""
    rates = {}
    for count in threads:
        environment = {**os.environ, "OMP_NUM_THREADS": str(count)}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            [str(python), str(SIDE), library], env=environment, capture_output=True, text=True, check=True
        )
        rates[str(count)] = json.loads(done.stdout.splitlines()[-1])
    return rates


def in_words(rates: Rates) -> str:
    """Such as "float32 163 and 310 GF/s with 1 and 2 threads, bfloat16 84 and 170"."""
    counts = " and ".join(rates)
    parts = []
    for dtype in next(iter(rates.values())):
        values = " and ".join(f"{by_type[dtype]:.0f}" for by_type in rates.values())
        parts.append(f"{dtype} {values}" + ("" if parts else f" GF/s with {counts} threads"))
    return ", ".join(parts)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep this many further processes multiplying matrices, as other tenants of a machine would."""
    program = "import numpy as np\na = np.ones((512, 512), np.float32)\nwhile True: a @ a"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    running = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="where peers/make.sh has put them")
    torch = parser.parse_args().environments / "torch/bin/python"
    print(f"paddle: {in_words(product_rates(sys.executable, 'paddle'))}")
    if torch.exists():
        print(f"torch: {in_words(product_rates(torch, 'torch'))}")


if __name__ == "__main__":
    main()
