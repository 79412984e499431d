"""A saved program computes what the decoder computes, for every family, alone, in batches and token by token."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from erniekit.errors import ModelFileError
from erniekit.export.static_program import (
    ProgramDescription,
    generate_greedily,
    open_program,
    prefill,
    save_program,
)
from erniekit.inference.generation import generate
from erniekit.inference.sampling import Sampling
from tests.model.tiny import EXPERTS, logits_of, tiny_model

pytestmark = pytest.mark.slow

FAMILIES = {
    "ernie4_5": {},
    "ernie4_5, bias, untied": {"use_bias": True, "tie_word_embeddings": False},
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 1},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 4},
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 5},
}
PROMPTS = [[3], [5, 6, 7, 8, 9], list(range(20, 40))]


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES.keys())
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("program")
    decoder = tiny_model(**request.param)
    save_program(decoder, folder)
    return decoder, open_program(folder), ProgramDescription.read(folder)


def test_prefill_decoding_and_generation_agree_with_the_decoder(saved):
    decoder, step, description = saved
    batch = prefill(step, description, PROMPTS)[0]
    for prompt, logits in zip(PROMPTS, batch, strict=True):
        np.testing.assert_allclose(logits, logits_of(decoder, prompt)[-1], atol=1e-5)

    prompt, whole = PROMPTS[2], logits_of(decoder, PROMPTS[2])
    past, fed = description.empty_past(1), 0
    for length in (7, 1, 1, 4, 7):  # several new tokens behind cached ones are fine, too
        ids = np.array([prompt[fed : fed + length]])
        positions = np.arange(fed, fed + length)[None]
        fed += length
        last = np.array([length - 1])
        logits, *past = step([ids, positions, np.ones((1, fed), np.int64), last, *past])
        np.testing.assert_allclose(logits[0], whole[fed - 1], atol=1e-5)
    assert past[0].shape == (1, description.num_key_value_heads, 20, description.head_dim)

    expected = generate(decoder, PROMPTS, Sampling(max_new_tokens=30))
    assert len({tuple(answer) for answer in expected}) == 3
    assert generate_greedily(step, description, PROMPTS, 30) == expected


def test_padding_may_stand_anywhere(saved):
    decoder, step, description = saved
    prompt = PROMPTS[1]
    ids, mask = np.array([[0, 0, *prompt]]), np.array([[0, 0, *[1] * len(prompt)]])
    positions = np.array([[0, 0, *range(len(prompt))]])
    logits = step([ids, positions, mask, np.array([6]), *description.empty_past(1)])[0]
    np.testing.assert_allclose(logits[0], logits_of(decoder, prompt)[-1], atol=1e-5)


def test_generation_ends_at_a_stop_token_and_at_the_last_position(tmp_path: Path) -> None:
    decoder = tiny_model(max_position_embeddings=24)
    save_program(decoder, tmp_path)
    step, description = open_program(tmp_path), ProgramDescription.read(tmp_path)
    free = generate_greedily(step, description, PROMPTS, 100)
    assert free == generate(decoder, PROMPTS, Sampling(max_new_tokens=100))
    assert [len(answer) for answer in free] == [23, 19, 4]
    stops = (free[0][5],)
    stopped = generate(decoder, PROMPTS, Sampling(max_new_tokens=100, stop_token_ids=stops))
    assert generate_greedily(step, description, PROMPTS, 100, stops) == stopped != free


def test_a_decoder_still_computes_and_trains_after_it_was_recorded(tmp_path: Path) -> None:
    decoder = tiny_model()
    before = logits_of(decoder, PROMPTS[2])
    save_program(decoder, tmp_path)
    np.testing.assert_array_equal(logits_of(decoder, PROMPTS[2]), before)


def test_folders_without_a_program_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"model\.json or model\.pdiparams is missing"):
        open_program(tmp_path)
    (tmp_path / "inference_config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="not the description of a saved program"):
        ProgramDescription.read(tmp_path)


def test_a_program_is_saved_beside_paddlenlp(tmp_path):
    """paddlenlp exchanges paddle.to_tensor for a function of its own, at which Paddle's recording waited for itself."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, paddle\n"
        "from pathlib import Path\n"
        "given = paddle.to_tensor\n"
        "def to_tensor(*values, **options):\n"
        "    return given(*values, **options)\n"
        "paddle.to_tensor = to_tensor\n"
        "from erniekit.export.static_program import save_program\n"
        "from tests.model.tiny import tiny_model\n"
        "save_program(tiny_model(), Path(sys.argv[1]))\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, program, tmp_path], check=True, timeout=120, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert open_program(tmp_path)
