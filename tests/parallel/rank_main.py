"""What each process of `run_ranks` runs: `python -m tests.parallel.rank_main JOB RESULT`."""

from __future__ import annotations

import faulthandler
import json
import sys
from importlib import import_module
from pathlib import Path

from erniekit.environment import apply_cpu_settings


def main(job_text: str, result: str) -> None:
    job = json.loads(job_text)
    # A rank whose parent has died ends by itself, and one that hangs shows where.
    faulthandler.dump_traceback_later(max(1.0, job["timeout"] - 1.0), exit=True)
    apply_cpu_settings(threads=1)
    module, _, name = job["case"].partition(":")
    returned = getattr(import_module(module), name)(**job["arguments"])
    Path(result).write_text(json.dumps(returned), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
