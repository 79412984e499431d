"""Proofs of section 2.1: how samples of several sources become an epoch, and those that are too long."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from erniekit.errors import UserError

Read = Callable[..., SimpleNamespace]


@pytest.fixture
def two_files(records: Path, tmp_path: Path) -> dict[str, str]:
    """Sixty samples and ten, half of an epoch each."""
    short = tmp_path / "short.jsonl"
    short.write_text("".join(records.read_text().splitlines(keepends=True)[:10]))
    return {"train_dataset_path": f"{records},{short}", "train_dataset_prob": "0.5,0.5"}


@pytest.mark.proves("mix_strategy")
def test_a_strategy_decides_what_is_left_out_and_repeated(read_epoch: Read, two_files: dict[str, str]) -> None:
    def samples(strategy: str) -> Counter[int]:
        return Counter(read_epoch(**two_files, mix_strategy=strategy).order)

    concat, under, over = samples("concat"), samples("interleave_under"), samples("interleave_over")
    assert concat == Counter(range(70))
    assert set(range(60, 70)) <= set(under) and max(under.values()) == 1 and len(under) < 30
    assert set(over) == set(range(70)) and max(over[sample] for sample in range(60, 70)) > 3
    by_share = samples("random")
    assert by_share.total() == 70 and sum(by_share[sample] for sample in range(60, 70)) == 35


@pytest.mark.proves("num_samples_each_epoch")
def test_an_epoch_has_as_many_samples_as_asked(read_epoch: Read) -> None:
    fewer = read_epoch(num_samples_each_epoch=20)
    assert len(fewer.order) == len(set(fewer.order)) == 20
    more = read_epoch(num_samples_each_epoch=100)
    assert len(more.order) == 100 and set(more.order) == set(range(60))
    assert len(read_epoch(mix_strategy="random").order) == 60  # the default is an upper limit only


@pytest.mark.proves("curriculum")
def test_the_first_epoch_may_go_from_short_to_long(read_epoch: Read) -> None:
    asked = {"curriculum": "length", "packing": False}
    first = read_epoch(**asked)
    lengths = [first.lengths[sample] for sample in first.order]
    assert lengths == sorted(lengths)
    plain, later = read_epoch(1, packing=False), read_epoch(1, **asked)
    assert later.order == plain.order
    lengths = [plain.lengths[sample] for sample in read_epoch(packing=False).order]
    assert lengths != sorted(lengths)


@pytest.mark.proves("over_length_policy")
def test_conversations_that_are_too_long(read_epoch: Read, records: Path, tmp_path: Path) -> None:
    turns = 12
    path = tmp_path / "long.jsonl"
    record = {"src": ["What is 1 + 1?"] * turns, "tgt": ["2"] * turns}
    path.write_text(records.read_text() + json.dumps(record) + "\n")
    values = {"train_dataset_path": str(path)}
    shortened = read_epoch(**values, over_length_policy="truncate_turns")
    assert "1 shortened" in shortened.reported and len(shortened.lengths) == 61 and shortened.lengths[60] <= 128
    dropped = read_epoch(**values, over_length_policy="drop")
    assert "1 dropped" in dropped.reported and len(dropped.lengths) == 60
    with pytest.raises(UserError, match=r"long\.jsonl:61"):
        read_epoch(**values, over_length_policy="error")


@pytest.mark.proves("on_bad_record")
def test_bad_records_stop_the_run_or_are_left_out(read_epoch: Read, records: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(records.read_text() + '{"src": "no answer"}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl:61: tgt: .*\n.*on_bad_record: skip"):
        read_epoch(train_dataset_path=str(path))
    skipped = read_epoch(train_dataset_path=str(path), on_bad_record="skip")
    assert len(skipped.lengths) == 60
    assert "61 records, 60 kept, 1 skipped" in skipped.reported and "bad.jsonl:61: tgt" in skipped.reported
