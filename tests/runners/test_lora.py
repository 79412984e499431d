"""Runs that train adapters: what they leave, resuming, going on, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.errors import CheckpointError, ConfigurationError, ModelFileError
from erniekit.model.storage.safetensors import SafetensorsFile

Train = Callable[..., Any]
ROOT = Path(__file__).parents[2]

CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora_rank": ({"lora_rank": 2}, {"lora_rank": 4, "lora_alpha": 8}),
    "lora_alpha": ({"lora_alpha": 3}, {}),
    "rslora": ({"rslora": True}, {"lora_alpha": 8}),
    "rslora_plus": ({"rslora_plus": True}, {"rslora": True}),
    "lora_plus_scale": ({"lora_plus_scale": 4}, {}),
    "lora_target_modules": ({"lora_target_modules": "q_proj, model.layers.1.*"}, {}),
    "lora_dropout": ({"lora_dropout": 0.5}, {}),
    "dropout_warmup_steps": ({"dropout_warmup_steps": 100}, {"lora_dropout": 0.5}),
    "dora": ({"dora": True}, {}),
    "lora_init": ({"lora_init": "pissa"}, {}),
    "layerwise_lr_decay_bound": ({"layerwise_lr_decay_bound": 0.1}, {}),
}
KINDS: dict[str, dict[str, Any]] = {
    "LoRA with dropout": {"lora_dropout": 0.2, "hidden_dropout_prob": 0.1},
    "rsLoRA+": {"rslora_plus": True},
    "DoRA": {"dora": True},
    "PiSSA": {"lora_init": "pissa"},
    "PiSSA, rsLoRA and DoRA": {"lora_init": "pissa", "rslora": True, "dora": True},
    "recomputed": {"recompute": True, "recompute_use_reentrant": True, "lora_dropout": 0.2},
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_parameter_of_lora_changes_the_losses(name: str, train_adapters: Train) -> None:
    values, base = CHANGES[name]
    assert train_adapters(**{**base, **values}).losses != train_adapters(**base).losses


def test_training_adapters_lowers_the_loss_and_keeps_the_base(train_adapters: Train, tiny_base: Path) -> None:
    before = (tiny_base / "model.safetensors").read_bytes()
    losses = train_adapters(max_steps=12).losses
    assert losses[-1] < losses[0] - 0.1
    assert (tiny_base / "model.safetensors").read_bytes() == before


def test_the_output_folder_holds_the_adapters_alone(train_adapters: Train, tiny_base: Path) -> None:
    run = train_adapters(save_strategy="steps", save_steps=2)
    for folder in (run.output, run.output / "checkpoint-2"):
        names = {path.name for path in folder.iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "generation_config.json"} <= names
        assert not names & {"config.json", "model.safetensors"}
        assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_base)
    optimizer = SafetensorsFile(run.output / "checkpoint-2" / "optimizer.safetensors").names()
    assert {name.rpartition("/")[0].rpartition(".")[2] for name in optimizer} == {"lora_A", "lora_B"}
    assert "on 14 linear layers" in run.said


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_is_exact_to_the_bit(kind: str, train_adapters: Train, tmp_path: Path) -> None:
    options = {**KINDS[kind], "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    whole = train_adapters(**options)
    resumed = train_adapters(
        **options,
        output_dir=str(tmp_path / "resumed"),
        resume_from_checkpoint=str(whole.output / "checkpoint-2"),
    )
    assert "resuming from" in resumed.said and "warning" not in resumed.said
    assert resumed.losses == whole.losses[2:]
    for name in ("adapter_model.safetensors", "checkpoint-6/optimizer.safetensors"):
        assert (resumed.output / name).read_bytes() == (whole.output / name).read_bytes()


@pytest.mark.parametrize("kind", ["LoRA with dropout", "DoRA"])
def test_recomputation_changes_no_loss(kind: str, train_adapters: Train) -> None:
    plain = train_adapters(**KINDS[kind])
    for reentrant in (False, True):
        again = train_adapters(**KINDS[kind], recompute=True, recompute_use_reentrant=reentrant)
        assert again.losses == plain.losses


def test_a_checkpoint_notices_what_has_changed(train_adapters: Train, tiny_base: Path, tmp_path: Path) -> None:
    first = train_adapters(save_strategy="steps", save_steps=2, lora_rank=4)
    resume = {"resume_from_checkpoint": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    with pytest.raises(ConfigurationError, match=r"`lora_rank`: the adapters in .*checkpoint-4 have 4, not 8"):
        train_adapters(**resume)
    with pytest.raises(ConfigurationError, match=r"`lora_target_modules`: .* other layers"):
        train_adapters(**resume, lora_rank=4, lora_target_modules="q_proj")
    with pytest.raises(ConfigurationError, match="`dora`"):
        train_adapters(**resume, lora_rank=4, dora=True)
    with pytest.raises(CheckpointError, match="it has adapters, but this run trains all weights"):
        train_adapters(**resume, lora=False)

    other = tmp_path / "other"
    shutil.copytree(tiny_base, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-5000:] = bytes(5000)
    (other / "model.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match="trained on top of other weights"):
        train_adapters(**resume, lora_rank=4, model_name_or_path=str(other))
    assert train_adapters(**resume, lora_rank=4).result.step == 6
    assert first.output.is_dir()


def test_a_whole_checkpoint_is_not_continued_with_adapters(train: Train, tiny_base: Path) -> None:
    values = {
        "model_name_or_path": str(tiny_base),
        "continue_training": True,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    train(**values)
    with pytest.raises(CheckpointError, match="it has a full model, but this run trains adapters"):
        train(**values, lora=True, resume_from_checkpoint=True)


@pytest.mark.parametrize("kind", ["LoRA with dropout", "PiSSA", "DoRA"])
def test_training_goes_on_from_adapters(kind: str, train_adapters: Train, tmp_path: Path) -> None:
    first = train_adapters(**KINDS[kind], lora_rank=4, output_dir=str(tmp_path / "first"), max_steps=8)
    for start in ("lora_path", "init_from_checkpoint"):
        on = train_adapters(**{start: str(first.output)})
        assert on.losses[0] < first.losses[0]
        assert f"adapters: {first.output}" in on.said and "rank 4" in on.said


def test_parameters_must_be_those_of_the_adapters(train_adapters: Train, tmp_path: Path) -> None:
    first = str(train_adapters(lora_rank=4, output_dir=str(tmp_path / "first")).output)
    with pytest.raises(
        ConfigurationError, match=r"config\.yaml:\d+: `lora_rank`: the adapters in .*first have 4, not 8"
    ):
        train_adapters(lora_path=first, lora_rank=8)
    train_adapters(lora_path=first, lora_rank=4)
    with pytest.raises(ConfigurationError, match=r"`lora_alpha`: .* have 8\.0, not 5\.0"):
        train_adapters(lora_path=first, lora_alpha=5)
    with pytest.raises(ConfigurationError, match="init_from_checkpoint names another"):
        train_adapters(lora_path=first, init_from_checkpoint=first)
    with pytest.raises(ConfigurationError, match="holds adapters, but lora is false"):
        train_adapters(init_from_checkpoint=first, lora=False)
    with pytest.raises(ModelFileError, match="is not a folder of adapters"):
        train_adapters(lora_path=str(tmp_path))
    with pytest.raises(ModelFileError, match="holds adapters; write their base model"):
        train_adapters(model_name_or_path=first)


def test_adapters_of_another_base_are_told_or_refused(
    train_adapters: Train, tiny_base: Path, tmp_path: Path, train: Train
) -> None:
    adapters = str(train_adapters(output_dir=str(tmp_path / "adapters")).output)
    changed = train(model_name_or_path=str(tiny_base), continue_training=True, output_dir=str(tmp_path / "changed"))
    run = train_adapters(lora_path=adapters, model_name_or_path=str(changed.output))
    assert "were trained on top of other weights than these" in run.said
    wider = tmp_path / "wider"
    shutil.copytree(tiny_base, wider)
    config = json.loads((wider / "config.json").read_text()) | {"hidden_size": 64}
    (wider / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=r"lora_A\.weight: shape \[8, 32\], expected \[8, 64\]"):
        train_adapters(lora_path=adapters, model_name_or_path=str(wider))


def test_what_adapters_cannot_have_is_refused(train_adapters: Train) -> None:
    with pytest.raises(
        ConfigurationError, match=r"'q_prj' names no linear layer .*\n.*model\.layers\.\*\.self_attn\.q_proj"
    ):
        train_adapters(lora_target_modules="q_prj")
    with pytest.raises(ConfigurationError, match="only 16 singular values"):
        train_adapters(lora_rank=17, lora_init="pissa")
    with pytest.raises(ConfigurationError, match="continue_training: true"):
        train_adapters(continue_training=False)
    with pytest.raises(ConfigurationError, match="is not a regular expression"):
        train_adapters(lora_target_modules="re:(")


def test_evaluation_and_try_see_the_adapters(
    train_adapters: Train,
    make_config: Callable[..., Any],
    tiny_base: Path,
    records: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    logged: list[str],
) -> None:
    from erniekit.runners import overfit_check
    from erniekit.runners.evaluate import run_evaluation

    held_out = {"do_eval": True, "eval_dataset_path": str(records), "max_evaluate_steps": -1}
    run = train_adapters(**held_out, eval_steps=8, max_steps=8, output_dir=str(tmp_path / "first"))
    values = {"lora": True, "model_name_or_path": str(tiny_base), "continue_training": True}
    alone = make_config(**values, **held_out, do_train=False, lora_path=str(run.output))
    result = run_evaluation(alone)
    assert result.loss == pytest.approx(run.result.evaluation.loss, rel=1e-6)
    logged.clear()
    monkeypatch.setattr(overfit_check, "GOAL", 0.9)  # frozen random weights keep adapters from more
    assert overfit_check.overfit_check(make_config(**values, lora_rank=16))
    assert any("adapters: new" in line for line in logged)


@pytest.mark.parametrize("kind", ["LoRA with dropout", "PiSSA, rsLoRA and DoRA"])
def test_answers_come_from_base_and_adapters(
    kind: str, train_adapters: Train, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from erniekit.inference.engine import ChatModel
    from erniekit.inference.sampling import Sampling
    from erniekit.model.lora.lora import merge_adapters

    run = train_adapters(**KINDS[kind], max_steps=8, save_strategy="steps", save_steps=8)
    sampling = Sampling(max_new_tokens=12, temperature=0.0)

    def answer(model: ChatModel) -> list[str]:
        return model.answer(["What is 2 + 3?", "Sort 3, 1, 2."], sampling)

    model = ChatModel.load(run.output)
    expected = answer(model)
    assert expected != answer(ChatModel.load(tiny_base))
    merge_adapters(model.decoder)
    assert answer(model) == expected
    assert answer(ChatModel.load(run.output / "checkpoint-8")) == expected
    assert answer(ChatModel.load(tiny_base, adapters=run.output)) == expected

    moved = tmp_path / "elsewhere" / "adapters"
    shutil.copytree(run.output, moved)
    (moved / "manifest.json").unlink()
    shutil.copytree(tiny_base, moved.parent / "base")
    config = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "../base"}))
    assert answer(ChatModel.load(moved)) == expected
    monkeypatch.chdir(moved.parent)
    (moved / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "base"}))
    assert answer(ChatModel.load(moved)) == expected
    (moved / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/no/such/base"}))
    with pytest.raises(ModelFileError, match="base model of these adapters is missing"):
        ChatModel.load(moved)
    with pytest.raises(ModelFileError, match="contains no adapters"):
        ChatModel.load(tiny_base, adapters=tiny_base)


def test_validate_counts_what_is_trained(
    tiny_base: Path, make_config: Callable[..., Any], train_adapters: Train
) -> None:
    from erniekit.build.layout import plan_layout
    from erniekit.build.model import read_model_config
    from erniekit.cli.validate import derived_numbers

    values = {"lora": True, "model_name_or_path": str(tiny_base), "continue_training": True, "dora": True}
    config = make_config(**values)
    numbers = dict(derived_numbers(config, 1, plan_layout(config, read_model_config(config))))
    run = train_adapters(dora=True)
    stored = SafetensorsFile(run.output / "adapter_model.safetensors")
    count = sum(int(np.prod(stored.shape(name))) for name in stored.names())
    assert f"{count:,} trained" in numbers["parameters"]
    assert f"{count:,} parameters" in run.said


@pytest.mark.slow
def test_the_quickstart_trains_adapters_beside_a_model_of_its_kind(tmp_path: Path) -> None:
    from erniekit.config import Config
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.builder import build_model
    from erniekit.model.weights import save_model_folder
    from erniekit.runners.train import run_training

    shipped = ROOT / "examples/models/tiny-ernie"
    tokenizer_files = [shipped / "tokenizer.json", shipped / "tokenizer_config.json"]
    save_model_folder(build_model(ModelConfig.from_folder(shipped), None), tmp_path / "base", tokenizer_files)
    changes = {
        "model_name_or_path": tmp_path / "base",
        "output_dir": tmp_path / "lora",
        "data_cache_dir": tmp_path / "cache",
        "train_dataset_path": ROOT / "examples/data/sft-eval.jsonl",
        "eval_dataset_path": ROOT / "examples/data/sft-eval.jsonl",
        "max_steps": 2,
        "max_evaluate_steps": 1,
    }
    file = ROOT / "examples/configs/quickstart/lora.yaml"
    config = Config.load(file, [f"{name}={value}" for name, value in changes.items()], verb="train")
    assert run_training(config).step == 2
    assert (tmp_path / "lora/adapter_model.safetensors").is_file()
