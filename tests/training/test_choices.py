"""What a run answers to its user."""

from __future__ import annotations

from erniekit.training.checkpoint.state import TrainerState
from erniekit.training.choices import time_line


def test_time_is_told_from_the_mean_of_the_run() -> None:
    state = TrainerState(step=300)
    state.whole_run.seconds = 600.0
    assert time_line(state, 9000) == (
        "time: 300 steps took 10:00, 2 s each; the last step is made in 4:50:00, evaluations and checkpoints not "
        "counted"
    )
    assert "; step 330 is made in 1:00, " in time_line(state, 9000, 330)
    assert time_line(state, 9000, 300) == "time: step 300 is made already; this is after step 300"
    assert time_line(TrainerState(), 9000) == "time: no step is made yet"
