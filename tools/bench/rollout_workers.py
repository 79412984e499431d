"""Rollouts with 0, 1 and 2 workers of Ray on this machine: seconds to sample, and to send the weights.

    python tools/bench/rollout_workers.py [--repeats 3] [--answers 64] [--length 64]

Needs the extra `ray`. Prints a Markdown table: the median over some rollouts with the quickstart's model shape; "start"
is what the first rollout takes longer: Ray, the workers, their models. Processor time is that of sampling, in all of
them, and says more than the clock on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from erniekit.environment import cpu_settings, import_paddle

MODEL = Path("examples/models/tiny-ernie")


def config_of(folder: Path, workers: int) -> Any:
    from erniekit.config import Config

    data = folder / "prompts.jsonl"
    data.write_text(json.dumps({"prompt": "What is 1 + 2?", "answer": "3"}) + "\n")
    values = {
        "stage": "GRPO", "model_name_or_path": str(MODEL), "continue_training": False, "rewards": ["exact_match"],
        "train_dataset_path": str(data), "output_dir": str(folder / "run"), "rollout_workers": workers, "device": "cpu",
        "max_seq_len": 512, "max_steps": 1,
    }  # fmt: skip
    return Config.from_mapping(values)


def processor_seconds(pool: Any) -> float:
    """Return the processor time of this process and of the workers so far."""
    total = time.process_time()
    for process in pool.processes() if pool is not None else []:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def measured(workers: int, repeats: int, answers: int, length: int) -> dict[str, float]:
    """Return the seconds of the start, of sending weights and of sampling."""
    from erniekit.build.model import open_model
    from erniekit.rollouts.records import policy_fingerprint
    from erniekit.rollouts.sampling import sample_answers
    from erniekit.rollouts.workers import RolloutWorkers
    from erniekit.training.collectives import SINGLE_PROCESS

    settings = {"longest": length, "stop_token_ids": (), "temperature": 1.0, "seed": 1}
    asked = [[20 + number, 30, 40, 50, 60, 70, 80, 90] for number in range(answers // 8) for _ in range(8)]
    sending, sampling, processors = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(Path(folder), workers)
        model = open_model(config, None)
        fingerprint = policy_fingerprint(model, SINGLE_PROCESS)
        pool = RolloutWorkers(config, settings) if workers else None
        try:
            for rollout in range(repeats + 1):
                began = time.perf_counter()
                if pool is not None:
                    pool.send(model, fingerprint)
                sent, used = time.perf_counter(), processor_seconds(pool)
                streams = range(rollout * answers, (rollout + 1) * answers)
                if pool is not None:
                    pool.sample(asked, streams, 8)
                else:
                    sample_answers(model, asked, streams, **settings)
                sending.append(sent - began)
                sampling.append(time.perf_counter() - sent)
                processors.append(processor_seconds(pool) - used)
        finally:
            if pool is not None:
                pool.close()
    median = statistics.median
    later = median(sending[1:]) + median(sampling[1:])
    start = sending[0] + sampling[0] - later
    rest = {"sample": median(sampling[1:]), "processor": median(processors[1:])}
    return {"start": start, "send": median(sending[1:]), **rest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    import_paddle()
    print(f"OMP_NUM_THREADS={cpu_settings()['OMP_NUM_THREADS']}, {options.answers} answers x {options.length} tokens\n")
    print("| rollout_workers | start | send weights | sample | tokens/s | processor time |\n|---|---|---|---|---|---|")
    for workers in (0, 1, 2):
        found = measured(workers, options.repeats, options.answers, options.length)
        speed = options.answers * options.length / found["sample"]
        times = [f"{found['start']:.1f} s", f"{found['send']:.3f} s", f"{found['sample']:.2f} s"]
        row = [str(workers), *times, f"{speed:,.0f}", f"{found['processor']:.2f} s"]
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
