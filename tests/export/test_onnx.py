"""An ONNX file computes what the decoder computes, for every family; what cannot be converted or run is told."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import paddle2onnx
import pytest

from erniekit.errors import ModelFileError
from erniekit.export.onnx import ONNX_FILE, open_onnx, write_onnx
from erniekit.export.static_program import ProgramDescription, generate_greedily
from erniekit.inference.generation import generate
from erniekit.inference.sampling import Sampling
from tests.export.test_static_program import FAMILIES, PROMPTS
from tests.model.tiny import logits_of, tiny_model

pytestmark = pytest.mark.slow


def write(folder: Path, **changes):
    decoder = tiny_model(**changes)
    difference = write_onnx(decoder, folder, PROMPTS, [logits_of(decoder, prompt) for prompt in PROMPTS])
    return decoder, difference


IN_THE_PLAIN_RUN = ("ernie4_5", "qwen3", "ernie4_5_moe")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=[pytest.mark.exhaustive] * (name not in IN_THE_PLAIN_RUN))
        for name, changes in FAMILIES.items()
    ],
)
def test_every_family_generates_what_the_decoder_generates(changes, tmp_path: Path, capfd) -> None:
    decoder, difference = write(tmp_path, **changes)
    assert difference.largest < 1e-4
    step, description = open_onnx(tmp_path), ProgramDescription.read(tmp_path)
    expected = generate(decoder, PROMPTS, Sampling(max_new_tokens=30))
    assert generate_greedily(step, description, PROMPTS, 30) == expected
    said = capfd.readouterr()
    assert "Paddle2ONNX" not in said.out + said.err and "onnxruntime" not in said.out + said.err


def test_a_program_that_cannot_be_converted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments, **options):
        os.write(1, b"[ERROR] the operator pd_op.mystery is not supported\n")
        raise UnboundLocalError("onnx_model_str")  # as paddle2onnx does

    monkeypatch.setattr(paddle2onnx, "export", fail)
    with pytest.raises(ModelFileError, match=r"could not convert the program: .*pd_op\.mystery.*\n.*inference"):
        write(tmp_path)
    monkeypatch.setattr(paddle2onnx, "export", lambda *arguments, **options: None)
    with pytest.raises(ModelFileError, match="it returned nothing"):
        write(tmp_path)


def test_a_file_that_cannot_be_opened_or_run_is_told(tmp_path: Path) -> None:
    write(tmp_path)
    step, description = open_onnx(tmp_path), ProgramDescription.read(tmp_path)
    arrays = [np.zeros((1, 1), np.float32)] * 4
    with pytest.raises(ModelFileError, match=rf"{ONNX_FILE}: onnxruntime cannot run it"):
        step([*arrays, *description.empty_past(1)])
    path = tmp_path / ONNX_FILE
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelFileError, match="is the disk full"):
        open_onnx(tmp_path)
