"""Parts that ranks write: all or none of them, on a disk that all see, for the layout that wrote them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from erniekit.errors import CheckpointError
from erniekit.manifest import problems
from erniekit.training.checkpoint.atomic_folder import newest_complete, write_folder
from erniekit.training.checkpoint.sharded import (
    OPTIMIZER,
    WEIGHTS,
    check_same_layout,
    check_shared_filesystem,
    describe_layout,
    local_shard_of,
    sharded_kinds,
    write_shards,
)

COUNT = 3
KINDS = frozenset({WEIGHTS, OPTIMIZER})


class Rank:
    """A rank that is a thread."""

    def __init__(self, rank: int, given: list[Any], everyone: threading.Barrier) -> None:
        self.rank, self._given, self._everyone = rank, given, everyone
        self.is_main_process, self.layout = rank == 0, {"ranks": COUNT, "tensor_parallel_degree": COUNT}

    def all_gather_object(self, value: Any) -> list[Any]:
        self._given[self.rank] = json.dumps(value)
        self._everyone.wait(10)
        given = [json.loads(text) for text in self._given]
        self._everyone.wait(10)
        return given


def on_ranks(work: Callable[[Any], None]) -> list[str]:
    """What each rank fails with; empty where it does not."""
    given, everyone = [None] * COUNT, threading.Barrier(COUNT)

    def one(rank: int) -> str:
        try:
            work(Rank(rank, given, everyone))
        except CheckpointError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(COUNT) as pool:
        return list(pool.map(one, range(COUNT)))


def save(target: Path, ranks: Any, broken: int = -1) -> None:
    def write_own(part: Path) -> None:
        if ranks.rank == broken:
            raise OSError(28, "No space left on device")
        (part / "weights.safetensors").write_text(f"of rank {ranks.rank}")

    def write(folder: Path | None) -> None:
        write_shards(folder, ranks, KINDS, write_own)

    write_folder(target, write) if ranks.is_main_process else write(None)


def test_each_rank_finds_its_part(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    assert on_ranks(lambda ranks: save(folder, ranks)) == [""] * COUNT
    assert problems(folder, hashes=True) == [] and sharded_kinds(folder) == KINDS

    def read(ranks: Any) -> None:
        check_same_layout(folder, ranks)
        assert (local_shard_of(folder, ranks) / "weights.safetensors").read_text() == f"of rank {ranks.rank}"

    assert on_ranks(read) == [""] * COUNT


@pytest.mark.parametrize("broken", range(COUNT))
def test_a_rank_that_cannot_write_fails_all_and_leaves_nothing(tmp_path: Path, broken: int) -> None:
    on_ranks(lambda ranks: save(tmp_path / "checkpoint-1", ranks))
    failures = on_ranks(lambda ranks: save(tmp_path / "checkpoint-2", ranks, broken))
    assert all(f"rank {broken}: [Errno 28] No space left on device" in failure for failure in failures)
    assert newest_complete(tmp_path) == (tmp_path / "checkpoint-1", [])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_another_layout_is_told_with_both(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    on_ranks(lambda ranks: save(folder, ranks))
    one = Rank(0, [None], threading.Barrier(1))
    one.layout = {"ranks": 1}
    with pytest.raises(CheckpointError) as refused:
        check_same_layout(folder, one)  # type: ignore[arg-type]
    message = str(refused.value)
    assert "written on: 3 ranks: tensor_parallel_degree 3\n" in message and "this run:   1 rank\n" in message
    assert "unified_checkpoint: true" in message and "ignore_load_lr_and_optim" not in message


def test_a_part_that_is_not_seen_is_told_with_its_rank(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"rank 2 on \S+ cannot find .*rank-00002\.\n.*a disk that all ranks share"
    ):
        local_shard_of(tmp_path, Rank(2, [], threading.Barrier(1)))  # type: ignore[arg-type]


def test_parts_of_a_later_format(tmp_path: Path) -> None:
    (tmp_path / "ranks.json").write_text(json.dumps({"format": 2, "layout": {}, "parts": []}))
    with pytest.raises(CheckpointError, match="sharded checkpoint in format 2; this version reads 1"):
        sharded_kinds(tmp_path)


def test_ranks_must_share_the_output_folder(tmp_path: Path) -> None:
    folders = [tmp_path / "shared", tmp_path / "shared", tmp_path / "own"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    assert on_ranks(lambda ranks: check_shared_filesystem(folders[0], ranks)) == [""] * COUNT
    failures = on_ranks(lambda ranks: check_shared_filesystem(folders[ranks.rank], ranks))
    assert all("rank 2 (on " in failure and "unified_checkpoint: true" in failure for failure in failures)
    assert not list(folders[0].iterdir())


def test_a_layout_is_told_without_words_that_are_not_set() -> None:
    layout = {"ranks": 2, "sharding_parallel_degree": 2, "sharding": "stage1", "sharding_parallel_config": ""}
    assert describe_layout(layout) == "2 ranks: sharding_parallel_degree 2, sharding stage1"
    assert describe_layout(layout | {"sharding_parallel_config": "split_param"}).endswith(
        "sharding_parallel_config split_param"
    )
