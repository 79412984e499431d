"""Attention by blocks equals attention under a dense mask, forward and backward, for every form of FlashMask.

The reference is written out here in double precision from the definition: scores, mask, softmax, values.
"""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.model import attention as attention_module
from erniekit.model import block_attention
from erniekit.model.attention import AttentionPlan, attention, dense_mask_bytes
from erniekit.model.attention_plan import masked_region, plan_blocks


def columns(*values):
    """[1, 1, S, n] from n lists of S numbers."""
    return np.stack([np.asarray(value, np.int32) for value in values], -1)[None, None]


def document_ends(lengths):
    return np.repeat(np.cumsum(lengths), lengths)


SLIDING = [min(10, column + 3) for column in range(10)]
FORMS = {
    # causal, one bound: the first row below that may not see the column
    "documents": (columns(document_ends([4, 3, 3])), True),
    "one document": (columns([10] * 10), True),
    "sliding window": (columns(SLIDING), True),
    "shared prompt, two answers": (columns([10] * 4 + [7] * 3 + [10] * 3), True),
    "padded tail": (columns([4] * 4 + [7] * 3 + [7] * 3), True),
    "everything masked": (columns([0] * 10), True),
    "one document per row": (np.concatenate([columns([6] * 6 + [10] * 4), columns([3] * 3 + [10] * 7)]), True),
    # causal, two bounds
    "blocks hidden from the middle": (columns([4] * 4 + [10] * 6, [7] * 4 + [10] * 6), True),
    "sparse keys": (columns([10, 10, 2, 3, 4, 5, 6, 7, 10, 10], [10, 10, 5, 5, 5, 5, 8, 8, 10, 10]), True),
    # not causal, two bounds
    "bidirectional documents": (columns(document_ends([4, 3, 3]), [0] * 4 + [4] * 3 + [7] * 3), False),
    "prefix documents": (columns([3, 3, 3, 5, 5, 10, 10, 10, 10, 10], [0, 0, 2, 3, 3, 5, 5, 7, 8, 9]), False),
    "nothing masked": (columns([10] * 10, [0] * 10), False),
    "documents of both kinds, padded tail": (
        columns([4] * 4 + [7] * 3 + [9] * 3, [0] * 4 + [4, 5, 6] + [7] * 2 + [9]),
        False,
    ),
    # not causal, four bounds
    "global and sliding": (
        columns([10, 10, 4, 5, 6, 7, 8, 9, 10, 10], [10] * 10, [0, 0] + [0] * 8, [0, 0, 0, 0, 3, 4, 5, 6, 7, 8]),
        False,
    ),
    "two holes": (columns([6] * 10, [8] * 10, [1] * 10, [3] * 10), False),
}


def reference(q, k, v, indices, causal):
    """[B, S, H, D] for float64 tensors, from a bool mask of the whole square."""
    heads = q.shape[2]
    k, v = (paddle.repeat_interleave(x, heads // x.shape[2], axis=2) for x in (k, v))
    q, k, v = (x.transpose([0, 2, 1, 3]) for x in (q, k, v))
    whole = slice(0, indices.shape[2])
    masked = np.stack([masked_region(row, causal, whole, whole) for row in indices])
    masked = np.repeat(masked, heads // masked.shape[1], axis=1)
    visible = paddle.to_tensor(~masked, "float64")
    scores = paddle.matmul(q, k, transpose_y=True) / q.shape[-1] ** 0.5
    weights = paddle.exp(scores) * visible  # scores of these tests are small
    total = weights.sum(-1, keepdim=True)
    probabilities = weights / (total + (total == 0).astype("float64"))
    return paddle.matmul(probabilities, v).transpose([0, 2, 1, 3])


@pytest.fixture(autouse=True)
def paddle_operators(monkeypatch):
    """These tests are of Paddle's operators, unless they say "native"; more of our kernel: test_native_attention.py."""
    monkeypatch.setattr(attention_module, "has_native_attention", lambda *_: False)


def run(indices, causal, *, heads=4, key_heads=2, how, dropout=0.0, seed=0, size=6):
    """Output and the gradients of q, k, v for random inputs; `how` is "blocks", "native", "dense" or "reference"."""
    dtype = "float64" if how == "reference" else "float32"
    rng = np.random.default_rng(seed)
    batch, _, length, _ = indices.shape
    q, k, v = (
        paddle.to_tensor(rng.standard_normal((batch, length, n, size)), dtype) for n in (heads, key_heads, key_heads)
    )
    weight = paddle.to_tensor(rng.standard_normal((batch, length, heads, size)), dtype)
    for tensor in (q, k, v):
        tensor.stop_gradient = False
    if how == "reference":
        out = reference(q, k, v, indices, causal)
    else:
        plan = AttentionPlan.build(indices, causal, dense=how == "dense")
        with patch.object(attention_module, "has_native_attention", lambda *_: how == "native"):
            out = attention(q, k, v, plan, dropout, key=(7, 1))
    (out * weight).sum().backward()
    return [tensor.numpy() for tensor in (out, q.grad, k.grad, v.grad)]


def assert_equal_to_reference(indices, causal, how="blocks", **heads):
    for name, ours, expected in zip(
        ("out", "dq", "dk", "dv"),
        run(indices, causal, how=how, **heads),
        run(indices, causal, how="reference", **heads),
        strict=True,
    ):
        np.testing.assert_allclose(ours, expected, atol=1e-5, err_msg=name)


@pytest.fixture(params=[(1, 3), (4, 5), (256, 128)], ids=["single tokens", "small tiles", "default tiles"])
def tiles(request, monkeypatch):
    """The same forms cut in different ways."""
    merge_below, tile = request.param

    def plan(indices, causal):
        return plan_blocks(indices, causal, tile=tile, merge_below=merge_below)

    monkeypatch.setattr(attention_module, "plan_blocks", plan)


@pytest.mark.parametrize(("indices", "causal"), FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (3, 1), (2, 2)], ids=["grouped", "one key head", "equal"])
def test_every_form_equals_the_definition(indices, causal, heads, key_heads, tiles):
    assert_equal_to_reference(indices, causal, heads=heads, key_heads=key_heads)


@pytest.mark.parametrize(("indices", "causal"), FORMS.values(), ids=FORMS.keys())
def test_the_dense_mask_equals_the_definition(indices, causal):
    assert_equal_to_reference(indices, causal, how="dense")


@pytest.mark.parametrize("mask_heads", [1, 2, 4], ids=["one mask", "a mask per key head", "a mask per query head"])
def test_masks_may_differ_between_heads(mask_heads, tiles):
    ends = [[4] * 4 + [10] * 6, [10] * 10, [7] * 7 + [10] * 3, [2, 2] + [10] * 8]
    indices = np.concatenate([columns(end) for end in ends[:mask_heads]], axis=1)
    assert_equal_to_reference(indices, True)
    assert_equal_to_reference(indices, True, how="dense")


def test_probabilities_may_be_computed_again(monkeypatch):
    monkeypatch.setattr(block_attention, "MAX_SAVED_SCORES", 0)
    for indices, causal in FORMS.values():
        assert_equal_to_reference(indices, causal)


@st.composite
def packs(draw, both_ways=False):
    """Documents in one or two rows of equal length, with a padded tail; with `both_ways`, some of them are read so."""
    length = draw(st.integers(1, 60))
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        borders = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=6))})
        ends = document_ends(np.diff(borders))
        tail = draw(st.integers(0, length))
        places = np.arange(length)
        ends = np.where(places >= tail, tail, np.minimum(ends, tail))
        if not both_ways:
            rows.append(columns(ends))
            continue
        lengths = np.diff(borders)
        kinds = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
        firsts = np.where(np.repeat(kinds, lengths), places, np.repeat(borders[:-1], lengths))
        rows.append(columns(ends, np.where(places >= tail, tail, firsts)))
    return np.concatenate(rows)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(packs(), st.integers(1, 30), st.integers(1, 40))
def test_packs_of_documents_equal_the_definition(indices, tile, merge_below):
    original = attention_module.plan_blocks
    attention_module.plan_blocks = lambda x, causal: original(x, causal, tile=tile, merge_below=merge_below)
    try:
        assert_equal_to_reference(indices, True)
    finally:
        attention_module.plan_blocks = original


@settings(max_examples=40, deadline=None, derandomize=True)
@given(packs(both_ways=True), st.integers(1, 30), st.integers(1, 40))
def test_packs_of_documents_that_are_read_both_ways_equal_the_definition(indices, tile, merge_below):
    original = attention_module.plan_blocks
    attention_module.plan_blocks = lambda x, causal: original(x, causal, tile=tile, merge_below=merge_below)
    try:
        assert_equal_to_reference(indices, False)
    finally:
        attention_module.plan_blocks = original


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_blocks_cover_exactly_what_is_visible(data):
    length = data.draw(st.integers(1, 12))
    causal = data.draw(st.booleans())
    width = data.draw(st.sampled_from([1, 2] if causal else [2, 4]))
    bound = st.integers(0, length)
    bounds = [data.draw(st.lists(bound, min_size=length, max_size=length)) for _ in range(width)]
    indices = columns(*bounds)
    # The dense mask here is written out from FlashMask's definition, row by row.
    expected = np.zeros((length, length), bool)
    for row in range(length):
        for column in range(length):
            b = [values[column] for values in bounds]
            if causal:
                hidden = row < column or (row >= b[0] if width == 1 else b[0] <= row < b[1])
            elif width == 2:
                hidden = row >= b[0] or row < b[1]
            else:
                hidden = b[0] <= row < b[1] or b[2] <= row < b[3]
            expected[row, column] = hidden
    whole = slice(0, length)
    np.testing.assert_array_equal(masked_region(indices[0], causal, whole, whole)[0], expected)
    blocks = plan_blocks(indices, causal, tile=3, merge_below=2)
    covered = np.ones((length, length), bool)
    borders = np.cumsum([0, *blocks.tile_lengths])
    for block in blocks.blocks:
        rows = slice(borders[block.query_tile], borders[block.query_tile + 1])
        keys = slice(borders[block.first_key_tile], borders[block.end_key_tile])
        covered[rows, keys] = masked_region(indices[0], causal, rows, keys)[0]
        if block.masked is not None:
            np.testing.assert_array_equal(block.masked[0], expected[rows, keys])
        elif not block.causal:
            assert not expected[rows, keys].any()
    np.testing.assert_array_equal(covered, expected)  # what no block covers is masked


def test_rows_that_see_nothing_are_exact_zeros_without_gradient():
    indices = columns([3] * 3 + [3] * 7)  # a document of 3, then padding
    out, dq, dk, dv = run(indices, True, how="blocks")
    for values in (out, dq, dk, dv):
        assert not values[:, 3:].any()
    assert out[:, :3].all()
    out, dq, _, _ = run(indices, True, how="dense")
    assert not out[:, 3:].any() and not dq[:, 3:].any()


@pytest.mark.parametrize("how", ["blocks", "native"])
def test_masked_keys_have_exactly_no_influence(how, monkeypatch, request):
    """Whatever a masked key holds; Paddle's softmax alone would leave it a probability of e^-64."""
    if how == "native":
        request.getfixturevalue("native_kernels")
        monkeypatch.setattr(attention_module, "has_native_attention", lambda *_: True)
    indices = columns(document_ends([3, 4]))
    q, k, v = (paddle.ones([1, 7, 2, 4]) for _ in range(3))
    v[:, 3:] = 1e30
    out = attention(q, k, v, AttentionPlan.build(indices)).numpy()
    np.testing.assert_array_equal(out[:, :3], np.ones((1, 3, 2, 4), np.float32))


def test_gradients_equal_finite_differences_in_double_precision():
    rng = np.random.default_rng(0)
    indices = columns(document_ends([5, 4]))
    plan = AttentionPlan.build(indices)
    values = [rng.standard_normal((1, 9, n, 2)) for n in (4, 2, 2)]
    weight = paddle.to_tensor(rng.standard_normal((1, 9, 4, 2)))

    def loss(arrays):
        tensors = [paddle.to_tensor(array, stop_gradient=False) for array in arrays]
        return (attention(*tensors, plan, dropout=0.3, key=(1, 2)) * weight).sum(), tensors

    total, tensors = loss(values)
    total.backward()
    for number, tensor in enumerate(tensors):
        for index in np.ndindex(*values[number].shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [array.copy() for array in values]
                moved[number][index] += step
                ends.append(float(loss(moved)[0]))
            assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(float(tensor.grad[index]), abs=1e-7)


def test_dropout_is_the_same_whatever_ran_before_and_unbiased():
    indices = columns(document_ends([30, 34]))
    first = run(indices, True, how="blocks", dropout=0.4)
    paddle.rand([5])
    again = run(indices, True, how="blocks", dropout=0.4)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    rng = np.random.default_rng(0)
    q, k, v = (paddle.to_tensor(rng.standard_normal((1, 64, 2, 4)), "float32") for _ in range(3))
    plan = AttentionPlan.build(indices)
    plain = attention(q, k, v, plan).numpy()
    mean = np.mean([attention(q, k, v, plan, 0.4, key=(n,)).numpy() for n in range(400)], axis=0)
    assert np.abs(first[0] - run(indices, True, how="blocks")[0]).max() > 0.1
    assert np.abs(mean - plain).max() < 0.3 and np.abs(mean - plain).mean() < 0.03


def test_the_dense_mask_has_the_announced_size():
    indices = np.concatenate([columns([5] * 5)] * 2)
    assert AttentionPlan.build(indices, dense=True).mask.numpy().nbytes == dense_mask_bytes(2, 5)


def test_work_follows_the_documents_not_the_pack():
    ends = document_ends([256] * 32)
    blocks = plan_blocks(columns(ends), True)
    assert blocks.score_count() == 32 * 256 * 256
    assert plan_blocks(columns([8192] * 8192), True).score_count() < 0.52 * 8192 * 8192
    window = plan_blocks(columns(np.minimum(np.arange(8192) + 100, 8192)), True)
    assert window.score_count() < 0.07 * 8192 * 8192


def test_masks_grow_with_a_document_not_with_its_square():
    def numbers(length):
        plan = AttentionPlan(causal=True, blocks=plan_blocks(columns([length] * length), True))
        return sum(mask.additive.size for mask in plan.block_masks(4, 2))

    assert numbers(4096) == 4 * numbers(1024)


def test_wrong_indices_are_named():
    with pytest.raises(ValueError, match="startend_row_indices must be"):
        AttentionPlan.build(np.zeros((1, 1, 4, 4), np.int32), causal=True)


def test_the_kernel_of_a_gpu_gets_the_same_indices(monkeypatch):
    """Without a GPU only the call can be checked: what goes in, and that float32 is rounded to bfloat16 around it."""
    calls = []

    def kernel(q, k, v, indices, dropout, causal):
        calls.append((q.dtype, indices.numpy(), dropout, causal))
        return q

    monkeypatch.setattr(attention_module, "has_flashmask_kernel", lambda: True)
    monkeypatch.setattr(attention_module.F, "flashmask_attention", kernel)
    indices, causal = FORMS["documents"]
    q = paddle.ones([1, 10, 4, 8])
    out = attention(q, paddle.ones([1, 10, 2, 8]), paddle.ones([1, 10, 2, 8]), AttentionPlan.build(indices), 0.25)
    ((dtype, given_indices, dropout, given_causal),) = calls
    assert (dtype, dropout, given_causal, out.dtype) == (paddle.bfloat16, 0.25, causal, paddle.float32)
    np.testing.assert_array_equal(given_indices, indices)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("window", [1, 3, 40, 300])
def test_a_windowed_plan_is_the_square_with_the_window_cut_out(window: int, dense: bool) -> None:
    ends, length = [5, 9, 300, 320], 330  # the last ten rows are padding
    starts = np.concatenate([[0], ends])
    indices = np.concatenate([np.repeat(ends, np.diff(starts)), np.full(length - 320, 320)])
    rng = np.random.default_rng(window)
    q, k, v = (rng.standard_normal((1, length, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    plan = AttentionPlan.build(indices.reshape(1, 1, -1, 1).astype(np.int32), dense=dense)
    found = plan.attend(*map(paddle.to_tensor, (q, k, v)), window=window).numpy()
    row, column = np.arange(length)[:, None], np.arange(length)[None]
    seen = (column <= row) & (row < indices[None]) & (row - column < window)
    scores = np.einsum("qhd,khd->hqk", q[0], np.repeat(k[0], 2, 1)) / np.sqrt(8)
    powers = np.where(seen, np.exp(scores - scores.max()), 0.0)
    shares = powers / np.maximum(powers.sum(-1, keepdims=True), 1e-30)
    expected = np.einsum("hqk,khd->qhd", shares, np.repeat(v[0], 2, 1))
    np.testing.assert_allclose(found[0], expected, atol=2e-5)
    assert plan.windowed(window) is plan.windowed(window) and (plan.windowed(300) is plan)


def test_a_window_refuses_answers_that_share_what_it_would_hide() -> None:
    """A document of three positions; a prompt of two with answers of two and three; one of four; padding."""
    ends = [3, 3, 3, 10, 10, 7, 7, 10, 10, 10, 14, 14, 14, 14, 14]
    plan = AttentionPlan.build(np.array(ends, np.int32).reshape(1, 1, -1, 1))
    assert plan.windowed(7) is plan
    with pytest.raises(AssertionError, match="share a prompt that is longer than the window"):
        plan.windowed(6)
    ends[5:7] = [10, 10]  # one answer only
    plan = AttentionPlan.build(np.array(ends, np.int32).reshape(1, 1, -1, 1))
    assert plan.windowed(3) is not plan


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_a_sink_takes_its_share_of_the_probabilities(window: int | None, dense: bool) -> None:
    """Against the definition: one more score in the softmax of each head, whose probability is dropped."""
    rng = np.random.default_rng(4)
    indices = np.concatenate([columns(document_ends([4, 3, 3])), columns([6] * 6 + [6] * 4)])  # the second is padded
    q, k, v = (paddle.to_tensor(rng.standard_normal((2, 10, heads, 6)), "float64") for heads in (4, 2, 2))
    sinks = paddle.to_tensor(rng.standard_normal(4), "float64")
    inputs = [q, k, v, sinks]
    for x in inputs:
        x.stop_gradient = False
    plan = AttentionPlan.build(indices, dense=dense)
    out = plan.attend(q, k, v, window=window, sinks_H=sinks)
    row, column = np.arange(10)[:, None], np.arange(10)[None]
    seen = (column <= row) & (row < indices[:, 0, :, 0][:, None]) & (row - column < (window or 10))
    mask = paddle.to_tensor(np.where(seen, 0.0, -np.inf))[:, None]
    keys, values = (x.repeat_interleave(2, axis=2).transpose([0, 2, 1, 3]) for x in (k, v))
    scores = paddle.matmul(q.transpose([0, 2, 1, 3]), keys, transpose_y=True) * 6**-0.5 + mask
    scores = paddle.concat([scores, sinks.reshape([1, 4, 1, 1]).expand([2, 4, 10, 1])], axis=-1)
    expected = paddle.matmul(paddle.nn.functional.softmax(scores)[..., :-1], values).transpose([0, 2, 1, 3])
    np.testing.assert_allclose(out.numpy(), expected.numpy(), atol=1e-12)
    weights = paddle.to_tensor(rng.standard_normal(out.shape), "float64")
    wanted = paddle.grad((expected * weights).sum(), inputs)
    for gradient, other in zip(paddle.grad((out * weights).sum(), inputs), wanted, strict=True):
        np.testing.assert_allclose(gradient.numpy(), other.numpy(), atol=1e-11)
