"""What of a configuration reaches checkpoints; what a rank writes of its own, it writes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.build import checkpoint
from erniekit.build.checkpoint import LocalModelShard, with_checkpoint_here
from erniekit.config import Config
from erniekit.hub.object_store import ObjectFolder
from erniekit.manifest import problems
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.quantization.fp8 import compute_in_fp8, read_averages
from erniekit.model.quantization.settings import Fp8
from erniekit.model.randomness import Randomness
from erniekit.training.checkpoint.resume import Start
from erniekit.training.checkpoint.sharded import OPTIMIZER, WEIGHTS
from erniekit.training.checkpoint.stored import upload_folder
from erniekit.training.collectives import SINGLE_PROCESS
from tests.object_stores import sealed

TINY = {
    "model_type": "ernie4_5", "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 64,
}  # fmt: skip


def test_another_machine_downloads_what_the_first_rank_starts_from(
    store: ObjectFolder, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    here, there = tmp_path / "second machine" / "run", Path("/first machine/run/checkpoint-4")
    upload_folder(store, "checkpoint-4", sealed(tmp_path / "first/checkpoint-4", {"w": "x"}), {})
    config = make_config(output_dir=store.url).with_paths({"output_dir": str(here)})
    for start in (Start(None), Start(tmp_path / "first/checkpoint-4")):
        assert with_checkpoint_here(config, start) is start
    for _ in range(2):
        assert with_checkpoint_here(config, Start(there)) == Start(here / "checkpoint-4")
        assert problems(here / "checkpoint-4", hashes=True) == []
    own = make_config(output_dir=str(here))
    assert with_checkpoint_here(own, Start(there)) == Start(there), "which a shared disk has"


def test_another_machine_has_fetched_the_checkpoint_of_another_run_itself(
    store: ObjectFolder, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    here = sealed(tmp_path / "second machine/fetched/checkpoint-4", {"w": "x"})
    local = {"output_dir": str(tmp_path / "second machine/run"), "resume_from_checkpoint": str(here)}
    config = make_config(output_dir=store.url, resume_from_checkpoint=f"{store.url}-of-old/checkpoint-4")
    (tmp_path / "second machine/run").mkdir()
    found = with_checkpoint_here(config.with_paths(local), Start(Path("/first machine/fetched/checkpoint-4")))
    assert found == Start(here)


def test_ranks_exchange_nothing_since_another_one_may_have_failed(tmp_path: Path) -> None:
    """A rank whose disk is full says so in its next exchange; one that still writes would take that for an answer."""

    def all_gather_object(value: Any) -> list[Any]:
        pytest.fail("exchanged")

    model = build_model(ModelConfig.from_json(TINY), None)
    linear = model.layers[0].mlp.gate_proj
    model.activation_scales = compute_in_fp8({"gate_proj": linear}, Fp8(), Randomness(0), all_gather_object)
    linear.product.end_step(3.0)
    LocalModelShard(model, SINGLE_PROCESS, adapters=False).write(tmp_path)
    assert read_averages(tmp_path) == {"gate_proj": (3.0, 1)}


@pytest.mark.parametrize(
    ("values", "argument", "seen"),
    [
        ({}, "overwrite_output_dir", False),
        ({"overwrite_output_dir": True}, "overwrite_output_dir", True),
        ({"resume_from_checkpoint": "checkpoint-3"}, "resume_from_checkpoint", "checkpoint-3"),
    ],
    ids=str,
)
def test_how_the_folder_of_a_run_is_opened(
    values: dict[str, Any],
    argument: str,
    seen: Any,
    make_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint, "open_output_folder", lambda folder, **named: nullcontext(named))
    with checkpoint.open_run_folder(make_config(**values), rank=0) as told:
        assert told[argument] == seen  # type: ignore[index]
    with checkpoint.open_run_folder(make_config(**values), rank=1) as told:
        assert told is None


def test_what_must_not_change_when_a_run_resumes(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "base_fingerprint", lambda model: None)
    dp_rank, plan = SimpleNamespace(dp_world_size=2), SimpleNamespace(dataset=SimpleNamespace(fingerprint="data"))
    data: Any = SimpleNamespace(dp_rank=dp_rank, plan=plan)
    values: dict[str, Any] = {
        "seed": 7, "gradient_accumulation_steps": 3, "max_seq_len": 64, "per_device_train_batch_size": 5,
        "packing": False, "greedy_intokens": False, "buffer_size": 9, "random_shuffle": False,
        "mix_strategy": "random", "num_samples_each_epoch": 11,
    }  # fmt: skip
    identity = checkpoint.run_identity(make_config(**values), None, data)  # type: ignore[arg-type]
    values["gradient_accumulation_steps"] = 6  # of both ranks
    assert identity.seed == values.pop("seed")
    assert {name: identity.batches[name] for name in values} == values
    later = {"batch_tokens": 256, "max_batch_samples": 3, "min_sample_len": 2, "max_sample_len": 99}
    identity = checkpoint.run_identity(make_config(packing=False, **later), None, data)  # type: ignore[arg-type]
    assert {name: identity.batches[name] for name in later} == later
    curriculum = make_config(curriculum="length")
    assert checkpoint.run_identity(curriculum, None, data).batches["curriculum"] == "length"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "kinds", "number"),
    [
        ({}, set(), 1),
        ({"unified_checkpoint": False}, {WEIGHTS, OPTIMIZER}, 1),
        ({"unified_checkpoint_config": "ignore_merge_optimizer"}, {OPTIMIZER}, 1),
        ({"optim_shard_num": 3}, set(), 3),
    ],
    ids=str,
)
def test_what_each_rank_writes_itself(
    values: dict[str, Any], kinds: set[str], number: int, make_config: Callable[..., Config]
) -> None:
    for lora in (False, True):
        config = make_config(**values, **({"lora": True, "continue_training": True} if lora else {}))
        shards = checkpoint.shards_of(config, None, SINGLE_PROCESS)  # type: ignore[arg-type]
        assert (shards.kinds, shards.optimizer_files) == (kinds, number)
        assert shards.write_model.__self__.adapters is lora  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, ["model", 5 * 10**9]),
        ({"max_shard_size": 0.5}, ["model", 5 * 10**8]),
        ({"lora": True, "continue_training": True}, ["adapters", "files"]),
    ],
    ids=str,
)
def test_whether_the_model_or_its_adapters_are_written(
    values: dict[str, Any],
    told: list[Any],
    make_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    seen: list[Any] = []
    for name in ("local_adapters", "local_tensors", "named_weights"):
        monkeypatch.setattr(checkpoint, name, lambda model: None)
    monkeypatch.setattr(checkpoint, "save_adapters", lambda *parts: seen.append("adapters"))
    monkeypatch.setattr(checkpoint, "save_companion_files", lambda *parts: seen.append("files"))
    monkeypatch.setattr(
        checkpoint, "save_model_folder",
        lambda *parts, max_shard_bytes, full_tensors: seen.extend(["model", max_shard_bytes]),
    )  # fmt: skip
    (tmp_path / "generation_config.json").write_text("{}")
    monkeypatch.setattr(checkpoint, "write_processor_files", lambda *parts: seen.append(parts[1:]))
    ranks, model = SimpleNamespace(full_tensors=lambda tensors: None), _model_with(audio=None)
    writer = checkpoint.ModelWriter(make_config(**values), model, ranks, [], {"top_p": 0.5})  # type: ignore[arg-type]
    writer.write(tmp_path)
    assert seen == told and "0.5" in (tmp_path / "generation_config.json").read_text()
    writer = dataclasses.replace(writer, model=_model_with(audio=lambda config: "its encoder"))  # type: ignore[arg-type]
    writer.write(tmp_path)
    assert seen == [*told, *told, ([Path(writer.config.basic.model_name_or_path)], "its encoder")]


def _model_with(audio: Any) -> SimpleNamespace:
    config = SimpleNamespace(architecture=SimpleNamespace(audio=audio))
    return SimpleNamespace(activation_scales=None, config=config)


@pytest.mark.parametrize(("lora", "reads"), [(False, True), (True, False)])
def test_master_weights_are_compared_with_the_model_unless_it_has_adapters(
    lora: bool, reads: bool, make_config: Callable[..., Config]
) -> None:
    config = make_config(lora=lora, continue_training=True)
    policy = checkpoint.master_weight_policy(config, None, resumes_shards=False)  # type: ignore[arg-type]
    assert (policy.open_weights is not None) == reads
