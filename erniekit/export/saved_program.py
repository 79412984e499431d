"""Open an exported program, of Paddle's inference engine or ONNX, for `inference.generation`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from erniekit.export.onnx import ONNX_FILE, open_onnx
from erniekit.export.static_program import ProgramDescription, Step, open_program, prefill


@dataclass(frozen=True)
class SavedProgram:
    """A program with the attributes that generation reads of a decoder. It runs on the CPU.

    Attributes:
        config: the facts about the program, `max_position_embeddings` among them.
        activation_scales: none, because a program computes in float32.
    """

    step: Step
    config: ProgramDescription
    activation_scales: None = None

    @classmethod
    def open(cls, folder: Path) -> SavedProgram:
        """Open the program in `folder`.

        Raises:
            ConfigurationError: onnxruntime, which runs it, is not installed.
            ModelFileError: a file is missing or damaged.
        """
        open_it = open_onnx if (folder / ONNX_FILE).is_file() else open_program
        return cls(open_it(folder), ProgramDescription.read(folder))

    def cached_logits(self, prompts: Sequence[Sequence[int]]) -> Callable[[Sequence[int] | None], np.ndarray]:
        """Return a function that computes the next logits [B, V] of every prompt and keeps the key-value cache.

        Its argument is the newest token of each row; None in the first call, which reads the prompts.
        """
        positions = np.array([len(prompt) for prompt in prompts])
        mask = (np.arange(positions.max()) < positions[:, None]).astype(np.int64)
        past: list[np.ndarray] = []

        def next_logits(newest: Sequence[int] | None) -> np.ndarray:
            nonlocal positions, mask, past
            if newest is None:
                logits, *past = prefill(self.step, self.config, prompts)
                return logits
            mask = np.pad(mask, ((0, 0), (0, 1)), constant_values=1)
            last = np.zeros(len(positions), np.int64)
            ids = np.array(newest, np.int64)[:, None]
            logits, *past = self.step([ids, positions[:, None], mask, last, *past])
            positions = positions + 1
            return logits

        return next_logits
