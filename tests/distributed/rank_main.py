"""What each process of `run_ranks` runs: `python -m tests.distributed.rank_main JOB`."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path

from erniekit.distributed.rank import attach
from erniekit.environment import apply_cpu_settings


def main(job_text: str) -> None:
    launcher = attach()
    job = json.loads(job_text)
    apply_cpu_settings(threads=1)
    module, _, name = job["case"].partition(":")
    try:
        returned = getattr(import_module(module), name)(**job["arguments"])
    except Exception as error:
        if launcher is None:
            raise
        launcher.report_error(error)
        sys.exit(1)
    result = Path(job["folder"]) / f"{os.environ['PADDLE_TRAINER_ID']}.returned"
    result.write_text(json.dumps(returned), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
