"""The rate of a matrix product, GF/s, in float32 and bfloat16: through Paddle's MKL and oneDNN, or through torch.

    python products.py paddle | torch        # with OMP_NUM_THREADS set; prints one JSON object

The product is that of a linear layer, 1,024 x 768 by 768 x 3,072, with operands that are ready; the best of 12.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROWS, INNER, COLUMNS = 1024, 768, 3072
REPEATS = 12


def rate(product: Callable[[], object]) -> float:
    """GF/s of the best of several calls: processor time of one thread, wall time of several."""
    clock = time.process_time if os.environ.get("OMP_NUM_THREADS") == "1" else time.perf_counter
    for _ in range(3):
        product()
    best = float("inf")
    for _ in range(REPEATS):
        start = clock()
        product()
        best = min(best, clock() - start)
    return 2 * ROWS * INNER * COLUMNS / best / 1e9


def of_paddle() -> dict[str, float]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from erniekit.environment import import_paddle

    import_paddle()
    import paddle

    from erniekit.native import onednn

    x, w = paddle.randn([ROWS, INNER]), paddle.randn([INNER, COLUMNS])
    rates = {"float32": rate(lambda: paddle.matmul(x, w))}
    if onednn.problem() is None:
        a, b = x.astype("bfloat16"), w.astype("bfloat16")
        out = paddle.empty([ROWS, COLUMNS])
        operands = (a.data_ptr(), b.data_ptr(), out.data_ptr())
        rates["bfloat16"] = rate(lambda: onednn.multiply(ROWS, COLUMNS, INNER, *operands))
    return rates


def of_torch() -> dict[str, float]:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.randn(ROWS, INNER, dtype=dtype), torch.randn(COLUMNS, INNER, dtype=dtype)
        rates[str(dtype).removeprefix("torch.")] = rate(lambda x=x, w=w: torch.nn.functional.linear(x, w))
    return rates


if __name__ == "__main__":
    print(json.dumps({"paddle": of_paddle, "torch": of_torch}[sys.argv[1]]()))
