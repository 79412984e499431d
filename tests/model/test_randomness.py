from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.model.randomness import MaskStream, Randomness, Site, dropout


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_masks_keep_the_expected_share_and_scale(probability):
    mask = MaskStream((1, 2), probability).next([200, 300]).numpy()
    assert (mask == 0).mean() == pytest.approx(probability, abs=0.01)
    assert mask.mean() == pytest.approx(1.0, abs=0.02)
    assert len(np.unique(mask)) == 2


def test_a_stream_can_be_drawn_again_and_moves_on():
    first, second = MaskStream((5, 6), 0.5), MaskStream((5, 6), 0.5)
    a, b = first.next([31]).numpy(), first.next([31]).numpy()
    np.testing.assert_array_equal(a, second.next([31]).numpy())
    assert (a != b).any()


def test_every_part_of_the_place_changes_the_key():
    randomness = Randomness(seed=1)
    randomness.set(step=2, micro_batch=3)
    keys = {randomness.key(layer, site) for layer in range(3) for site in Site}
    randomness.set(step=3, micro_batch=2)
    keys |= {randomness.key(layer, site) for layer in range(3) for site in Site}
    assert len(keys) == 2 * 3 * len(Site)


def test_ranks_that_divide_a_step_draw_what_one_process_draws():
    def keys(randomness, count):
        for number in range(count):
            randomness.set(step=4, micro_batch=number)
            yield randomness.key(1, Site.MLP_OUTPUT)

    ranks = [list(keys(Randomness(5, reader, 3), 2)) for reader in range(3)]
    assert [ranks[number % 3][number // 3] for number in range(6)] == list(keys(Randomness(5), 6))


def test_dropout_scales_gradients_by_the_same_mask():
    x = paddle.ones([50, 4])
    x.stop_gradient = False
    out = dropout(x, 0.4, (1, 2, 3))
    out.sum().backward()
    np.testing.assert_array_equal(out.numpy(), x.grad.numpy())
    assert dropout(x, 0.0, (1,)) is x
