"""Log-probabilities of pairs under a reference model, kept on disk: one array for a set of pairs and a model."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from erniekit.data.dataset import Dataset
from erniekit.model.adapters.fingerprint import weights_fingerprint
from erniekit.model.adapters.lora import named_adapter_weights
from erniekit.model.decoder import Decoder
from erniekit.runners.wiring import Say
from erniekit.training.ranks import SINGLE_PROCESS, Ranks

TABLE_VERSION = 1  # raise it where the same pairs and weights come to other log-probabilities


def table_path(cache: Path, dataset: Dataset, model: Decoder, ranks: Ranks = SINGLE_PROCESS) -> Path:
    """Named by what the values depend on: the pairs, the weights, how they are multiplied, and the adapters; the
    same on every rank."""
    digest = hashlib.blake2b(digest_size=16)
    base = weights_fingerprint(model, ranks.all_gather_object)
    digest.update(repr((TABLE_VERSION, dataset.fingerprint, len(dataset), base)).encode())
    if model.activation_scales is not None:
        digest.update(repr(model.activation_scales.settings).encode())
    for name, weight in named_adapter_weights(model).items():
        digest.update(name.encode())
        digest.update(weight.numpy().tobytes())
    digests = dict.fromkeys(
        ranks.all_gather_object(digest.hexdigest())
    )  # one, unless ranks hold different parts of the model
    name = (
        "".join(digests)
        if len(digests) == 1
        else hashlib.blake2b(repr(list(digests)).encode(), digest_size=16).hexdigest()
    )
    return cache / "reference" / f"{name}.npy"


def read_table(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """fp32 of `shape`, NaN where nothing is known; a file that cannot be used counts as none."""
    try:
        table = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        table = np.empty(0)
    return table if table.shape == shape and table.dtype == np.float32 else np.full(shape, np.nan, np.float32)


def write_table(path: Path, table: np.ndarray, say: Say) -> None:
    """Replace the file as a whole. A disk that cannot be written is no reason to stop a run."""
    temp_path = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temp_path, "wb") as file:
            np.save(file, table, allow_pickle=False)
        os.replace(temp_path, path)
    except OSError as error:
        temp_path.unlink(missing_ok=True)
        say(f"warning: {path} cannot be written ({error.strerror}): the next run measures its reference again")
