"""Export a trained model as ONNX with paddle2onnx and check it with onnxruntime. Both packages are optional."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Sequence
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
    os.environ["POLYGRAPHY_AUTOINSTALL_DEPS"] = "0"  # paddle2onnx would install packages while it runs
    import paddle2onnx

    description = ProgramDescription.of(decoder.config)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        save_program(decoder, Path(name))
        open_program(Path(name))  # raises if a full disk has cut the files off
        program, parameters = Path(name, PROGRAM_FILE), Path(name, PARAMETERS_FILE)
        paddle2onnx.export(str(program), str(parameters), str(folder / ONNX_FILE), opset_version=OPSET, verbose=False)
    if not (folder / ONNX_FILE).is_file():
        raise ModelFileError("--format onnx: paddle2onnx could not convert the program; use --format inference")
    description.write(folder)
    return check_program(open_onnx(folder), description, prompts, expected)


def open_onnx(folder: Path) -> Step:
    """Open an exported ONNX model on the CPU.

    Raises:
        ModelFileError: the file is damaged, or has changed since it was exported.
    """
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidProtobuf

    refuse_changed(folder, [ONNX_FILE])
    try:
        session = onnxruntime.InferenceSession(str(folder / ONNX_FILE), providers=["CPUExecutionProvider"])
    except (Fail, InvalidProtobuf) as error:
        raise ModelFileError(f"{folder / ONNX_FILE}: cannot be opened; is the disk full? ({error})") from None
    names = ProgramDescription.read(folder).input_names()

    def step(arrays: Arrays) -> list[np.ndarray]:
        return session.run(None, dict(zip(names, arrays, strict=True)))

    return step
