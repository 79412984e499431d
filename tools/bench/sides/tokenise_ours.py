"""This project's side of tools/bench/tokenise.py: opens a data set, which tokenises it where it is not in the cache."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from erniekit.data.conversation import Source
from erniekit.data.open_dataset import open_dataset
from erniekit.data.sampler import StepPlan
from erniekit.data.templates.ernie import chat_template
from erniekit.data.tokenizers.tokenizer import load_tokenizer

ROW = 16_384  # tokens; no record of the benchmark is longer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--plan", action="store_true", help="plan two epochs too")
    parser.add_argument("path", type=Path)
    parser.add_argument("cache", type=Path)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model)
    template = chat_template(tokenizer)
    start, own = time.perf_counter(), time.process_time()
    source = Source(options.path, "erniekit", 1.0)
    made = open_dataset([source], tokenizer, template, max_seq_len=ROW, over_length="error", cache_dir=options.cache)
    if options.plan:
        plan = StepPlan(
            made, max_seq_len=ROW, packing=True, greedy=True, window=500, batch_size=1, accumulation=1, seed=1,
            shuffle=True, strategy="concat",
        )  # fmt: skip
        plan.total_steps(-1, 2)
    figures = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - own}
    figures["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    picked = ((i, made.sample(i)) for i in range(0, len(made), max(1, len(made) // 50)))
    shown = {i: [sample.input_ids.tolist(), sample.labels.tolist()] for i, sample in picked}
    tokens = int(made.lengths.sum(dtype=int))
    print(json.dumps({**figures, "samples": len(made), "tokens": tokens, "shown": shown}), flush=True)


if __name__ == "__main__":
    main()
