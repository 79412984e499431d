"""Checkpoints whose moments are in few bits: what they hold, what comes back, and what is refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from erniekit.config.sections.training import TrainingParameters
from erniekit.errors import CheckpointError
from erniekit.model.local_tensors import LocalTensors, SingleProcessTensors, local_tensors
from erniekit.model.local_tensors import to_numpy as values_as_numpy
from erniekit.model.storage.safetensors import SafetensorsFile, StoredTensor, write_stored
from erniekit.training.checkpoint import tensors as tensor_files
from erniekit.training.checkpoint.quantized_state import (
    FORMATS,
    O1,
    O2,
    CompressedState,
    MomentFormat,
    SecondMomentCodes,
    decode_second,
    decompressed,
)
from erniekit.training.checkpoint.state import TrainerState, load_optimizer, save_checkpoint
from erniekit.training.optim.adamw import build_optimizer, optimizer_state
from tests.training.fakes import FakeModel, identity
from tests.training.test_optimizer import update

BOTH = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def save(output_dir: Path, form: MomentFormat | None) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint after two updates, and AdamW's state in it."""
    model = FakeModel()
    optimizer = build_optimizer(model.named, TrainingParameters())
    for step in range(2):
        update(model, optimizer, step)
    folder = save_checkpoint(
        output_dir,
        TrainerState(step=2),
        identity=identity(),
        resolved_config={},
        write_model=model.save,
        optimizer=optimizer,
        parameters=model.named,
        moments=form,
    )
    return folder, values_of(optimizer, model.named)


def values_of(optimizer: paddle.optimizer.AdamW, parameters: Mapping[str, paddle.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in optimizer_state(optimizer, parameters).items()}


def load(folder: Path) -> tuple[MomentFormat | None, dict[str, np.ndarray]]:
    model = FakeModel()
    optimizer = build_optimizer(model.named, TrainingParameters())
    return load_optimizer(folder, optimizer, model.named), values_of(optimizer, model.named)


def rewritten(path: Path, metadata: Mapping[str, str] | None = None, **replaced: np.ndarray | None) -> None:
    """Write a file anew with other metadata, or with some of its tensors (by the ends of their names) changed."""
    file = SafetensorsFile(path)
    tensors, contents = {}, []
    for name in file.names():
        end = next((end for end in replaced if name.endswith(end)), None)
        if end is not None and replaced[end] is None:
            continue
        values = replaced[end] if end is not None else None
        tensors[name] = file.stored(name) if values is None else StoredTensor("U8", values.shape)
        contents.append((name, list(file.blocks(name)) if values is None else [values.astype(np.uint8).data]))
    write_stored(path, tensors, contents, file.metadata if metadata is None else metadata)
    path.with_name("manifest.json").unlink(missing_ok=True)  # which would tell the change


@BOTH
@pytest.mark.parametrize("bytes_a_file", [1 << 30, 200])
def test_a_checkpoint_says_how_it_is_stored_and_comes_back_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: MomentFormat, bytes_a_file: int
) -> None:
    monkeypatch.setattr(tensor_files, "MAX_FILE_BYTES", bytes_a_file)
    folder, before = save(tmp_path, form)
    assert (len(list(folder.glob("optimizer*"))) > 1) == (bytes_a_file == 200)
    found, after = load(folder)
    assert found == form
    assert after.keys() == before.keys()
    for name, values in before.items():
        if values.ndim < 2:
            np.testing.assert_array_equal(after[name], values)  # norms, biases and powers of the betas
        else:
            assert not np.array_equal(after[name], values)
            wrong = np.linalg.norm(after[name] - values) / np.linalg.norm(values)
            assert wrong < (0.02 if form == O1 else 0.3), name


def test_without_a_stage_everything_comes_back_exactly(tmp_path: Path) -> None:
    folder, before = save(tmp_path, None)
    found, after = load(folder)
    assert found is None
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values)


@BOTH
def test_bytes(tmp_path: Path, form: MomentFormat) -> None:
    values = {f"w/{kind}": paddle.rand([256, 512]) for kind in ("moment1", "moment2")}
    state = CompressedState(SingleProcessTensors(local_tensors(values)), form)
    size = sum(state.stored(name).nbytes for name in state.names)
    assert size <= 2 * 256 * 512 * (form.bits / 8 + 0.05 if form == O1 else form.bits / 8 + 0.06)
    assert size == sum(
        state.read(name).nbytes // (2 if state.stored(name).dtype == "BF16" else 1) for name in state.names
    )


@BOTH
def test_one_moment_at_a_time_is_read(form: MomentFormat) -> None:
    """On every rank in the same order, whichever rank gets the values."""
    values = {f"{name}/{kind}": paddle.rand([8, 8]) for name in "ab" for kind in ("moment1", "moment2")}
    orders = []
    for gives in (True, False):
        read: list[str] = []

        def read_one(name: str, gives: bool = gives, read: list[str] = read) -> np.ndarray | None:
            read.append(name)
            return values[name].numpy() if gives else None

        full = SingleProcessTensors(LocalTensors(local_tensors(values).tensors, values.__getitem__))
        full.read = read_one  # type: ignore[assignment]
        state = CompressedState(full, form)
        assert all((state.read(name) is not None) == gives for name in state.names)
        orders.append(read)
    assert orders[0] == orders[1] == ["a/moment2", "a/moment1", "b/moment2", "b/moment1"]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    form=st.sampled_from([O1, O2]),
    tensors=st.dictionaries(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["moment1", "moment2", "beta1_pow_acc", "master_weight"])),
        st.tuples(
            array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9), st.sampled_from(["float32", "bfloat16"])
        ),
        max_size=8,
    ),
    bytes_a_file=st.sampled_from([60, 500, 1 << 30]),
)
def test_whatever_there_is_comes_back_under_its_name(
    tmp_path_factory: pytest.TempPathFactory,
    form: MomentFormat,
    tensors: dict[tuple[str, str], tuple[tuple[int, ...], str]],
    bytes_a_file: int,
) -> None:
    shapes = {parameter: shape for (parameter, _), (shape, _) in reversed(tensors.items())}  # one of each parameter
    generator = np.random.default_rng(0)
    values = {
        f"{parameter}/{kind}": paddle.to_tensor(generator.random(shapes[parameter], np.float32)).astype(dtype)
        for (parameter, kind), (_, dtype) in tensors.items()
    }
    folder = tmp_path_factory.mktemp("any")
    state = CompressedState(SingleProcessTensors(local_tensors(values)), form)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tensor_files, "MAX_FILE_BYTES", bytes_a_file)
        tensor_files.write_tensors(folder, "optimizer", state, state.metadata)
    files = decompressed(tensor_files.open_tensors(folder, "optimizer"), folder)
    assert set(files.names) == set(values)
    for name, tensor in values.items():
        back, before = files.read(name), values_as_numpy(tensor)
        assert back.shape == before.shape, name
        if name in state.names:
            np.testing.assert_array_equal(back, before, err_msg=name)
        else:
            assert np.abs(back - before).max() < 0.5, name


class Made:
    """`FullTensors` that exist only while they are read."""

    def __init__(self, parameters: int, shape: tuple[int, int]) -> None:
        self.names = [f"{number}/{kind}" for number in range(parameters) for kind in ("moment1", "moment2")]
        self._shape = shape

    def stored(self, name: str) -> StoredTensor:
        return StoredTensor("F32", self._shape)

    def read(self, name: str) -> np.ndarray:
        return np.random.default_rng(len(name)).random(self._shape, np.float32)


@BOTH
def test_memory_holds_one_moment_beside_the_codes_of_the_other(tmp_path: Path, form: MomentFormat) -> None:
    size = 4 * 1024 * 2048
    tracemalloc.start()
    try:
        state = CompressedState(Made(2, (1024, 2048)), form)
        tensor_files.write_tensors(tmp_path, "optimizer", state, state.metadata)
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        files = decompressed(tensor_files.open_tensors(tmp_path, "optimizer"), tmp_path)
        for name in files.names:
            files.read(name)
        read = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # a moment, its codes and those of the other; what is worked on at once takes 3 MB
    assert written < size + 2 * form.code_bytes(size // 4) + 6e6
    assert read < size + 2 * form.code_bytes(size // 4) + 6e6


def test_moments_in_bfloat16_are_compressed_as_well() -> None:
    values = {f"w/{kind}": paddle.rand([16, 128]).astype("bfloat16") for kind in ("moment1", "moment2")}
    state = CompressedState(SingleProcessTensors(local_tensors(values)), O1)
    assert not set(state.names) & set(values)
    roots = SecondMomentCodes(*(state.read(f"w/moment2_{part}") for part in ("codes", "low", "high")))
    back = decode_second(roots, (16, 128), O1)
    np.testing.assert_allclose(back, values["w/moment2"].astype("float32").numpy(), rtol=0.1)


def test_a_share_of_a_matrix_is_no_norm() -> None:
    for size, kept in ((1 << 16, 2), ((1 << 16) + 1, 0)):
        values = {f"a/{kind}": paddle.rand([size]) for kind in ("moment1", "moment2")}
        names = CompressedState(SingleProcessTensors(local_tensors(values)), O1).names
        assert len(set(names) & set(values)) == kept


def test_moments_in_float64_or_of_one_kind_stay_as_they_are() -> None:
    values = {
        "a/moment1": paddle.rand([4, 4]).astype("float64"),
        "a/moment2": paddle.rand([4, 4]).astype("float64"),
        "b/moment2": paddle.rand([4, 4]),
        "c/master_weight": paddle.rand([4, 4]),
        "d/moment1": paddle.empty([0, 4]),
        "d/moment2": paddle.empty([0, 4]),
    }
    state = CompressedState(SingleProcessTensors(local_tensors(values)), O2)
    assert state.names == tuple(values)
    for name, tensor in values.items():
        np.testing.assert_array_equal(state.read(name), tensor.numpy())


def test_damaged_moments_are_not_written(tmp_path: Path) -> None:
    values = {f"w/{kind}": paddle.full([4, 4], float("nan")) for kind in ("moment1", "moment2")}
    state = CompressedState(SingleProcessTensors(local_tensors(values)), O1)
    with pytest.raises(CheckpointError, match="w/moment2: a second moment is not finite"):
        tensor_files.write_tensors(tmp_path, "optimizer", state)


def test_codes_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    folder, _ = save(tmp_path, O2)
    file = folder / "optimizer.safetensors"
    for metadata, message in (
        ({"ckpt_quant_stage": "O7", "moment_codes": "1"}, r"unknown to this version \(ckpt_quant_stage O7"),
        ({"ckpt_quant_stage": "O2", "moment_codes": "9"}, "moment_codes 9"),
        ({"other": "x"}, "do not say how"),
    ):
        rewritten(file, metadata)
        with pytest.raises(CheckpointError, match=message):
            load(folder)


def test_files_of_two_checkpoints_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "MAX_FILE_BYTES", 200)
    folder, _ = save(tmp_path, O2)
    rewritten(next(iter(sorted(folder.glob("optimizer*")))), {"ckpt_quant_stage": "O1", "moment_codes": "1"})
    with pytest.raises(CheckpointError, match="several checkpoints"):
        load(folder)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"moment1_scale": None}, "parts of compressed moments are missing, for example .*moment1_scale"),
        ({"moment2_codes": np.zeros([3])}, r"moment2_codes \[3\] fits no"),
        ({"moments_shape": np.array([200, 200])}, "fits no"),
        ({"moment2_low": np.zeros([40, 2])}, "moment2_low"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    tmp_path: Path, replaced: dict[str, np.ndarray | None], message: str
) -> None:
    folder, _ = save(tmp_path, O1)
    rewritten(folder / "optimizer.safetensors", **replaced)
    with pytest.raises(CheckpointError, match=message):
        load(folder)
