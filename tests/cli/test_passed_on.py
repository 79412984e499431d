"""What verbs hand on of a configuration to the functions that do their work."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from erniekit.cli import generate, main, ranks
from erniekit.cli.eval import evaluation_config
from erniekit.cli.layout_report import layout_blocks
from erniekit.config import Config
from erniekit.distributed.topology import topology_from
from erniekit.errors import ConfigurationError, UserError
from erniekit.export import export
from erniekit.export.trained_model import find_trained_model

Made = Callable[..., Config]


def _noting(told: list[Any]) -> Callable[..., None]:
    def note(*parts: Any, **named: Any) -> None:
        told.append((*parts, named) if named else parts)

    return note


@pytest.mark.proves("max_shard_size", "overwrite_output_dir")
def test_split(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("erniekit.cli.split.split_model", _noting(told))
    assert main(["split", "model"]) == main(["split", "model", "max_shard_size=0.5", "overwrite_output_dir=true"]) == 0
    (*_, size, default), (*_, asked, overwriting) = told
    assert (size, default) == (5 * 10**9, {"overwrite": False})
    assert (asked, overwriting) == (5 * 10**8, {"overwrite": True})


@pytest.mark.proves("seed", "max_model_len")
def test_chat_and_generate_sample_with_the_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[Any] = []
    monkeypatch.setattr("erniekit.inference.engine.sampling_from", _noting(told))
    monkeypatch.setattr("erniekit.inference.batch.encode_prompts", lambda *parts, **named: [])
    monkeypatch.setattr("erniekit.inference.batch.answer_records", lambda *parts: [])
    monkeypatch.setattr("builtins.input", lambda prompt="": "/exit")
    started: list[Any] = []
    dialogue = SimpleNamespace(start=lambda model, **named: started.append(named))
    monkeypatch.setattr("erniekit.inference.engine.Dialogue", dialogue)
    model = SimpleNamespace(answer=lambda *parts, **named: ["yes"])
    for verb in ("chat", "generate"):
        monkeypatch.setattr(f"erniekit.cli.{verb}.load_model", lambda *parts: model)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    assert main(["generate", "model", "--prompt", "a", "--seed", "7"]) == 0
    assert main(["generate", "model", "--prompts", str(prompts), "--seed", "7"]) == 0
    assert main(["chat", "model", "--seed", "7", "max_model_len=50"]) == 0
    assert [seed for _, seed in told] == [7, 7, 7] and started[0]["max_model_len"] == 50


@pytest.mark.proves("device", "cpu_kernels", "ignore_config_keys", "train_dataset_path")
def test_chat_and_generate_load_the_model_as_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {"ignore_config_keys": ["a"], "device": "gpu:1", "cpu_kernels": "avx2"}
    asked = Config.from_mapping(values, verb="generate")
    told: list[Any] = []
    monkeypatch.setattr("erniekit.model.device.use_device", _noting(told))
    monkeypatch.setattr("erniekit.model.native.use_kernels", _noting(told))
    generate.select_device(asked)
    assert told == [("gpu:1",), ("avx2",)]
    loaded: dict[str, Any] = {}
    monkeypatch.setattr("erniekit.inference.engine.ChatModel.load", lambda folder, **named: loaded.update(named))
    generate.load_model(argparse.Namespace(model=tmp_path, lora_path=None), asked)
    assert loaded["ignored_keys"] == ("a",)

    run = {"model_name_or_path": "base", "output_dir": "run"}
    for data, folder in (({}, "base"), ({"train_dataset_path": "t.jsonl"}, "run")):
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(run | data))
        options = argparse.Namespace(model=file)
        assert generate.model_folder(options, Config.load(file, verb="generate")) == Path(folder)


@pytest.mark.proves("device")
def test_ranks_know_whether_they_need_a_gpu(make_config: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("erniekit.launch.external.adopt_rank", lambda variables, gpu: told.append(gpu))
    monkeypatch.setattr("erniekit.launch.job.plan_job", lambda *parts, **named: None)
    for device in ("cpu", "gpu"):
        ranks.run_on_ranks(make_config(device=device), argparse.Namespace(rank_logs=None, nproc=None), ("train",))
    assert told == [False, True]


@pytest.mark.proves("device", "overwrite_output_dir", "hf_hub_id")
def test_export(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class DeviceChosenError(Exception):
        pass

    def use_device(device: str) -> None:
        told.append(device)
        raise DeviceChosenError

    told: list[Any] = []
    model = SimpleNamespace(folder=tmp_path, base=None)
    monkeypatch.setattr(export, "find_trained_model", lambda named, config: model)
    monkeypatch.setattr(export, "check_target", lambda target, sources, overwrite: told.append(overwrite))
    monkeypatch.setattr(export, "use_device", use_device)
    for words in ([], ["overwrite_output_dir=true", "device=gpu:1"]):
        with pytest.raises(DeviceChosenError):
            export.export_model(tmp_path, tmp_path / "out", Config.load(None, words, verb="export"))
    assert told == [False, "auto", True, "gpu:1"]
    monkeypatch.setattr(export, "check_upload", told.append)
    with pytest.raises(DeviceChosenError):
        export.export_model(tmp_path, tmp_path / "out", Config.load(None, ["hf_hub_id=a/b"], verb="export"))
    assert told[-2:] == ["a/b", "auto"]


@pytest.mark.proves("train_dataset_path")
def test_export_knows_whether_a_file_trains(tmp_path: Path) -> None:
    run = {"model_name_or_path": "base", "output_dir": str(tmp_path / "run")}
    file = tmp_path / "config.yaml"
    for data, advice in (
        ({}, "Write the output_dir of a finished run"),
        ({"train_dataset_path": "t"}, "Train it first"),
    ):
        file.write_text(yaml.safe_dump(run | data))
        with pytest.raises(UserError, match=advice):
            find_trained_model(file, Config.load(file, verb="export"))


@pytest.mark.proves("continue_training", "init_from_checkpoint", "ref_model_name_or_path")
@pytest.mark.parametrize(
    ("values", "reference"),
    [
        ({}, "base"),
        ({"continue_training": False}, ""),
        ({"init_from_checkpoint": "weights"}, "weights"),
        ({"ref_model_name_or_path": "other"}, "other"),
    ],
    ids=str,
)
def test_eval_compares_with_what_the_run_began_with(
    values: dict[str, Any], reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = SimpleNamespace(folder=tmp_path / "run", is_adapter=False, base=None)
    monkeypatch.setattr("erniekit.cli.eval.find_trained_model", lambda named, config: trained)
    file = tmp_path / "config.yaml"
    run = {"model_name_or_path": "base", "output_dir": str(tmp_path / "run"), "stage": "DPO", "eval_dataset_path": "e"}
    file.write_text(yaml.safe_dump(run | {"train_dataset_path": "t"} | values))
    config = evaluation_config(file, [])
    assert config.dpo.ref_model_name_or_path == reference
    assert config.basic.model_name_or_path == str(trained.folder) and config.checkpoint.init_from_checkpoint == ""


@pytest.mark.proves("init_from_checkpoint")
def test_eval_puts_adapters_on_the_weights_that_they_were_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = SimpleNamespace(folder=tmp_path / "run", is_adapter=True, base="weights")
    monkeypatch.setattr("erniekit.cli.eval.find_trained_model", lambda named, config: trained)
    file = tmp_path / "config.yaml"
    run = {"model_name_or_path": "base", "output_dir": str(tmp_path / "run"), "eval_dataset_path": "e", "lora": True}
    for values, base in (({}, "base"), ({"init_from_checkpoint": "weights"}, "weights")):
        file.write_text(yaml.safe_dump(run | {"train_dataset_path": "t"} | values))
        config = evaluation_config(file, [])
        assert (config.basic.model_name_or_path, config.lora.lora_path) == (base, str(trained.folder))


@pytest.mark.proves("gradient_accumulation_steps")
def test_the_report_of_a_layout_tells_the_accumulation(make_config: Made) -> None:
    config = make_config(pipeline_parallel_degree=2, gradient_accumulation_steps=6)
    (block,) = layout_blocks(config, topology_from(config), None)
    assert "pipeline bubble: 14% of a step with gradient_accumulation_steps 6" in block


def test_the_file_of_an_evaluation_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        evaluation_config(tmp_path / "absent.yaml", [])
