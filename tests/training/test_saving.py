"""What a run writes into its folder, and what it says of it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from erniekit.training.checkpoint.sharded import WEIGHTS, CheckpointShards

from .fakes import fake_trainer
from .test_trainer import FRESH


@pytest.mark.parametrize(("strategy", "checked"), [("no", False), ("steps", True)])
def test_ranks_that_write_their_own_files_need_one_file_system(
    strategy: str, checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CheckedError(Exception):
        pass

    def check(folder: Path, ranks: Any) -> None:
        raise CheckedError

    monkeypatch.setattr("erniekit.training.saving.check_shared_filesystem", check)
    trainer = fake_trainer(
        tmp_path, total_steps=1, save_strategy=strategy, shards=CheckpointShards(frozenset({WEIGHTS}))
    )
    with pytest.raises(CheckedError) if checked else nullcontext():
        trainer.fit(FRESH)


@pytest.mark.parametrize("left_out", [True, False])
def test_moments_in_few_bits_are_told_where_they_are_saved(left_out: bool, tmp_path: Path, logged: list[str]) -> None:
    options = {"save_strategy": "steps", "ckpt_quant_stage": "O1", "ignore_save_lr_and_optim": left_out}
    fake_trainer(tmp_path, total_steps=1, **options).fit(FRESH)
    assert any("resuming from them is not bit-exact" in line for line in logged) != left_out
