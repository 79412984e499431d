"""One training run of the comparison of layouts: what its ranks execute, and what is read from what it has left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.distributed.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SHIPPED_MODEL = ROOT / "examples/models/tiny-ernie"


@dataclass(frozen=True)
class Refused:
    """A layout that the project does not run, in its own words."""

    reason: str


@dataclass(frozen=True)
class Run:
    """What a run has left.

    Attributes:
        losses: of every step, and of the evaluation after the last.
        gradients: of the first step, after clipping, by Hugging Face name.
        weights: after the last step, by Hugging Face name; of adapters where these are trained.
    """

    losses: np.ndarray
    gradients: Mapping[str, np.ndarray]
    weights: Mapping[str, np.ndarray]


def run(parameters: Mapping[str, Any], ranks: int, precision: str, *, timeout: float) -> Run | Refused:
    """Train as `erniekit train` does, on `ranks` processes.

    Args:
        parameters: the configuration; it must save a checkpoint at every step and evaluate at the last.
        precision: "float32" or "float64".

    Raises:
        RanksFailedError: a rank failed otherwise than by refusing the configuration.
    """
    said = run_ranks(train, ranks, timeout=timeout, parameters=dict(parameters), precision=precision)
    if said[0]["refused"]:
        return Refused(said[0]["refused"])
    return _read(Path(parameters["output_dir"]))


def train(parameters: dict[str, Any], precision: str) -> dict[str, str]:
    """What every rank executes. Returns why the configuration was refused, or an empty text."""
    import paddle

    from erniekit.config import Config
    from erniekit.errors import UserError
    from erniekit.runners.train import run_training

    paddle.set_default_dtype(precision)
    try:
        run_training(Config.from_mapping(parameters, verb="train"))
    except UserError as error:
        return {"refused": str(error)}
    return {"refused": ""}


def make_model(model_folder: str, settings: dict[str, Any], seed: int = 1) -> None:
    """Write a model of random weights: the shipped tokenizer, and a configuration of its own."""
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.builder import build_model
    from erniekit.model.weights import save_model_folder

    tokenizer = [SHIPPED_MODEL / name for name in ("tokenizer.json", "tokenizer_config.json")]
    save_model_folder(build_model(ModelConfig.from_json(settings), None, seed=seed), model_folder, tokenizer)


def _read(output_dir: Path) -> Run:
    records = [
        json.loads(line) for line in (output_dir / "training_log.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    losses = [record[name] for name in ("loss", "eval_loss") for record in records if name in record]
    state = tensors(output_dir / "checkpoint-1", "optimizer*.safetensors")
    suffix = "/moment1"
    # after one step from zero, the first moment is (1 - beta1) times the gradient
    gradients = {name[: -len(suffix)]: values for name, values in state.items() if name.endswith(suffix)}
    weights = tensors(output_dir, "adapter_model*.safetensors") or tensors(output_dir, "model*.safetensors")
    weights = {
        name: values for name, values in weights.items() if values.dtype.kind != "i"
    }  # offsets, which nothing trains
    shutil.rmtree(output_dir)
    return Run(np.array(losses), gradients, weights)


def tensors(folder: Path, pattern: str) -> dict[str, np.ndarray]:
    """All tensors of the files in a folder whose names match."""
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob(pattern)):
        tensors |= load_file(file)
    return tensors
