"""Runs small enough for a unit test: two layers of 32, sixty records, steps of a few milliseconds.

Fixtures for all tests (`tests/conftest.py` names this file as a plugin); Paddle is imported by the first run only.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from erniekit.config import Config
from tests.log_capture import captured_log

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: the shipped tokenizer and a smaller configuration."""
    folder = tmp_path_factory.mktemp("model")
    shipped = ROOT / "examples/models/tiny-ernie"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped / name, folder)
    config = json.loads((shipped / "config.json").read_text())
    config |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_random_model(model: Path, folder: Path, seed: int) -> Path:
    """Put random weights for a model's configuration into `folder`, with its tokenizer."""
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.builder import build_model
    from erniekit.model.weights import save_model_folder

    tokenizer_files = [model / "tokenizer.json", model / "tokenizer_config.json"]
    save_model_folder(build_model(ModelConfig.from_folder(model), None, seed=seed), folder, tokenizer_files)
    return folder


@pytest.fixture(scope="session")
def tiny_base(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with random weights, as adapters need one."""
    return save_random_model(tiny_model, tmp_path_factory.mktemp("base"), seed=3)


@pytest.fixture(scope="session")
def windowed_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer with a model of another family, whose layers attend to 40 positions; without weights."""
    folder = tmp_path_factory.mktemp("windowed")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    known = json.loads((folder / "config.json").read_text())
    sizes = {name: known[name] for name in known if name.endswith("_size") or name.startswith("num_")}
    kept = {"head_dim": known["head_dim"], "max_position_embeddings": known["max_position_embeddings"]}
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral", "sliding_window": 40, **sizes, **kept}))
    return folder


@pytest.fixture(scope="session")
def moe_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with experts in its second layer, and one layer of multi-token prediction."""
    folder = tmp_path_factory.mktemp("moe")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}
    config |= {"moe_num_shared_experts": 1, "moe_layer_start_index": 1, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first sixty records of the shipped training file."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    lines = (ROOT / "examples/data/sft-train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:60]), encoding="utf-8")
    return path


@pytest.fixture
def make_config(tiny_model: Path, records: Path, tmp_path: Path) -> Callable[..., Config]:
    """Write a YAML file with the given parameters over the tiny defaults, and load it as `erniekit train` does."""

    def make(**parameters: Any) -> Config:
        values: dict[str, Any] = {
            "model_name_or_path": str(tiny_model),
            "continue_training": False,
            "output_dir": str(tmp_path / "run"),
            "train_dataset_path": str(records),
            "data_cache_dir": str(tmp_path / "cache"),
            "max_seq_len": 128,
            "max_steps": 4,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "report_to": "none",
            "per_device_train_batch_size": 2,
            **parameters,
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({name: value for name, value in values.items() if value is not None}))
        return Config.load(path, verb="train")

    return make


@pytest.fixture
def train(make_config: Callable[..., Config], tmp_path: Path) -> Callable[..., Any]:
    """Train with the given parameters; returns what a run leaves, for comparisons."""
    from erniekit.runners.train import run_training

    def run(**parameters: Any) -> Any:
        config = make_config(**parameters)
        if not config.checkpoint.resume_from_checkpoint:
            shutil.rmtree(config.basic.output_dir, ignore_errors=True)
        with captured_log() as lines:
            result = run_training(config)
        output = Path(config.basic.output_dir)
        log = [json.loads(line) for line in (output / "training_log.jsonl").read_text().splitlines()]
        return SimpleNamespace(
            result=result,
            said="\n".join(lines),
            output=output,
            log=log,
            losses=[entry["loss"] for entry in log if "loss" in entry],
        )

    return run


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first forty of the shipped pairs, some of them with other scores."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    lines = (ROOT / "examples/data/preference-train.jsonl").read_text(encoding="utf-8").splitlines()[:40]
    records = [json.loads(line) | {"sort": [3, 1] if number % 3 else [1, 0]} for number, line in enumerate(lines)]
    for record in records[:5]:  # long prompts
        record["src"], record["tgt"] = ["What is 1 + 1?", *record["src"]], ["2"]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def prefer(train: Callable[..., Any], tiny_base: Path, pairs: Path) -> Callable[..., Any]:
    """A short run on pairs."""

    def run(**parameters: Any) -> Any:
        values = {
            "stage": "DPO", "model_name_or_path": str(tiny_base), "continue_training": True,
            "train_dataset_path": str(pairs), "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2,
            "max_steps": 6,
        }  # fmt: skip
        return train(**{**values, **parameters})

    return run


@pytest.fixture
def train_adapters(train: Callable[..., Any], tiny_base: Path) -> Callable[..., Any]:
    """`train` with adapters beside the tiny base."""

    def run(**parameters: Any) -> Any:
        return train(**{"lora": True, "model_name_or_path": str(tiny_base), "continue_training": True, **parameters})

    return run


@pytest.fixture
def train_on_ranks(
    make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., SimpleNamespace]:
    """Train on as many ranks as the layout needs; the losses, what each rank has said, and the folder."""
    from erniekit.launch.job import plan_job, run_job
    from tests.distributed.warm_processes import warm_starts

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*, nproc: int | None = None, **parameters: Any) -> SimpleNamespace:
        output = tmp_path / "ranks"
        config = make_config(**{"output_dir": str(output), **parameters})
        if not config.checkpoint.resume_from_checkpoint:
            shutil.rmtree(output, ignore_errors=True)
        job = plan_job(config, (sys.executable, "-m", "erniekit", "train", str(config.path)), nproc=nproc, logs=None)
        with warm_starts():
            assert job is not None and run_job(job) == 0
        log = [json.loads(line) for line in (output / "training_log.jsonl").read_text().splitlines()]
        said = [(job.logs / f"rank-{rank}.log").read_text() for rank in range(job.nproc)]
        return SimpleNamespace(losses=[line["loss"] for line in log if "loss" in line], said=said, output=output)

    return run
