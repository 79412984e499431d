"""Export a trained model as ONNX with paddle2onnx and check it with onnxruntime. Both packages are optional.

paddle2onnx writes a varying length of a recorded shape as -1 where an operation takes the shape of another tensor
(`expand_as`), so programs contain none of these (`model.norm.expand_like`). Its folding of constants is not used: it
installs packages while it runs.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from erniekit.errors import ConfigurationError, ModelFileError
from erniekit.export.logit_difference import LogitDifference
from erniekit.export.static_program import (
    PARAMETERS_FILE,
    PROGRAM_FILE,
    Arrays,
    ProgramDescription,
    Step,
    check_program,
    open_program,
    save_program,
)
from erniekit.manifest import refuse_changed
from erniekit.model.decoder import Decoder

ONNX_FILE = "model.onnx"
OPSET = 17
MAX_BYTES = 2 * 10**9  # protobuf limits a file to 2 GiB
PACKAGES = ("paddle2onnx", "onnxruntime")


def check_onnx_packages() -> None:
    """Raise ConfigurationError if a package that ONNX export needs is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"--format onnx: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed.\n"
            "  Install the packages: pip install 'erniekit[onnx]'"
        )


def write_onnx(
    decoder: Decoder, folder: Path, prompts: Sequence[Sequence[int]], expected: Sequence[np.ndarray]
) -> LogitDifference:
    """Write `model.onnx`, with the inputs and outputs of `export.static_program`, and run it.

    Args:
        expected: the trained model's logits after every token of each prompt, each float32 [tokens, V].

    Raises:
        ModelFileError: the model is too large for an ONNX file, or the file computes other logits.
    """
    if 4 * decoder.config.parameter_count() > MAX_BYTES:
        raise ModelFileError(
            f"--format onnx: {4e-9 * decoder.config.parameter_count():.3g} GB of float32 weights do not fit into one "
            "ONNX file, whose limit is 2 GB.\n  Use --format inference."
        )
    description = ProgramDescription.of(decoder.config)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        save_program(decoder, Path(name))
        open_program(Path(name))  # raises if a full disk has cut the files off
        model = _convert(Path(name))
    (folder / ONNX_FILE).write_bytes(model)
    description.write(folder)
    return check_program(open_onnx(folder), description, prompts, expected)


def _convert(program: Path) -> bytes:
    """Return the ONNX file of the saved program in the folder `program`.

    Raises:
        ModelFileError: paddle2onnx cannot convert the program.
    """
    import paddle2onnx

    with _captured_output() as output:
        try:
            model = paddle2onnx.export(
                str(program / PROGRAM_FILE),
                str(program / PARAMETERS_FILE),
                save_file=None,
                opset_version=OPSET,
                verbose=False,
                optimize_tool="None",
            )
        except Exception as error:  # whatever it raises, its own report of the cause is in the output
            model, cause = None, str(error)
        else:
            cause = "it returned nothing"
    if not model:
        reports = [line for line in output if "ERROR" in line or "Error" in line or "not support" in line]
        raise ModelFileError(
            f"--format onnx: paddle2onnx could not convert the program: {(reports or [cause])[0].strip()}\n"
            "  Use --format inference."
        )
    return bytes(model)


@contextmanager
def _captured_output() -> Iterator[list[str]]:
    """Collect what the body, C++ code included, writes to standard output and standard error, line by line."""
    lines: list[str] = []
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [(descriptor, os.dup(descriptor)) for descriptor in (1, 2)]
    with tempfile.TemporaryFile() as file:
        try:
            for descriptor, _ in kept:
                os.dup2(file.fileno(), descriptor)
            yield lines
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, copy in kept:
                os.dup2(copy, descriptor)
                os.close(copy)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def open_onnx(folder: Path) -> Step:
    """Open an exported ONNX model on the CPU.

    Raises:
        ConfigurationError: onnxruntime is not installed.
        ModelFileError: the file is damaged, has changed since it was exported, or onnxruntime cannot run it.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        raise ConfigurationError(
            f"{folder / ONNX_FILE}: onnxruntime, which runs it, is not installed.\n"
            "  Install it: pip install 'erniekit[onnx]'"
        )
    import onnxruntime

    refuse_changed(folder, [ONNX_FILE])
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4  # its errors are raised, too
    path = folder / ONNX_FILE
    names = ProgramDescription.read(folder).input_names()
    # The exceptions of onnxruntime have no class in common.
    try:
        session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelFileError(f"{path}: cannot be opened; is the disk full? ({_first_line(error)})") from None

    def step(arrays: Arrays) -> list[np.ndarray]:
        try:
            return session.run(None, dict(zip(names, arrays, strict=True)))
        except Exception as error:
            raise ModelFileError(f"{path}: onnxruntime cannot run it: {_first_line(error)}") from None

    return step


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
