"""The split quantizer against its definition in NumPy."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from safetensors.numpy import save_file

from erniekit.codecs.split_quantizer import ACOUSTIC, SEMANTIC, SplitQuantizerSizes, read_split_quantizer
from erniekit.codecs.weights import CodecWeights

FRAMES, SIZE, ENTRIES = 9, 3, 5
SIZES = SplitQuantizerSizes(SIZE, ENTRIES, SIZE, num_quantizers=3, num_semantic_quantizers=1)


@pytest.fixture
def tables(tmp_path):
    """Write the three codebooks and return them."""
    rng = np.random.default_rng(5)
    paths = [f"{SEMANTIC}.layers.0", f"{ACOUSTIC}.layers.0", f"{ACOUSTIC}.layers.1"]
    sums = {f"{path}.codebook.embed_sum": rng.normal(size=(ENTRIES, SIZE)).astype(np.float32) for path in paths}
    counts = {f"{path}.codebook.cluster_usage": np.float32([1, 2, 3, 0, 4]) for path in paths}
    save_file({**sums, **counts}, tmp_path / "model.safetensors")
    divisors = np.maximum(np.float32([1, 2, 3, 0, 4]), np.float32(1e-5))[:, None]  # an entry that stood for nothing
    return [table / divisors for table in sums.values()]


def nearest(x, table):
    return np.square(x[:, None] - table).sum(2).argmin(1)


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_acoustic_levels_quantize_the_states_and_not_what_the_semantic_one_left(levels, tables, tmp_path):
    x = np.random.default_rng(6).normal(size=(FRAMES, SIZE)).astype(np.float32)
    semantic, first = nearest(x, tables[0]), nearest(x, tables[1])
    assert (nearest(x - tables[0][semantic], tables[1]) != first).any()  # what a single residual quantizer would do
    expected = [semantic, first, nearest(x - tables[1][first], tables[2])]
    quantizer = read_split_quantizer(CodecWeights(tmp_path), SIZES, levels)
    codes = quantizer.encode(paddle.to_tensor(x.T[None])).numpy()
    np.testing.assert_array_equal(codes, expected[:levels])
    for fewer in range(1, levels + 1):
        states = sum(table[level] for table, level in zip(tables[:fewer], codes[:fewer], strict=True))
        decoded = quantizer.decode(paddle.to_tensor(codes[:fewer])).numpy()
        np.testing.assert_allclose(decoded, states.T[None], rtol=1e-6, atol=1e-6)
