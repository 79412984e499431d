"""The decoder against transformers: documents in a row, positions far out, files. The rest is in test_families."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
import transformers

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.attention import AttentionPlan
from erniekit.model.builder import build_model
from erniekit.model.weights import save_model_folder

from .families import VOCABULARY
from .families import random_model as random_family_model

pytestmark = pytest.mark.parity


def random_model(seed=0, **shape):
    return random_family_model("ernie4_5", seed, **{"head_dim": 8, **shape})


def ours_from(model, tmp_path):
    model.save_pretrained(tmp_path / "theirs", safe_serialization=True)
    return build_model(ModelConfig.from_folder(tmp_path / "theirs"), tmp_path / "theirs")


def our_hidden(decoder, ids, ends):
    """Hidden states of rows of documents that end at `ends`."""
    length = len(ids)
    starts = [0, *ends[:-1]]
    positions = np.concatenate([np.arange(stop - start) for start, stop in zip(starts, ends, strict=True)])
    indices = np.repeat(ends, np.diff([0, *ends])).astype(np.int32).reshape(1, 1, length, 1)
    return decoder(paddle.to_tensor(ids[None]), paddle.to_tensor(positions[None]), AttentionPlan.build(indices))


def test_packed_documents_equal_separate_runs(tmp_path):
    theirs = random_model()
    ours = ours_from(theirs, tmp_path)
    ids = np.random.default_rng(2).integers(1, VOCABULARY, 300)
    packed = ours.head(our_hidden(ours, ids, [70, 300])).numpy()[0]
    with torch.no_grad():
        apart = [theirs(input_ids=torch.tensor(part[None])).logits[0].numpy() for part in (ids[:70], ids[70:])]
    np.testing.assert_allclose(packed, np.concatenate(apart), atol=1e-4)


def test_positions_far_out_agree(tmp_path):
    theirs = random_model(max_position_embeddings=131072)
    ours = ours_from(theirs, tmp_path)
    ids = np.random.default_rng(3).integers(1, VOCABULARY, (1, 20))
    positions = np.arange(100_000, 100_020)[None]
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(ids), position_ids=torch.tensor(positions)).logits.numpy()
    plan = AttentionPlan.build(np.full((1, 1, 20, 1), 20, np.int32))
    actual = ours.head(ours(paddle.to_tensor(ids), paddle.to_tensor(positions), plan)).numpy()
    np.testing.assert_allclose(actual, expected, atol=2e-3)


def test_what_we_save_as_one_file_loads_in_transformers(tmp_path):
    random_model().config.save_pretrained(tmp_path)
    ours = build_model(ModelConfig.from_folder(tmp_path), None, seed=5)
    save_model_folder(ours, tmp_path / "ours")
    theirs, info = transformers.Ernie4_5ForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    ids = np.random.default_rng(4).integers(1, VOCABULARY, (1, 40))
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(ours.head(our_hidden(ours, ids[0], [40])).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_load(dtype, tmp_path):
    theirs = random_model().to(dtype)
    ours = ours_from(theirs, tmp_path)
    ids = np.random.default_rng(5).integers(1, VOCABULARY, 30)
    # Read again, because .float() would keep rotary frequencies that .to(dtype) has rounded.
    theirs = transformers.Ernie4_5ForCausalLM.from_pretrained(tmp_path / "theirs", torch_dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(ids[None])).logits.numpy()
    np.testing.assert_allclose(ours.head(our_hidden(ours, ids, [30])).numpy(), expected, atol=1e-4)
