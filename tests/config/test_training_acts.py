"""Proofs of section 1.3: the data, the length of the run, batches, the schedule and the optimizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import cos, pi, sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from erniekit.config import Config
from erniekit.data.formats.problems import RecordProblem
from erniekit.errors import UserError
from tests.config.observing import tensors

Train = Callable[..., Any]
Read = Callable[..., SimpleNamespace]
LENGTH = 4  # steps of a run of `train`, and its highest learning rate
PEAK = 1e-2

# parameter -> (values of the run, the learning rates of its steps in parts of the highest one)
SCHEDULES: dict[str, list[tuple[dict[str, Any], list[float]]]] = {
    "lr_scheduler_type": [
        ({}, [1, 0.75, 0.5, 0.25]),
        ({"lr_scheduler_type": "constant", "warmup_steps": 2}, [1, 1, 1, 1]),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}, [0, 0.5, 1, 1]),
        ({"lr_scheduler_type": "cosine"}, [(1 + cos(pi * k / LENGTH)) / 2 for k in range(LENGTH)]),
        ({"lr_scheduler_type": "polynomial", "lr_end": 0}, [1, 0.75, 0.5, 0.25]),
        ({"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 1}, [0, 1, sqrt(1 / 2), sqrt(1 / 3)]),
        ({"lr_scheduler_type": "wsd", "decay_steps": 2}, [1, 1, 1, 0.5]),
    ],
    "warmup_steps": [({"warmup_steps": 2}, [0, 0.5, 1, 0.5])],
    "warmup_ratio": [({"warmup_ratio": 0.4}, [0, 0.5, 1, 0.5])],
    "min_lr": [
        ({"lr_scheduler_type": "cosine", "min_lr": PEAK / 2}, [0.75 + cos(pi * k / LENGTH) / 4 for k in range(LENGTH)]),
        ({"lr_scheduler_type": "wsd", "decay_steps": 2, "min_lr": PEAK / 2}, [1, 1, 1, 0.75]),
    ],
    "num_cycles": [({"lr_scheduler_type": "cosine", "num_cycles": 1.0}, [1, 0.5, 0, 0.5])],
    "lr_end": [({"lr_scheduler_type": "polynomial", "lr_end": PEAK / 2}, [1, 0.875, 0.75, 0.625])],
    "power": [({"lr_scheduler_type": "polynomial", "lr_end": 0, "power": 2}, [1, 0.5625, 0.25, 0.0625])],
    "decay_steps": [({"lr_scheduler_type": "wsd", "decay_steps": 4}, [1, 0.75, 0.5, 0.25])],
    "wsd_decay_type": [
        ({"lr_scheduler_type": "wsd", "decay_steps": 2, "wsd_decay_type": "1-sqrt"}, [1, 1, 1, 1 - sqrt(0.5)]),
        ({"lr_scheduler_type": "wsd", "decay_steps": 4, "wsd_decay_type": "cosine"},
         [(1 + cos(pi * k / LENGTH)) / 2 for k in range(LENGTH)]),
    ],
}  # fmt: skip
CASES = [(name, values, parts) for name, cases in SCHEDULES.items() for values, parts in cases]


@pytest.mark.proves(*SCHEDULES)
@pytest.mark.parametrize(("name", "values", "parts"), CASES, ids=[f"{name} {values}" for name, values, _ in CASES])
def test_the_learning_rate_of_every_step(name: str, values: dict[str, Any], parts: list[float], train: Train) -> None:
    rates = [entry["learning_rate"] for entry in train(**values).log]
    np.testing.assert_allclose(rates, [PEAK * part for part in parts], rtol=1e-6, atol=1e-12)


@pytest.fixture
def one_step(train: Train, tiny_base: Path) -> Callable[..., tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """The change of every weight in one step from the tiny base, and AdamW's moments after it."""

    def run(**values: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        steps = {"max_steps": 1, "lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 1}
        output = train(model_name_or_path=str(tiny_base), continue_training=True, **{**steps, **values}).output
        before, after = tensors(tiny_base), tensors(output)
        changes = {name: after[name].astype(np.float64) - before[name] for name in before}
        return changes, tensors(output / "checkpoint-1", "optimizer.safetensors")

    return run


Step = Callable[..., tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]
MATRIX, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"


def moment(moments: dict[str, np.ndarray], kind: str) -> np.ndarray:
    (found,) = [values for name, values in moments.items() if name.startswith(MATRIX) and kind in name]
    return found


@pytest.mark.proves("learning_rate")
def test_the_first_step_of_adamw_moves_each_weight_by_the_learning_rate(one_step: Step) -> None:
    for rate in (1e-2, 1e-3):
        changes, _ = one_step(learning_rate=rate)
        assert np.median(np.abs(changes[MATRIX])) == pytest.approx(rate, rel=1e-2)


@pytest.mark.proves("layerwise_lr_decay_bound")
def test_lower_layers_learn_at_a_smaller_rate(one_step: Step) -> None:
    """Of L = 2 layers: the embedding has depth 0, the layers 1 and 2, the final norm 4 of 4."""
    changes, _ = one_step(layerwise_lr_decay_bound=0.2)
    for name, depth in (("model.embed_tokens.weight", 0), (MATRIX, 1), (MATRIX.replace(".0.", ".1."), 2), (NORM, 4)):
        assert np.max(np.abs(changes[name])) == pytest.approx(PEAK * (0.2 + 0.8 * depth / 4), rel=1e-2), name


@pytest.mark.proves("weight_decay")
def test_matrices_decay_and_norms_do_not(one_step: Step, tiny_base: Path) -> None:
    (plain, _), (decayed, _), base = one_step(), one_step(weight_decay=2.0), tensors(tiny_base)
    np.testing.assert_allclose(decayed[MATRIX] - plain[MATRIX], -PEAK * 2.0 * base[MATRIX], rtol=1e-3, atol=1e-7)
    np.testing.assert_array_equal(decayed[NORM], plain[NORM])


@pytest.mark.proves("adam_beta1", "adam_beta2", "max_grad_norm")
def test_what_a_moment_takes_of_a_gradient(one_step: Step) -> None:
    _, usual = one_step()
    _, quick = one_step(adam_beta1=0.5, adam_beta2=0.99)
    np.testing.assert_allclose(moment(quick, "moment1"), moment(usual, "moment1") * 5, rtol=1e-5)  # (1 - b1) g
    np.testing.assert_allclose(moment(quick, "moment2"), moment(usual, "moment2") * 10, rtol=1e-3)  # (1 - b2) g^2
    _, free = one_step(max_grad_norm=0)
    _, clipped = one_step(max_grad_norm=1e-2)
    gradients = [10 * values.astype(np.float64).ravel() for name, values in free.items() if "moment1" in name]
    norm = sqrt(sum(gradient @ gradient for gradient in gradients))
    assert norm > 1
    np.testing.assert_allclose(moment(usual, "moment1"), moment(free, "moment1") / norm, rtol=1e-4)
    np.testing.assert_allclose(moment(clipped, "moment1"), moment(free, "moment1") / norm * 1e-2, rtol=1e-4)


@pytest.mark.proves("adam_epsilon")
def test_epsilon_is_added_to_the_denominator(one_step: Step) -> None:
    """The first step is learning_rate x g / (|g| + epsilon)."""
    changes, moments = one_step(adam_epsilon=1.0)
    gradient = moment(moments, "moment1").astype(np.float64) * 10
    np.testing.assert_allclose(changes[MATRIX].T, -PEAK * gradient / (np.abs(gradient) + 1), atol=1e-7)


@pytest.mark.proves("seed")
def test_the_seed_decides_weights_and_order(train: Train) -> None:
    first, again, other = train(), train(), train(seed=7)
    assert first.losses == again.losses
    assert first.losses != other.losses and "random, seed 7" in other.said


@pytest.mark.proves("seed")
def test_the_seed_decides_the_order_of_samples(read_epoch: Read) -> None:
    assert read_epoch().order == read_epoch().order != read_epoch(seed=7).order


@pytest.mark.proves("random_shuffle")
def test_without_shuffling_samples_keep_the_order_of_their_file(read_epoch: Read) -> None:
    one_by_one = {"packing": False}
    assert read_epoch(**one_by_one, random_shuffle=False).order == list(range(60))
    first, second = read_epoch(**one_by_one).order, read_epoch(1, **one_by_one).order
    assert first != second and sorted(first) == sorted(second) == list(range(60))


@pytest.mark.proves("max_seq_len")
def test_no_row_is_longer_than_asked(read_epoch: Read) -> None:
    widest = {length: max(batch.input_ids.shape[1] for step in read_epoch(max_seq_len=length).steps for batch in step)
              for length in (64, 128)}  # fmt: skip
    assert widest[64] <= 64 < widest[128] <= 128


@pytest.mark.proves("per_device_train_batch_size", "gradient_accumulation_steps")
def test_rows_of_a_pass_and_passes_of_a_step(read_epoch: Read, train: Train) -> None:
    """(batch 4, accumulation 1) = (1, 4): the loss is divided once by the target tokens of the step."""
    for rows, passes in ((4, 1), (1, 4), (2, 3)):
        step = read_epoch(per_device_train_batch_size=rows, gradient_accumulation_steps=passes).steps[0]
        assert [batch.input_ids.shape[0] for batch in step] == [rows] * passes
    four_rows = train(per_device_train_batch_size=4)
    four_times = train(per_device_train_batch_size=1, gradient_accumulation_steps=4)
    np.testing.assert_allclose(four_times.losses, four_rows.losses, rtol=2e-5)


@pytest.mark.proves("train_dataset_path")
def test_all_files_named_are_read(read_epoch: Read, records: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(records.read_text().splitlines(keepends=True)[:10]))
    assert len(read_epoch(train_dataset_path=str(other)).lengths) == 10
    assert len(read_epoch(train_dataset_path=f"{records},{other}").lengths) == 70
    with pytest.raises(UserError, match=r"no-such-data\.jsonl"):
        read_epoch(train_dataset_path=str(tmp_path / "no-such-data.jsonl"))


@pytest.mark.proves("train_dataset_type")
def test_the_format_says_how_records_are_read(read_epoch: Read, tmp_path: Path) -> None:
    path = tmp_path / "alpaca.jsonl"
    path.write_text(json.dumps({"instruction": "Add.", "input": "1 + 1", "output": "2"}) + "\n")
    assert (
        "(alpaca): 1 records, 1 kept" in read_epoch(train_dataset_path=str(path), train_dataset_type="alpaca").reported
    )
    with pytest.raises(UserError, match=r"looks like alpaca: write train_dataset_type: alpaca"):
        read_epoch(train_dataset_path=str(path), train_dataset_type="messages")


def test_a_format_that_is_not_named_is_recognised_and_told_once(
    read_epoch: Read, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("prompt,completion\nq,a\n")
    with caplog.at_level("INFO"):
        assert "(prompt_completion): 1 records" in read_epoch(train_dataset_path=str(path)).reported
        read_epoch(train_dataset_path=str(path))
    told = [message for message in caplog.messages if "to say so" in message]
    assert told == [
        f"{path}: read as prompt and completion, which its records look like; "
        "to say so, train_dataset_type: prompt_completion"
    ]


@pytest.mark.proves("media_dir")
def test_recordings_lie_in_the_folders_that_are_named(make_config: Callable[..., Config], tmp_path: Path) -> None:
    from erniekit.build.sources import evaluation_sources, training_sources
    from erniekit.data.formats.registry import read_records

    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "1.wav").write_bytes(b"RIFF")
    path = tmp_path / "asr.jsonl"
    path.write_text(json.dumps({"audio_path": "1.wav", "text": "four"}) + "\n")

    def read(**values: str) -> list[str]:
        files = {f"{split}_dataset_{what}": value for split in ("train", "eval") for what, value in
                 (("path", str(path)), ("type", "asr"))}  # fmt: skip
        config = make_config(**files, **values)
        sources = [*training_sources(config), *evaluation_sources(config)]
        items = [item for each in sources for item in read_records(each.path, each.kind, media_dir=each.media_dir)]
        return [str(item) if isinstance(item, RecordProblem) else item[1].clips[0].path for item in items]

    assert read(media_dir=str(tmp_path / "clips")) == [str(tmp_path / "clips" / "1.wav")] * 2
    assert all("'1.wav': no such file there (set media_dir" in told for told in read())


@pytest.mark.proves("train_dataset_prob")
def test_shares_decide_how_much_of_each_file_is_read(read_epoch: Read, records: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(records.read_text())
    paths = {"train_dataset_path": f"{records},{other}"}
    assert len(read_epoch(**paths, train_dataset_prob="1.0,0.0").lengths) == 60  # a file of weight 0 is left out
    few = read_epoch(**paths, train_dataset_prob="0.2,0.8").order
    many = read_epoch(**paths, train_dataset_prob="0.8,0.2").order
    of_the_first = [sum(sample < 60 for sample in order) / len(order) for order in (few, many)]
    np.testing.assert_allclose(of_the_first, [0.2, 0.8], atol=0.02)


@pytest.mark.proves("data_cache_dir")
def test_tokenised_data_is_kept_where_asked_and_used_again(read_epoch: Read, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    read_epoch()
    assert not elsewhere.exists()
    read_epoch(data_cache_dir=str(elsewhere))
    entries = {path: path.stat().st_mtime_ns for path in elsewhere.rglob("*") if path.is_file()}
    assert entries
    read_epoch(data_cache_dir=str(elsewhere))
    assert {path: path.stat().st_mtime_ns for path in entries} == entries


@pytest.mark.proves("max_steps", "num_train_epochs")
def test_max_steps_comes_before_epochs(train: Train) -> None:
    assert train(max_steps=None, num_train_epochs=1).result.step == 8
    assert train(max_steps=None, num_train_epochs=2).result.step == 16
    assert train(max_steps=None, num_train_epochs=0.3).result.step == 3
    assert train(max_steps=3, num_train_epochs=2).result.step == 3


@pytest.mark.proves("optim")
def test_adamw_with_its_own_moments_is_reported_with_equal_losses(train: Train) -> None:
    plain, own = train(), train(optim="adamw_custom")
    assert "AdamW: moments in float32" in own.said and "AdamW: moments" not in plain.said
    assert own.losses == plain.losses
