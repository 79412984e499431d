"""Open an exported program, of Paddle's inference engine or ONNX, for `inference.decoding.program_step`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from erniekit.export.onnx import ONNX_FILE, open_onnx
from erniekit.export.static_program import ProgramDescription, Step, open_program


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
