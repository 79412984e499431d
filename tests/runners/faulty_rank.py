"""`erniekit` with a fault in one rank: `python -m tests.runners.faulty_rank FAULT RANK STEP erniekit's words ...`.

The fault happens at the beginning of an optimizer step (counted from 0), and not in a run that was resumed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

from erniekit.environment import import_paddle
from erniekit.errors import TrainingError


def raises(model: Any) -> None:
    raise ValueError("the seventh sample is bad")


def refuses(model: Any) -> None:
    raise TrainingError("step 2: this data cannot be trained on")


def exits(model: Any) -> None:
    sys.exit(3)


def is_killed(model_or_gradient: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(model: Any) -> None:
    threading.Event().wait()


def is_stopped(model: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def is_slow(model: Any) -> None:
    time.sleep(float(os.environ["SECONDS"]))


def is_killed_in_backward(model: Any) -> None:
    """So that the others lose it in their backward pass, where Paddle wraps what they raise."""
    first = next(parameter for parameter in model.parameters() if not parameter.stop_gradient)
    first.register_hook(is_killed)


def tells_its_number(model: Any) -> None:
    with open(os.environ["TELL"], "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")


def main(fault: str, rank: str, step: str, *words: str) -> int:
    import_paddle()
    from erniekit import cli
    from erniekit.training import trainer

    train_step = trainer.train_step

    def faulty_step(*arguments: Any, **more: Any) -> Any:
        if rank in (os.environ["PADDLE_TRAINER_ID"], "every") and more["step"] == int(step):
            globals()[fault](arguments[0])
        return train_step(*arguments, **more)

    if "resume_from_checkpoint=true" not in words:
        trainer.train_step = faulty_step
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
