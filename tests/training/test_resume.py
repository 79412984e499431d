"""N steps are the same as k steps, an end, a resume and N - k steps: bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from erniekit.training.callbacks import Callback
from erniekit.training.checkpoint.resume import Start, open_output_folder

from .fakes import FakePlan, Recorder, fake_trainer

STEPS = 9  # three epochs of three steps
FRESH = Start(None)


class KilledError(Exception):
    """Ends a run in the middle of an epoch, as a kill does."""


class KillAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, record: dict) -> None:
        if record["step"] == self.step:
            raise KilledError


@pytest.mark.parametrize("killed_at", [2, 5, 7])
def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, killed_at: int) -> None:
    plain = {
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 3,
        "evaluation_strategy": "steps",
        "eval_steps": 4,
    }
    plan = FakePlan(4, batch_size=2, accumulation=1)
    whole = Recorder()
    uninterrupted = fake_trainer(tmp_path / "a", total_steps=STEPS, callbacks=[whole], evaluation_plan=plan, **plain)
    uninterrupted.fit(FRESH)

    first, second = Recorder(), Recorder()
    killed = fake_trainer(
        tmp_path / "b", total_steps=STEPS, callbacks=[first, KillAt(killed_at)], evaluation_plan=plan, **plain
    )
    with pytest.raises(KilledError):
        killed.fit(FRESH)
    with open_output_folder(tmp_path / "b", resume_from_checkpoint=True, overwrite_output_dir=False) as start:
        assert (start.checkpoint is None) == (killed_at == 2)  # then it starts again
        resumed = fake_trainer(tmp_path / "b", total_steps=STEPS, callbacks=[second], evaluation_plan=plan, **plain)
        if start.checkpoint is not None:
            resumed.model.load(start.checkpoint)
        result = resumed.fit(start)

    from_step = (killed_at - 1) // 2 * 2
    assert first.steps[:from_step] + second.steps == whole.steps
    assert second.logs == [record for record in whole.logs if record["step"] > from_step]
    assert second.evaluations == [record for record in whole.evaluations if record["step"] > from_step]
    assert result.loss == uninterrupted.state.whole_run.loss
    for name, array in uninterrupted.model.arrays().items():
        np.testing.assert_array_equal(array, resumed.model.arrays()[name], err_msg=name)
