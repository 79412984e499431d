"""Resuming with something else than what the checkpoint was written with."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.errors import CheckpointError
from erniekit.training.checkpoint.resume import RunIdentity, check_identity
from tests.training.fakes import identity

FOLDER = Path("out/checkpoint-5")


def test_the_same_run() -> None:
    assert check_identity(identity(), identity(), FOLDER) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 2}, "seed was 1, is 2"),
        (
            {"data_fingerprint": "xyz"},
            "the training data, the tokenizer or the chat template changed (fingerprint was abc",
        ),
        (
            {"batches": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}},
            "per_device_train_batch_size was 2, is 4",
        ),
    ],
)
def test_other_samples_are_refused_with_both_values_and_the_way_out(change: dict, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_identity(identity(), identity(**change), FOLDER)
    assert words in str(caught.value)
    assert "init_from_checkpoint: out/checkpoint-5" in str(caught.value)


def test_all_differences_are_reported_at_once() -> None:
    with pytest.raises(CheckpointError, match=r"seed was 1, is 9(.|\n)*fingerprint was abc, is z"):
        check_identity(identity(), identity(seed=9, data_fingerprint="z"), FOLDER)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cpu_settings": {"MKL_DEBUG_CPU_TYPE": "", "cpu_kernels": "paddle"}}, "MKL_DEBUG_CPU_TYPE was 7, is "),
        ({"cpu_settings": {"MKL_DEBUG_CPU_TYPE": "7", "cpu_kernels": "avx2"}}, "cpu_kernels was paddle, is avx2"),
        (
            {"cpu_settings": {"MKL_DEBUG_CPU_TYPE": "7", "cpu_kernels": "paddle", "precision": "bfloat16"}},
            "precision was float32, is bfloat16",
        ),
        ({"versions": {"paddle": "3.4.0"}}, "paddle was 3.3.1, is 3.4.0"),
    ],
)
def test_what_only_changes_rounding_is_a_warning(change: dict, words: str) -> None:
    (warning,) = check_identity(identity(), identity(**change), FOLDER)
    assert warning == f"resuming is not bit-exact: {words}"


def test_a_step_of_the_same_samples_may_be_divided_otherwise() -> None:
    def run(rows: int, micro_batches: int, **more: int) -> RunIdentity:
        batches = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": micro_batches, **more}
        return identity(batches=batches)

    assert check_identity(run(2, 4), run(2, 4), FOLDER) == []
    (warning,) = check_identity(run(2, 4), run(8, 1), FOLDER)
    assert warning.startswith("resuming is not bit-exact: the samples of each step are the same, in micro-batches of 8")
    with pytest.raises(CheckpointError, match=r"per_device_train_batch_size was 2, is 4"):
        check_identity(run(2, 4), run(4, 4), FOLDER)
    # groups by tokens are micro-batches as they are: a step has as many as before
    with pytest.raises(CheckpointError, match=r"gradient_accumulation_steps \(times the data-parallel ranks"):
        check_identity(run(2, 4, batch_tokens=64), run(4, 2, batch_tokens=64), FOLDER)


def test_another_plan_version_is_refused() -> None:
    stored, own = ({"batches": {"plan_version": version}} for version in (1, 2))
    with pytest.raises(CheckpointError, match="plan_version was 1, is 2"):
        check_identity(identity(**stored), identity(**own), FOLDER)
    with pytest.raises(CheckpointError, match="plan_version was None, is 2"):
        check_identity(identity(batches={}), identity(**own), FOLDER)


def test_another_numpy_may_order_the_samples_differently() -> None:
    stored, own = (identity(versions={"numpy": version}) for version in ("2.1.0", "2.2.0"))
    rounding, order = check_identity(stored, own, FOLDER)
    assert rounding == "resuming is not bit-exact: numpy was 2.1.0, is 2.2.0"
    assert "repeats some samples and misses others" in order


def test_stored_and_read_again() -> None:
    assert RunIdentity.from_json(identity().to_json(), FOLDER) == identity()
    with pytest.raises(CheckpointError, match="not an identity of this version"):
        RunIdentity.from_json({"seed": 1}, FOLDER)


def test_checkpoints_of_earlier_versions_were_computed_with_paddles_operators() -> None:
    earlier = identity(cpu_settings={"MKL_DEBUG_CPU_TYPE": "7", "KMP_BLOCKTIME": "0"})
    assert RunIdentity.from_json(earlier.to_json(), FOLDER) == identity()
    avx2 = identity(cpu_settings={"MKL_DEBUG_CPU_TYPE": "7", "cpu_kernels": "avx2"})
    assert RunIdentity.from_json(avx2.to_json(), FOLDER) == avx2
