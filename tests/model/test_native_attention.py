"""The attention kernel in C equals the definition, forward and backward, for every form of FlashMask, on every path.

It keeps within its arrays, gives the same bits for any number of threads, and draws dropout again as it was drawn.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.distributed.fleet.utils import recompute

from erniekit.model import attention as attention_module
from erniekit.model import native_attention
from erniekit.model.attention import AttentionPlan, attention
from erniekit.model.attention_plan import masked_region
from erniekit.model.column_plan import COLUMN_TILE, plan_columns
from erniekit.native import library, openmp
from tests.model.test_attention import FORMS, columns, document_ends, run

NAMES = ("out", "dq", "dk", "dv")


pytestmark = pytest.mark.usefixtures("native_kernels")


def assert_equal_to_reference(indices, causal, **shape):
    found = run(indices, causal, how="native", **shape)
    expected = run(indices, causal, how="reference", **shape)
    for name, ours, other in zip(NAMES, found, expected, strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-5 * max(1.0, np.abs(other).max()), rtol=0, err_msg=name)


@pytest.mark.parametrize(("indices", "causal"), FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (3, 1), (2, 2)], ids=["grouped", "one key head", "equal"])
def test_every_form_equals_the_definition(indices, causal, heads, key_heads):
    assert_equal_to_reference(indices, causal, heads=heads, key_heads=key_heads)


def test_documents_that_are_read_both_ways_may_be_longer_than_tiles():
    ends, firsts = document_ends([200, 90, 10, 60]), [0] * 200 + list(range(200, 290)) + [290] * 10 + [300] * 60
    assert_equal_to_reference(columns(ends, firsts), False)


@pytest.mark.parametrize("size", [1, 8, 32, 40, 64, 72, 80, 96, 128, 192, 256])
def test_heads_of_any_size(size):
    indices = columns(document_ends([60, 3, 47]))
    assert_equal_to_reference(indices, True, heads=2, key_heads=1, size=size)


@pytest.mark.parametrize("mask_heads", [1, 2, 4], ids=["one mask", "a mask per key head", "a mask per query head"])
def test_masks_may_differ_between_heads(mask_heads):
    ends = [[40] * 40 + [100] * 60, [100] * 100, [70] * 70 + [100] * 30, [20, 20] + [100] * 98]
    indices = np.concatenate([columns(end) for end in ends[:mask_heads]], axis=1)
    assert_equal_to_reference(indices, True)


@pytest.mark.parametrize("length", [1, 47, 48, 49, 255, 300])
def test_tiles_and_chunks_of_any_length(length):
    """One document, and windows of 60 of it: tiles before, on and behind the diagonal."""
    column = np.arange(length)
    for end in (np.full(length, length), np.minimum(column + 60, length)):
        assert_equal_to_reference(columns(end), True, heads=2, key_heads=1, size=16)


@st.composite
def masks(draw):
    """Any of the four forms over one or two rows, with a mask for all heads, for each key head or each query head."""
    length, causal = draw(st.integers(1, 110)), draw(st.booleans())
    width = draw(st.sampled_from([1, 2] if causal else [2, 4]))
    shape = (draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 4])), length, width)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    if draw(st.booleans()):  # bounds that differ from key to key
        return rng.integers(0, length + 1, shape).astype(np.int32), causal
    steps = rng.integers(0, length + 1, (*shape[:2], 4, width))  # the same bounds for neighbouring keys
    return np.repeat(steps, -(-length // 4), axis=2)[:, :, :length].astype(np.int32), causal


@settings(max_examples=30, deadline=None, derandomize=True)
@given(masks())
def test_any_mask_equals_the_definition(mask):
    assert_equal_to_reference(*mask, size=8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(masks())
def test_columns_hide_exactly_what_is_masked(mask):
    indices, causal = mask
    batch, mask_heads, length, _ = indices.shape
    plan = plan_columns(indices, causal)
    whole = slice(0, length)
    expected = np.ones((mask_heads, batch * length, batch * length), bool)
    for number, row in enumerate(indices):
        own = slice(number * length, (number + 1) * length)
        expected[:, own, own] = masked_region(row, causal, whole, whole)
    hidden, query = np.ones_like(expected), np.arange(batch * length)[:, None]
    for tile, (first, tokens, segment_first, segment_end) in enumerate(plan.tiles):
        bounds = plan.bounds[:, tile]  # [Hm, 4, COLUMN_TILE]
        for start, end in ((0, 1), (2, 3)):
            np.testing.assert_array_equal(plan.extremes[:, tile, 0, start], bounds[:, start].min(-1))
            np.testing.assert_array_equal(plan.extremes[:, tile, 1, end], bounds[:, end].max(-1))
        first_query = plan.tiles[segment_first, 0]
        end_query = plan.tiles[segment_end - 1, :2].sum()
        b = bounds[:, :, None, :tokens]
        by_bounds = ((query >= b[:, 0]) & (query < b[:, 1])) | ((query >= b[:, 2]) & (query < b[:, 3]))
        seen = slice(first_query, end_query)
        hidden[:, seen, first : first + tokens] = by_bounds[:, seen]
    np.testing.assert_array_equal(hidden, expected)
    assert sorted(map(tuple, plan.segments)) == sorted({tuple(tile[2:]) for tile in plan.tiles})


def test_values_far_from_zero():
    """Scores of thousands, as the softmax of one of them needs them subtracted first."""
    rng = np.random.default_rng(0)
    q, k, v = (paddle.to_tensor(rng.standard_normal((1, 70, 2, 16)) * scale, "float32") for scale in (300, 30, 1))
    scores = np.einsum("qhd,khd->hqk", q.numpy()[0].astype(float), k.numpy()[0].astype(float)) / 4
    scores = np.where(np.tril(np.ones((70, 70), bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), v.numpy()[0])
    found = attention(q, k, v, AttentionPlan.build(columns([70] * 70))).numpy()[0]
    np.testing.assert_allclose(found, expected, atol=3e-3)  # float32 holds scores of thousands to 1e-3


def test_what_is_not_a_number_is_not_hidden():
    for name in range(3):
        inputs = [paddle.ones([1, 60, 1, 8]) for _ in range(3)]
        inputs[name][0, 50, 0, 3] = float("nan")
        out = attention(*inputs, AttentionPlan.build(columns(document_ends([40, 20])))).numpy()[0, :, 0]
        assert np.isnan(out[50]).any() and not np.isnan(out[:40]).any()


def test_rows_that_see_nothing_are_exact_zeros_without_gradient():
    out, dq, dk, dv = run(columns([3] * 3 + [3] * 67), True, how="native")
    for values in (out, dq, dk, dv):
        assert not values[:, 3:].any()
    assert out[:, :3].all()


def test_inputs_may_have_strides_and_need_no_gradient():
    plan = AttentionPlan.build(columns(document_ends([30, 34])))
    rng = np.random.default_rng(0)
    both = paddle.to_tensor(rng.standard_normal((1, 4, 64, 16)), "float32")
    k = paddle.to_tensor(rng.standard_normal((1, 64, 4, 8)), "float32", stop_gradient=False)
    strided = both.transpose([0, 2, 1, 3])[..., :8]
    out = attention(strided, k, k.detach(), plan)
    out.sum().backward()
    np.testing.assert_array_equal(out.numpy(), attention(paddle.to_tensor(strided.numpy()), k, k, plan).numpy())
    assert k.grad is not None and strided.grad is None


def dropout_mask(length, heads, probability, key):
    """Read the mask [H, S, S] from attention over values that are unit vectors."""
    q = paddle.zeros([1, length, heads, length])
    v = paddle.eye(length).reshape([1, length, 1, length])
    plan = AttentionPlan.build(columns([length] * length, [0] * length), causal=False)
    shares = attention(q, paddle.zeros_like(v), v, plan, probability, key).numpy()[0]
    return shares.transpose(1, 0, 2) * length


def test_dropout_drops_by_chance_and_scales_what_it_keeps():
    mask = dropout_mask(200, 4, 0.25, (3, 5))
    kept = mask > 0
    np.testing.assert_allclose(mask[kept], 4 / 3, rtol=1e-5)
    assert abs(kept.mean() - 0.75) < 0.005
    for axis in range(3):  # as often in every head, for every query and for every key
        others = tuple({0, 1, 2} - {axis})
        spread = np.sqrt(0.75 * 0.25 / (kept.size / kept.shape[axis]))
        assert np.abs(kept.mean(others) - 0.75).max() < 5 * spread
    flat = kept.astype(float) - 0.75
    neighbours = [
        (flat[1:] * flat[:-1]).mean(),
        (flat[:, 1:] * flat[:, :-1]).mean(),
        (flat[..., 1:] * flat[..., :-1]).mean(),
    ]
    assert np.abs(neighbours).max() < 5 * 0.1875 / np.sqrt(kept.size)
    assert (dropout_mask(200, 4, 0.25, (3, 6)) > 0).astype(float).mean() != kept.mean()
    np.testing.assert_array_equal(dropout_mask(200, 4, 0.25, (3, 5)), mask)


def test_backward_uses_the_mask_of_forward():
    length, size, key = 64, 64, (3, 5)
    mask = paddle.to_tensor(dropout_mask(length, 2, 0.4, key), "float64")
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, length, heads, size)) for heads in (2, 1, 1, 2)]
    q, k, v, weight = (paddle.to_tensor(array, "float64", stop_gradient=False) for array in arrays)
    scores = paddle.einsum("qhd,kd->hqk", q[0], k[0, :, 0]) / size**0.5
    causal = paddle.to_tensor(np.where(np.tril(np.ones((length, length))), 0.0, -np.inf))
    expected = paddle.einsum("hqk,kd->qhd", paddle.nn.functional.softmax(scores + causal) * mask, v[0, :, 0])
    wanted = [expected.unsqueeze(0), *paddle.grad((expected * weight[0]).sum(), [q, k, v])]
    q, k, v, weight = (paddle.to_tensor(array, "float32", stop_gradient=False) for array in arrays)
    out = attention(q, k, v, AttentionPlan.build(columns([length] * length)), 0.4, key)
    found = [out, *paddle.grad((out * weight).sum(), [q, k, v])]
    for name, ours, other in zip(NAMES, found, wanted, strict=True):
        np.testing.assert_allclose(ours.numpy(), other.numpy(), atol=3e-5, err_msg=name)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_gives_the_same_bits(use_reentrant):
    plan = AttentionPlan.build(columns(document_ends([60, 40])))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 100, heads, 16)).astype(np.float32) for heads in (4, 2, 2)]

    def gradients(again):
        inputs = [paddle.to_tensor(array, stop_gradient=False) for array in arrays]

        def core(q, k, v):
            return attention(q, k, v, plan, 0.3, key=(1, 2))

        out = (
            recompute(core, *inputs, use_reentrant=use_reentrant, preserve_rng_state=False) if again else core(*inputs)
        )
        (out**2).sum().backward()
        return [out, *(x.grad for x in inputs)]

    for ours, other in zip(gradients(True), gradients(False), strict=True):
        np.testing.assert_array_equal(ours.numpy(), other.numpy())


def test_any_number_of_threads_gives_the_same_bits():
    answers = []
    for count in (1, 2, 5):
        with openmp.threads(count):
            answers.append(run(columns(document_ends([200, 3, 150])), True, how="native", dropout=0.2))
    for other in answers[1:]:
        for ours, expected in zip(other, answers[0], strict=True):
            np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("size", [7, 24, 64])
def test_every_path_keeps_within_its_arrays(size):
    """Values behind inputs are not a number, values behind outputs stay what they are."""
    heads, key_heads, length, behind = 4, 2, 130, 64
    indices = np.concatenate([columns(document_ends([100, 30])), columns(document_ends([17, 113]))])
    plan, tokens = plan_columns(indices, True), 2 * length
    expected = run(indices, True, how="reference", size=size)

    def guarded(count, values=None):
        array = np.full(count + behind, np.nan if values is not None else 7.0, np.float32)
        array[:count] = 7.0 if values is None else values.reshape(-1)
        return array

    rng = np.random.default_rng(0)  # the draws of `run`
    shapes = [(2, length, n, size) for n in (heads, key_heads, key_heads, heads)]
    q, k, v, grad = (guarded(np.prod(shape), rng.standard_normal(shape)) for shape in shapes)
    positions = len(plan.tiles) * COLUMN_TILE
    width = -(-size // 16) * 16
    for path in library.processor_paths():
        kernels = library._open(path).library
        out, lse = guarded(tokens * heads * size), guarded(tokens * heads)
        dq, dk, dv = (guarded(tokens * n * size) for n in (heads, key_heads, key_heads))
        works = [
            guarded(positions * key_heads * (size + width)),
            guarded(positions * (2 * key_heads * size + (key_heads + 2 * heads) * width)),
        ]
        arguments = [tokens, heads, key_heads, 1, size, len(plan.tiles)]
        arguments += [array.ctypes.data for array in (plan.tiles, plan.bounds, plan.extremes)] + [0, 0]
        arguments += [array.ctypes.data for array in (q, k, v)]
        last = [array.ctypes.data for array in (out, lse, grad)]
        ends = [len(plan.segments), *(array.ctypes.data for array in (plan.segments, dq, dk, dv))]
        for name, letters, values in (
            ("attention_forward", native_attention._FORWARD, [*arguments, works[0].ctypes.data, *last[:2]]),
            ("attention_backward", native_attention._BACKWARD, [*arguments, works[1].ctypes.data, *last, *ends]),
        ):
            library._function(kernels, name, letters)(*values)
        for array in (out, lse, dq, dk, dv, *works):
            np.testing.assert_array_equal(array[-behind:], np.full(behind, 7, np.float32))
        for name, ours, other in zip(NAMES, (out, dq, dk, dv), expected, strict=True):
            np.testing.assert_allclose(ours[:-behind], other.reshape(-1), atol=2e-5, err_msg=f"{path}: {name}")


def test_a_plan_of_other_rows_is_refused():
    x = paddle.ones([1, 7, 2, 4])
    with pytest.raises(ValueError, match="the plan covers 10 tokens, the queries 7"):
        attention(x, x, x, AttentionPlan.build(columns([10] * 10)))


def test_other_types_and_larger_heads_go_to_paddles_operators(monkeypatch):
    monkeypatch.setattr(attention_module, "native_attention", lambda *_: pytest.fail("the kernel was called"))
    plan = AttentionPlan.build(columns([3] * 3))
    for shape, dtype in (((1, 3, 1, 8), "float64"), ((1, 3, 1, 264), "float32")):
        assert attention(*[paddle.ones(shape, dtype)] * 3, plan).shape == list(shape)
