"""`erniekit train` up to its first step: the words behind the script are those of the command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from stages import before, last, mark

import erniekit.cli.train as verb
from erniekit.cli import main


def loaded() -> None:
    """Paddle, and what training needs of this package; then watch the parts of the run."""
    import_paddle()
    import erniekit.runners.train as run
    from erniekit.training.trainer import Trainer

    mark("imports")
    before(run, "open_model", "data")
    before(Trainer, "fit", "model")
    finish: Any = Trainer._finish_step

    def first(self: Trainer, result: Any) -> None:
        finish(self, result)
        last("first step", result.totals.loss)

    Trainer._finish_step = first  # type: ignore[method-assign]


import_paddle, verb.import_paddle = verb.import_paddle, loaded
before(verb, "train", "configuration")
main(["train", *sys.argv[1:]])
