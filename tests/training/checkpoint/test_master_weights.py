"""Master weights in checkpoints: beside the weights, in their place, or left out; exact where it is said to be.

Paddle's AdamW updates no 16-bit weights on a CPU. Its state is the real one here; the arithmetic of an update is done
on the master weights, as its kernel does on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import Tensor
from safetensors.numpy import load_file, save_file

from erniekit.config.sections.training import TrainingParameters
from erniekit.errors import CheckpointError
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.linear import Linear
from erniekit.model.local_tensors import SingleProcessTensors, local_tensors, to_numpy
from erniekit.model.weights import load_weights, named_weights, save_model_folder, weight_reader
from erniekit.training.checkpoint.master_weights import MasterWeightPolicy, load_master_weights, master_weights_as_model
from erniekit.training.checkpoint.resume import Start
from erniekit.training.checkpoint.tensors import TensorFiles
from erniekit.training.optim.adamw import build_optimizer, optimizer_state
from erniekit.training.trainer import Trainer
from tests.log_capture import captured_log
from tests.training.fakes import FakeModel, RecordingRanks, fake_trainer

STEPS, MIDDLE = 6, 3
FRESH = Start(None)
TINY = {
    "model_type": "ernie4_5", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip


class NarrowModel(FakeModel):
    """Matrices in bfloat16, computed with in float32."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        for name, parameter in list(self.named.items()):
            if parameter.ndim > 1:
                narrow = self.create_parameter(parameter.shape, dtype="bfloat16")
                narrow.set_value(parameter.astype("bfloat16"))
                self.named[name] = narrow
        self.stored = dict(self.named)

    def forward(self, input_ids: Tensor) -> Tensor:
        kept = self.named
        self.named = {name: parameter.astype("float32") for name, parameter in kept.items()}
        try:
            return super().forward(input_ids)
        finally:
            self.named = kept

    def save(self, folder: Path, masters: Mapping[str, Tensor] = {}) -> None:
        tensors = {**self.named, **masters}
        save_file({name: to_numpy(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")

    def load(self, folder: Path) -> None:
        for name, array in load_file(folder / "model.safetensors").items():
            self.named[name].set_value(paddle.to_tensor(array).astype(self.named[name].dtype))

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: to_numpy(tensor) for name, tensor in self.named.items()}


@paddle.no_grad()
def adam(optimizer: Any, named: Mapping[str, Tensor]) -> None:
    """One update by Adam's formulas."""
    state = optimizer_state(optimizer, named)
    for name, parameter in named.items():
        gradient = to_numpy(parameter.grad)
        moment1, moment2, power1, power2 = (
            state[f"{name}/{kind}"] for kind in ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
        )
        moment1.set_value(0.9 * moment1.numpy() + np.float32(0.1) * gradient)
        moment2.set_value(0.999 * moment2.numpy() + np.float32(0.001) * gradient**2)
        wide = state.get(f"{name}/master_weight", parameter)
        step = moment1.numpy() / (1 - power1.numpy()) / (np.sqrt(moment2.numpy() / (1 - power2.numpy())) + 1e-8)
        wide.set_value((wide.numpy() - np.float32(optimizer.get_lr()) * step).astype(np.float32))
        power1.set_value(power1.numpy() * 0.9)
        power2.set_value(power2.numpy() * 0.999)
        if wide is not parameter:
            parameter.set_value(wide.astype("bfloat16"))


def open_weights(folder: Path) -> Any:
    return load_file(folder / "model.safetensors").__getitem__


def trainer(output_dir: Path, master_weights: MasterWeightPolicy, narrow: bool = True, **changes: Any) -> Trainer:
    model = NarrowModel() if narrow else FakeModel(dropout=0.3)
    optimizer = build_optimizer(model.named, TrainingParameters())
    optimizer.step = partial(adam, optimizer, model.named)
    words = {"as weights": ["skip_save_model_weight"], "nowhere": ["remove_master_weight"], "beside": []}
    of_checkpoints = None
    if master_weights.stored == "as weights" and narrow:

        def of_checkpoints(folder: Path | None) -> None:
            weights = master_weights_as_model(local_tensors(model.named), optimizer, model.named)
            model.save(folder, {name: weights.read(name) for name in weights.tensors})

    values: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "master_weights": master_weights,
        "write_checkpoint_model": of_checkpoints,
        "resolved_config": {"unified_checkpoint_config": words[master_weights.stored]},
        "save_strategy": "steps",
        "save_steps": MIDDLE,
    }
    return fake_trainer(output_dir, total_steps=STEPS, **(values | changes))


def resumed(
    checkpoint: Path, master_weights: MasterWeightPolicy, **changes: Any
) -> tuple[dict[str, np.ndarray], list[str]]:
    """The state after the rest of the run, and what it said."""
    run = trainer(checkpoint.parents[1] / "again", master_weights, **changes)
    run.model.load(checkpoint)
    with captured_log() as said:
        run.fit(Start(checkpoint))
    return state_of(run), said


def state_of(run: Trainer) -> dict[str, np.ndarray]:
    state = optimizer_state(run.optimizer, run.parameters)
    return {name: to_numpy(tensor) for name, tensor in {**run.parameters, **state}.items()}


def whole_run(folder: Path, master_weights: MasterWeightPolicy, **changes: Any) -> dict[str, np.ndarray]:
    run = trainer(folder / "whole", master_weights, **changes)
    run.fit(FRESH)
    return state_of(run)


def names_in(checkpoint: Path) -> set[str]:
    return set(load_file(checkpoint / "optimizer.safetensors"))


@pytest.mark.parametrize("stored", ["beside", "as weights"])
def test_a_run_goes_on_exactly(tmp_path: Path, stored: Any) -> None:
    master_weights = MasterWeightPolicy(stored, open_weights=open_weights)
    expected = whole_run(tmp_path, master_weights)
    checkpoint = tmp_path / "whole" / f"checkpoint-{MIDDLE}"
    state, said = resumed(checkpoint, master_weights)
    for name, values in expected.items():
        np.testing.assert_array_equal(state[name], values, err_msg=name)
    assert not any("bit-exact" in line for line in said)
    held = {name for name in names_in(checkpoint) if name.endswith("/master_weight")}
    assert bool(held) == (stored == "beside")


def test_stored_as_model_they_are_full_and_a_plain_run_resumes(tmp_path: Path) -> None:
    """Each value is stored once, and what is stored is a model like any other, of more exact weights."""
    expected = whole_run(tmp_path, MasterWeightPolicy("as weights"))
    checkpoint = tmp_path / "whole" / f"checkpoint-{STEPS}"
    for name, values in open_weights(checkpoint).__self__.items():
        np.testing.assert_array_equal(values, expected.get(f"{name}/master_weight", expected[name]), err_msg=name)
    final = load_file(tmp_path / "whole" / "model.safetensors")
    np.testing.assert_array_equal(final["lm_head.weight"], expected["lm_head.weight"])  # the model itself, rounded
    assert (final["lm_head.weight"] != open_weights(checkpoint)("lm_head.weight")).any()
    state, said = resumed(
        tmp_path / "whole" / f"checkpoint-{MIDDLE}", MasterWeightPolicy("beside", open_weights=open_weights)
    )
    for name, values in expected.items():
        np.testing.assert_array_equal(state[name], values, err_msg=name)
    assert not any("bit-exact" in line for line in said)


def test_left_out_they_are_made_from_the_weights_which_is_told(tmp_path: Path) -> None:
    master_weights = MasterWeightPolicy("nowhere")
    expected = whole_run(tmp_path, master_weights)
    checkpoint = tmp_path / "whole" / f"checkpoint-{MIDDLE}"
    assert not any(name.endswith("/master_weight") for name in names_in(checkpoint))
    state, said = resumed(checkpoint, master_weights)
    assert any("no master weights: they are made from its weights, which is not bit-exact" in line for line in said)
    name = "lm_head.weight/master_weight"
    assert (state[name] != expected[name]).any()
    np.testing.assert_allclose(state[name], expected[name], atol=0.05)


def test_without_them_a_run_that_does_not_expect_it_is_told_what_to_write(tmp_path: Path) -> None:
    whole_run(tmp_path, MasterWeightPolicy("nowhere"))
    checkpoint = tmp_path / "whole" / f"checkpoint-{MIDDLE}"
    with pytest.raises(CheckpointError, match=r"has no master weights[^\0]*\[master_weight_compatible\]"):
        resumed(checkpoint, MasterWeightPolicy())
    _, said = resumed(checkpoint, MasterWeightPolicy(compatible=True))
    assert any("not bit-exact" in line for line in said)


def test_float32_and_16_bit_runs_resume_from_each_other_if_allowed(tmp_path: Path) -> None:
    whole_run(tmp_path / "narrow", MasterWeightPolicy())
    whole_run(tmp_path / "wide", MasterWeightPolicy(), narrow=False)
    narrow, wide = (tmp_path / kind / "whole" / f"checkpoint-{STEPS}" for kind in ("narrow", "wide"))
    with pytest.raises(CheckpointError, match=r"has master weights[^\0]*weights of this run are float32"):
        resumed(narrow, MasterWeightPolicy(), narrow=False)
    state, said = resumed(narrow, MasterWeightPolicy(compatible=True), narrow=False)
    held = load_file(narrow / "optimizer.safetensors")
    np.testing.assert_array_equal(state["lm_head.weight"], held["lm_head.weight/master_weight"])
    assert any("master weights of the checkpoint are the weights of this run" in line for line in said)

    with pytest.raises(CheckpointError, match="has no master weights"):
        resumed(wide, MasterWeightPolicy(open_weights=open_weights))
    state, _ = resumed(wide, MasterWeightPolicy(compatible=True, open_weights=open_weights))
    exact = load_file(wide / "model.safetensors")
    np.testing.assert_array_equal(state["lm_head.weight/master_weight"], exact["lm_head.weight"])
    assert (state["lm_head.weight"] != exact["lm_head.weight"]).any()


@pytest.mark.parametrize("stored", ["as weights", "nowhere"])
def test_without_master_weights_the_words_are_told_to_change_nothing(
    tmp_path: Path, stored: Any, logged: list[str]
) -> None:
    whole_run(tmp_path, MasterWeightPolicy(stored), narrow=False)
    word = {"as weights": "skip_save_model_weight", "nowhere": "remove_master_weight"}[stored]
    assert sum(line.startswith(f"{word} has no effect here") for line in logged) == 1


def test_a_model_of_master_weights_is_one_like_any_other(tmp_path: Path) -> None:
    """Of a real decoder: what is stored is in Hugging Face's layout, and whoever reads it has the exact values."""
    config = ModelConfig.from_json(TINY)
    narrow = build_model(config, None, seed=1)
    for layer in narrow.sublayers():
        if isinstance(layer, Linear):
            layer.to(dtype="bfloat16")
    weights = named_weights(narrow)
    optimizer = build_optimizer(weights, TrainingParameters())
    generator = np.random.default_rng(2)
    state = optimizer_state(optimizer, weights)
    exact = {}
    for name, weight in weights.items():
        exact[name] = generator.standard_normal(weight.shape).astype(np.float32)
        if (master := state.get(f"{name}/master_weight")) is not None:
            master.set_value(exact[name])
        weight.set_value(paddle.to_tensor(exact[name]).astype(weight.dtype))
    in_place = master_weights_as_model(local_tensors(weights), optimizer, weights)
    save_model_folder(narrow, tmp_path, full_tensors=SingleProcessTensors(in_place))

    wide, again = build_model(config, tmp_path), build_model(config, None, seed=3)
    for layer in again.sublayers():
        if isinstance(layer, Linear):
            layer.to(dtype="bfloat16")
    load_weights(again, tmp_path)
    read = weight_reader(config, tmp_path)
    assert any(f"{name}/master_weight" in state for name in exact)
    for name, values in exact.items():
        np.testing.assert_array_equal(named_weights(wide)[name].numpy(), values, err_msg=name)
        np.testing.assert_array_equal(to_numpy(named_weights(again)[name]), to_numpy(weights[name]), err_msg=name)
        np.testing.assert_array_equal(read(name), values, err_msg=name)


class FirstOfTwoRanks(RecordingRanks):
    """The first of two ranks, which has the upper half of every matrix; the other has another layer."""

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, ["layers.1.weight"]]

    def local_shard(self, name: str, full: np.ndarray) -> np.ndarray:
        return full[: len(full) // 2] if full.ndim > 1 else full


def test_a_rank_needs_only_its_own_where_each_wrote_its_part(tmp_path: Path) -> None:
    model = NarrowModel()
    optimizer = build_optimizer(model.named, TrainingParameters())
    state = {
        name: np.full(tensor.shape, 3, np.float32) for name, tensor in optimizer_state(optimizer, model.named).items()
    }
    files = TensorFiles(tuple(state), state.__getitem__)
    told = load_master_weights(
        files,
        tmp_path,
        optimizer,
        model.named,
        MasterWeightPolicy(),
        stored_as_model=False,
        is_sharded=True,
        ranks=FirstOfTwoRanks(),
    )
    assert told == ""
    np.testing.assert_array_equal(
        optimizer_state(optimizer, model.named)["lm_head.weight/master_weight"], state["lm_head.weight/master_weight"]
    )


def test_a_rank_shards_full_weights_beside_its_own_optimizer_state(tmp_path: Path) -> None:
    model = NarrowModel()
    optimizer = build_optimizer(model.named, TrainingParameters())
    wholes = {
        name: np.arange(2 * tensor.size, dtype=np.float32).reshape([2 * tensor.shape[0], *tensor.shape[1:]])
        for name, tensor in model.named.items()
    }
    master_weights = MasterWeightPolicy("as weights", open_weights=lambda folder: wholes.__getitem__)
    load_master_weights(
        TensorFiles((), wholes.__getitem__), tmp_path, optimizer, model.named, master_weights,
        stored_as_model=True, is_sharded=True, ranks=FirstOfTwoRanks(),
    )  # fmt: skip
    stored = optimizer_state(optimizer, model.named)["lm_head.weight/master_weight"].numpy()
    np.testing.assert_array_equal(stored, wholes["lm_head.weight"][: len(stored)])


def test_shares_of_master_weights_are_not_taken_for_weights(tmp_path: Path) -> None:
    """A rank of a sharding group has all weights, and has written the master weights of some."""
    model, ranks = FakeModel(dropout=0.3), FirstOfTwoRanks()
    ranks.layout = {"ranks": 2, "sharding": "stage1"}
    before = model.arrays()
    files = TensorFiles(("lm_head.weight/master_weight",), lambda name: np.zeros(model.named["lm_head.weight"].shape))
    with pytest.raises(CheckpointError, match=r"has sharded master weights[^\0]*unified_checkpoint: true"):
        load_master_weights(
            files, tmp_path, build_optimizer(model.named, TrainingParameters()), model.named,
            MasterWeightPolicy(compatible=True), stored_as_model=False, is_sharded=True, ranks=ranks,
        )  # fmt: skip
    np.testing.assert_array_equal(model.arrays()["lm_head.weight"], before["lm_head.weight"])
