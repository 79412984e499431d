"""The loss of a model that listens: packed documents are single ones, and the order of windows does not matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from erniekit.data.batch import Batch
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.weights import named_weights
from erniekit.training.objectives.objective import supervised
from tests.model.tiny_audio import FAMILIES, LENGTH, audio_batch, audio_config

FIXED = "audio_tower.embed_positions.weight"


def packed(batch: Batch) -> Batch:
    """Put both rows, which are full, into one."""
    ends = np.concatenate([np.full(LENGTH, LENGTH), np.full(LENGTH, 2 * LENGTH)]).astype(np.int32)
    arrays = {name: array.reshape([1, -1]) for name, array in batch.arrays.items() if array.shape == batch.shape}
    arrays["startend_row_indices"] = ends[None, None, :, None]
    rest = {name: array for name, array in batch.arrays.items() if name not in arrays}
    return Batch({**arrays, **rest}, ((0, 1),), batch.token_count, batch.target_count)


def reordered(batch: Batch, config: ModelConfig) -> Batch:
    """Give the windows in another order."""
    assert config.architecture.audio is not None
    size = config.architecture.audio(config).window_tokens
    states, last = batch.arrays["audio_states"], len(batch.arrays["audio_frames"]) - 1
    windows, state = states // size, states % size
    return batch.with_arrays(
        audio_features=batch.arrays["audio_features"][::-1].copy(),
        audio_frames=batch.arrays["audio_frames"][::-1].copy(),
        audio_states=np.where(states < 0, -1, (last - windows) * size + state),
    )


def loss_and_gradients(config: ModelConfig, batch: Batch) -> tuple[float, dict[str, Any]]:
    model = build_model(config, None, seed=5)
    loss = supervised().loss(model, batch).loss_sum
    loss.backward()
    return float(loss), {name: w.grad.numpy() for name, w in named_weights(model).items() if name != FIXED}


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_of_a_batch_that_change_nothing(family: str) -> None:
    config = audio_config(family)
    batch = audio_batch(config, 2, 3)
    loss, gradients = loss_and_gradients(config, batch)
    for other in (packed(batch), reordered(batch, config)):
        found, of = loss_and_gradients(config, other)
        assert found == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(of[name], gradient, atol=1e-5 * max(1, np.abs(gradient).max()), err_msg=name)
    assert np.abs(gradients["audio_tower.conv1.weight"]).max() > 1e-3
