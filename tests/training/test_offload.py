"""Moments in fewer bits or in a file: the same updates, rounded where that is asked for, and the same checkpoints."""

from __future__ import annotations

import dataclasses
import mmap
import os
from functools import partial
from pathlib import Path

import numpy as np
import paddle
import pytest

from erniekit.config.sections.training import TrainingParameters
from erniekit.errors import TrainingError
from erniekit.model.local_tensors import SingleProcessTensors, tensor_spec, to_numpy
from erniekit.model.storage.precision import round_to_bfloat16
from erniekit.model.storage.safetensors import SafetensorsFile
from erniekit.training.checkpoint.resume import Start, open_output_folder
from erniekit.training.checkpoint.tensors import open_tensors, write_tensors
from erniekit.training.optim import offload
from erniekit.training.optim.adamw import (
    build_optimizer,
    create_state,
    full_optimizer_tensors,
    load_optimizer_state,
    stateless_optimizer,
)
from erniekit.training.optim.offload import MomentStorage, StoredMomentsAdamW

from .fakes import FakeModel, fake_trainer
from .test_resume import KillAt, KilledError

SETTINGS = TrainingParameters(weight_decay=0.1, layerwise_lr_decay_bound=0.5)
FRESH = Start(None)


def storages(folder: Path) -> dict[str, MomentStorage]:
    return {
        "memory": MomentStorage(),
        "file": MomentStorage(folder=folder),
        "file, released": MomentStorage(folder=folder, release=True),
    }


def stored(model: FakeModel, storage: MomentStorage) -> StoredMomentsAdamW:
    optimizer = stateless_optimizer(model.named, SETTINGS, partial(StoredMomentsAdamW, storage), num_layers=1)
    create_state(optimizer, model.named.values())
    return optimizer


def steps(model: FakeModel, optimizer, first: int, stop: int) -> None:  # type: ignore[no-untyped-def]
    for step in range(first, stop):
        generator = np.random.default_rng(step)
        for name, parameter in model.named.items():
            left_out = name.endswith("bias") and step == 1  # a parameter that a step does not reach
            gradient = generator.standard_normal(parameter.shape).astype(np.float32)
            parameter.grad = None if left_out else paddle.to_tensor(gradient)
        optimizer.set_lr(0.01 * (step + 1))
        optimizer.step()
        optimizer.clear_grad(False)


def state(optimizer, model: FakeModel) -> dict[str, np.ndarray]:  # type: ignore[no-untyped-def]
    held = full_optimizer_tensors(optimizer, model.named)
    return {name: to_numpy(held.read(name)) for name in held.tensors}


@pytest.mark.parametrize("where", ["memory", "file", "file, released"])
def test_float32_moments_give_adamws_updates_to_the_bit(where: str, tmp_path: Path) -> None:
    plain, own = FakeModel(), FakeModel()
    adamw, other = build_optimizer(plain.named, SETTINGS, num_layers=1), stored(own, storages(tmp_path)[where])
    steps(plain, adamw, 0, 4)
    steps(own, other, 0, 4)
    for name, value in plain.arrays().items():
        np.testing.assert_array_equal(own.arrays()[name], value, err_msg=name)
    expected = state(adamw, plain)
    assert expected.keys() == state(other, own).keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(state(other, own)[name], value, err_msg=name)


def upper_half(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("where", [None, "file"])
def test_bfloat16_moments_are_those_of_adamw_rounded_once_a_step(where: str | None, tmp_path: Path) -> None:
    """The recurrence by hand: m <- round(b m + (1 - b) g), from the rounded m of the step before."""
    model = FakeModel()
    optimizer = stored(model, MomentStorage(bfloat16=True, folder=tmp_path if where else None))
    name = "lm_head.weight"
    first, second = np.zeros(model.shapes[name], np.float32), np.zeros(model.shapes[name], np.float32)
    for step in range(5):
        before = model.arrays()[name]
        steps(model, optimizer, step, step + 1)
        generator = np.random.default_rng(step)
        gradient = [generator.standard_normal(shape).astype(np.float32) for shape in model.shapes.values()][-1]
        exact_first = np.float32(0.9) * first + np.float32(1 - 0.9) * gradient
        exact_second = np.float32(0.999) * second + np.float32(1 - 0.999) * gradient * gradient
        own = state(optimizer, model)
        for kind, exact in (("moment1", exact_first), ("moment2", exact_second)):
            bits = own[f"{name}/{kind}"].view(np.uint32)
            assert not (bits & 0xFFFF).any()
            away = np.abs((bits >> 16).astype(int) - round_to_bfloat16(exact).astype(int))
            assert (away == 0).mean() > 0.99 and away.max() <= 1  # float32 sums in another order, at a tie
        # the update itself is made with the moments before they are rounded
        lr, power = 0.01 * (step + 1), step + 1
        ratio = (exact_first / (1 - 0.9**power)) / (np.sqrt(exact_second / (1 - 0.999**power)) + 1e-8)
        np.testing.assert_allclose(model.arrays()[name], before * (1 - lr * 0.1) - lr * ratio, rtol=2e-4, atol=1e-6)
        first, second = own[f"{name}/moment1"], own[f"{name}/moment2"]


def test_half_the_memory(tmp_path: Path) -> None:
    sizes = []
    for narrow in (False, True):
        optimizer = stored(FakeModel(), MomentStorage(bfloat16=narrow))
        stores = [store for of_one in optimizer._stores.values() for store in of_one.values()]
        sizes.append(sum(store._values.size * store._values.element_size() for store in stores))
    assert sizes[1] * 2 == sizes[0]


@pytest.mark.parametrize("where", ["memory", "file", "file, released"])
@pytest.mark.parametrize("narrow", [False, True])
def test_files_have_them_in_their_own_type(where: str, narrow: bool, tmp_path: Path) -> None:
    model = FakeModel()
    optimizer = stored(model, dataclasses.replace(storages(tmp_path / "moments")[where], bfloat16=narrow))
    steps(model, optimizer, 0, 3)
    before, held = state(optimizer, model), full_optimizer_tensors(optimizer, model.named)
    assert {name: tensor_spec(held.read(name)) for name in held.tensors} == dict(held.tensors)
    write_tensors(tmp_path, "optimizer", SingleProcessTensors(held))
    file, there = SafetensorsFile(tmp_path / "optimizer.safetensors"), open_tensors(tmp_path, "optimizer")
    for name in file.names():
        kept_narrow = narrow and name.endswith(("moment1", "moment2"))
        assert file.stored(name).dtype == ("BF16" if kept_narrow else "F32")
        np.testing.assert_array_equal(there.read(name), before[name])


def test_a_file_holds_them_and_ends_with_the_process(tmp_path: Path) -> None:
    optimizer = stored(FakeModel(), MomentStorage(folder=tmp_path / "new"))
    assert not list((tmp_path / "new").iterdir())
    held = optimizer._accumulators["moment1"]
    assert all(tensor.size == 0 for tensor in held.values())


@pytest.mark.parametrize("release", [False, True])
def test_a_file_of_several_mappings_keeps_every_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: bool
) -> None:
    """Also of tensors that are larger than a mapping is otherwise."""
    monkeypatch.setattr(offload, "_REGION", 4 * mmap.PAGESIZE)
    plain, own = FakeModel(), FakeModel()
    adamw, other = (
        build_optimizer(plain.named, SETTINGS, num_layers=1),
        stored(own, MomentStorage(folder=tmp_path, release=release)),
    )
    large = other._file.next(paddle.arange(30_000, dtype="float32").reshape([30, 1000]), bfloat16=False)
    steps(plain, adamw, 0, 3)
    steps(own, other, 0, 3)
    for name, value in state(adamw, plain).items():
        np.testing.assert_array_equal(state(other, own)[name], value, err_msg=name)
    np.testing.assert_array_equal(large.read().numpy().reshape(-1), np.arange(30_000, dtype=np.float32))


def test_thousands_of_tensors_take_few_open_files(tmp_path: Path) -> None:
    file = offload._MappedFile(MomentStorage(folder=tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    kept = [file.next(paddle.full([3], float(number)), bfloat16=False) for number in range(2000)]
    assert len(os.listdir("/proc/self/fd")) <= before
    assert [float(tensor.read()[2]) for tensor in kept[::500]] == [0, 500, 1000, 1500]


def test_a_full_disk_is_told_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        TrainingError, match=r"no room for AdamW's moments .*No space left on device.*\n.*offload_optim: false"
    ):
        stored(FakeModel(), MomentStorage(folder=tmp_path))


@pytest.mark.parametrize("narrow", [False, True])
def test_a_run_is_resumed_to_the_bit(tmp_path: Path, narrow: bool) -> None:
    def trainer(folder: str, **more):  # type: ignore[no-untyped-def]
        model = FakeModel(dropout=0.3)
        optimizer = stored(model, MomentStorage(bfloat16=narrow, folder=tmp_path / "moments"))
        options = {"save_strategy": "steps", "save_steps": 2, **more}
        return fake_trainer(tmp_path / folder, model=model, optimizer=optimizer, **options)

    whole = trainer("whole")
    whole.fit(FRESH)
    with pytest.raises(KilledError):
        trainer("killed", callbacks=[KillAt(7)]).fit(FRESH)
    with open_output_folder(tmp_path / "killed", resume_from_checkpoint=True, overwrite_output_dir=False) as start:
        resumed = trainer("killed")
        resumed.model.load(start.checkpoint)
        resumed.fit(start)
    for name, value in whole.model.arrays().items():
        np.testing.assert_array_equal(resumed.model.arrays()[name], value, err_msg=name)


def test_either_optimizer_goes_on_from_the_others_checkpoint() -> None:
    plain, own = FakeModel(), FakeModel()
    adamw, other = build_optimizer(plain.named, SETTINGS, num_layers=1), stored(own, MomentStorage())
    steps(plain, adamw, 0, 3)
    steps(own, other, 0, 3)
    a, b = state(adamw, plain), state(other, own)
    load_optimizer_state(other, own.named, a, a.__getitem__)
    load_optimizer_state(adamw, plain.named, b, b.__getitem__)
    steps(plain, adamw, 3, 5)
    steps(own, other, 3, 5)
    for name, value in plain.arrays().items():
        np.testing.assert_array_equal(own.arrays()[name], value, err_msg=name)
