"""`rollouts.jsonl`: every answer that was sampled in a run, with what it was worth and the weights that gave it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.errors import TrainingError
from erniekit.model.decoder import Decoder
from erniekit.model.lora.fingerprint import weights_fingerprint
from erniekit.model.lora.lora import named_adapter_weights
from erniekit.training.checkpoint.manifest import atomic_write_bytes
from erniekit.training.collectives import Ranks

ROLLOUTS_FILE = "rollouts.jsonl"


def policy_fingerprint(model: Decoder, ranks: Ranks) -> str:
    """Return a short hash of the weights as they are now, of adapters, too; all ranks call it."""
    base = weights_fingerprint(model, ranks.all_gather_object)
    adapters = named_adapter_weights(model)
    if not adapters:
        return base
    digest = hashlib.sha256(base.encode())
    for name, weight in sorted(adapters.items()):
        digest.update(name.encode())
        digest.update(np.asarray(weight.astype("float32").numpy()).tobytes())
    of_ranks = dict.fromkeys(ranks.all_gather_object(digest.hexdigest()))
    return hashlib.sha256("".join(of_ranks).encode()).hexdigest()[:16]


class RolloutRecords:
    """The file of a run's answers; on the first rank alone.

    Args:
        folder: of the run.
        writes: whether this rank writes.
    """

    def __init__(self, folder: Path, *, writes: bool) -> None:
        self.path, self._writes = folder / ROLLOUTS_FILE, writes

    def keep(self, rollouts: int) -> None:
        """Keep the answers of the first rollouts of a run that goes on, and no others; 0 begins anew.

        Raises:
            TrainingError: the file cannot be read or written, or a line of it is no answer of a rollout.
        """
        if not self._writes or not self.path.exists():
            return
        try:
            if not rollouts:
                self.path.unlink()
                return
            lines = enumerate(self._complete_lines(), start=1)
            kept = b"".join(line for number, line in lines if self._rollout_of(number, line) < rollouts)
            atomic_write_bytes(self.path, kept)
        except OSError as error:
            raise TrainingError(
                f"{self.path}: cannot be written anew for a run that goes on: {error.strerror or error}\n"
                "  Free some space, or let this user write there; the file is as it was."
            ) from None

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add answers.

        Raises:
            TrainingError: the file cannot be written.
        """
        if not self._writes:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                for record in records:
                    file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        except OSError as error:
            raise TrainingError(f"{self.path}: cannot be written: {error.strerror}; free some space") from None

    def _rollout_of(self, number: int, line: bytes) -> int:
        try:
            return int(json.loads(line)["rollout"])
        except (ValueError, KeyError, TypeError):
            raise TrainingError(
                f"{self.path}:{number}: is no answer of a rollout\n"
                "  Mend the line, or move the file away: the run then goes on without the answers so far."
            ) from None

    def _complete_lines(self) -> Iterator[bytes]:
        for line in self.path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):  # the last one may have been cut by a kill
                yield line
