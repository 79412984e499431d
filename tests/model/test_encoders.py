"""The audio encoder and the projectors against the same formulas in NumPy, float64, and what `embed` does with them."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from erniekit.model.architectures.audio_encoder import sinusoids
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.storage.safetensors import write_safetensors
from erniekit.model.storage.shards import open_weight_files
from erniekit.model.weights import named_weights, save_model_folder

from .tiny import audio_arrays, pack, tiny_config, tiny_model

HEAD, EMBEDDING = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
FAMILIES = ("voxtral", "qwen2_audio")
FRAMES = {"voxtral": [24, 24, 5], "qwen2_audio": [26, 7, 3]}
_erf = np.vectorize(math.erf)


def gelu(x):
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def norm(x, weights, path):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * weights[f"{path}.weight"] + weights[f"{path}.bias"]


def linear(x, weights, path):
    return x @ weights[f"{path}.weight"].T + weights.get(f"{path}.bias", 0.0)


def convolution(x_MT, weights, path, stride):
    padded = np.pad(x_MT, ((0, 0), (1, 1)))
    kernel_HM3 = weights[f"{path}.weight"]
    starts = range(0, x_MT.shape[1], stride)
    columns = [np.einsum("hmk,mk->h", kernel_HM3, padded[:, start : start + 3]) for start in starts]
    return np.stack(columns, 1) + weights[f"{path}.bias"][:, None]


def attention(x_SH, weights, path, heads, seen):
    size = x_SH.shape[1] // heads
    q, k, v = (linear(x_SH, weights, f"{path}.{name}_proj") for name in "qkv")
    outputs = []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        scores = q[:, part] @ k[:seen, part].T / math.sqrt(size)
        probabilities = np.exp(scores - scores.max(-1, keepdims=True))
        outputs.append(probabilities / probabilities.sum(-1, keepdims=True) @ v[:seen, part])
    return linear(np.concatenate(outputs, 1), weights, f"{path}.out_proj")


def encoded(config, weights, features_MT, frames):
    """The hidden states [tokens, H] of one window."""
    sizes, pools = config.own["audio_config"], config.model_type == "qwen2_audio"
    tower = {name.removeprefix("audio_tower."): value for name, value in weights.items()}
    x = gelu(convolution(gelu(convolution(features_MT, tower, "conv1", 1)), tower, "conv2", 2)).T
    x = x + tower["embed_positions.weight"]
    seen = (frames - 1) // 2 + 1 if pools else len(x)
    for layer in range(sizes.num_hidden_layers):
        path = f"layers.{layer}"
        normed = norm(x, tower, f"{path}.self_attn_layer_norm")
        x = x + attention(normed, tower, f"{path}.self_attn", sizes.num_attention_heads, seen)
        inner = gelu(linear(norm(x, tower, f"{path}.final_layer_norm"), tower, f"{path}.fc1"))
        x = x + linear(inner, tower, f"{path}.fc2")
    if pools:
        whole = len(x) // 2 * 2
        x = norm((x[0:whole:2] + x[1:whole:2]) / 2, tower, "layer_norm")
        return linear(x, weights, "multi_modal_projector.linear")
    x = norm(x, tower, "layer_norm").reshape(-1, sizes.intermediate_size)
    return linear(gelu(linear(x, weights, "multi_modal_projector.linear_1")), weights, "multi_modal_projector.linear_2")


def stored_weights(decoder):
    """Every weight as files have it, float64."""
    is_linear = decoder.config.architecture.is_linear
    arrays = {name: weight.numpy().astype(np.float64) for name, weight in named_weights(decoder).items()}
    return {name: values.T if is_linear(name) else values for name, values in arrays.items()}


def heard(family):
    """A tiny model, ids with the tokens of three windows, and the arrays beside them."""
    decoder = tiny_model(model_type=family)
    audio = decoder.config.architecture.audio(decoder.config)
    counts = [audio.tokens_of(frames) for frames in FRAMES[family]]
    ids = [3, *[0] * (counts[0] + counts[1]), 5, *[0] * counts[2], 7, 9]
    shape = (len(counts), audio.mel_bins, audio.window_frames)
    features = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    return decoder, np.array(ids), features, audio_arrays(decoder.config, ids, features, FRAMES[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_states_stand_at_their_tokens(family):
    decoder, ids, features, arrays = heard(family)
    embeddings = decoder.embed({"input_ids": paddle.to_tensor(ids[None]), **arrays}).numpy()[0]
    weights, audio = stored_weights(decoder), decoder.config.architecture.audio(decoder.config)
    windows = zip(features.astype(np.float64), FRAMES[family], strict=True)
    states = [encoded(decoder.config, weights, window, frames)[: audio.tokens_of(frames)] for window, frames in windows]
    expected = weights["language_model.model.embed_tokens.weight"][ids]
    expected[ids == audio.placeholder_id] = np.concatenate(states)
    assert np.std(expected[ids == audio.placeholder_id]) > 0.1
    np.testing.assert_allclose(embeddings, expected, atol=2e-5)


def test_the_shape_of_an_encoder_is_told():
    voxtral = tiny_config(model_type="voxtral")
    told = voxtral.architecture.audio(voxtral)
    assert told[:4] == (0, 5, 24, 3) and [told.tokens_of(frames) for frames in (1, 24)] == [3, 3]
    qwen = tiny_config(model_type="qwen2_audio")
    told = qwen.architecture.audio(qwen)
    assert told[:4] == (0, 5, 26, 6)
    assert [told.tokens_of(frames) for frames in (1, 2, 3, 6, 7, 25, 26)] == [0, 0, 1, 1, 2, 6, 6]
    published = ModelConfig.from_json({"model_type": "voxtral", "audio_token_id": 24})
    assert published.architecture.audio(published)[:4] == (24, 128, 3000, 375)


@pytest.mark.parametrize("family", FAMILIES)
def test_frames_beyond_the_sound_change_nothing_where_they_are_masked(family):
    decoder, ids, features, arrays = heard(family)
    positions = pack(ids, [len(ids)])
    before = decoder(*positions, **arrays).numpy()
    features[2, :, 8:] += 1.0  # the second convolution of the last frame of sound sees three further ones
    changed = decoder(*positions, **{**arrays, "audio_features": paddle.to_tensor(features)}).numpy()
    assert np.array_equal(before, changed) == (family == "qwen2_audio")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_without_a_recording_has_plain_embeddings(family, monkeypatch):
    decoder, ids, features, arrays = heard(family)
    without = paddle.full_like(arrays["audio_states"], -1)
    empty = {"audio_features": paddle.to_tensor(features[:0]), "audio_frames": arrays["audio_frames"][:0]}
    inputs = {"input_ids": paddle.to_tensor(ids[None])}
    expected = decoder.embedding(inputs["input_ids"]).numpy()
    embeddings = decoder.embed({**inputs, **empty, "audio_states": without})
    np.testing.assert_array_equal(embeddings.numpy(), expected)
    embeddings.sum().backward()
    of_towers = [weight.grad for tower in decoder.towers for weight in tower.parameters() if not weight.stop_gradient]
    assert all(gradient is not None and not gradient.numpy().any() for gradient in of_towers)
    monkeypatch.setattr(type(decoder.towers[0]), "forward", None)
    np.testing.assert_array_equal(decoder.embed(inputs).numpy(), expected)  # as in the prefill of a text


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_all_but_the_positions_and_the_embeddings_that_were_replaced(family):
    decoder, ids, _, arrays = heard(family)
    decoder.head(decoder(*pack(ids, [len(ids)]), **arrays)).square().mean().backward()
    gradients = {name: weight.grad for name, weight in named_weights(decoder).items()}
    assert [name for name, gradient in gradients.items() if gradient is None] == ["audio_tower.embed_positions.weight"]
    by_token = np.abs(gradients["language_model.model.embed_tokens.weight"].numpy()).max(1)
    assert by_token[0] == 0 and by_token[[3, 5, 7, 9]].all()
    assert all(np.abs(gradient.numpy()).max() > 0 for gradient in gradients.values() if gradient is not None)


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_embeddings_are_written_as_the_head_too_and_read_without_it(family, tmp_path):
    decoder = tiny_model(model_type=family, tie_word_embeddings=True)
    weights = named_weights(decoder)
    assert HEAD not in weights
    save_model_folder(decoder, tmp_path, max_shard_bytes=9_000)
    stored = open_weight_files(tmp_path)
    np.testing.assert_array_equal(stored[HEAD].read(HEAD), weights[EMBEDDING].numpy())
    again = named_weights(build_model(ModelConfig.from_folder(tmp_path), tmp_path))
    assert all(np.array_equal(weight.numpy(), weights[name].numpy()) for name, weight in again.items())

    without = {name: stored[name].read(name) for name in stored if name != HEAD}
    for file in tmp_path.glob("model*"):
        file.unlink()
    shapes = {name: values.shape for name, values in without.items()}
    write_safetensors(tmp_path / "model.safetensors", shapes, without.items(), {"format": "pt"})
    again = named_weights(build_model(ModelConfig.from_folder(tmp_path), tmp_path))
    assert all(np.array_equal(weight.numpy(), weights[name].numpy()) for name, weight in again.items())


def test_random_models_begin_with_sines_for_positions_and_with_plain_norms(tmp_path):
    config = tiny_config(model_type="voxtral")
    decoder = build_model(config, None, seed=3)
    weights = {name: weight.numpy() for name, weight in named_weights(decoder).items()}
    positions = weights["audio_tower.embed_positions.weight"] / np.float32(config.initializer_range)
    np.testing.assert_allclose(positions, sinusoids(positions.shape), rtol=1e-6)
    expected = [np.sin(5), np.sin(5e-4), np.cos(5), np.cos(5e-4)]
    np.testing.assert_allclose(positions[5, [0, 11, 12, 23]], expected, rtol=1e-5)
    assert (weights["audio_tower.layers.1.final_layer_norm.weight"] == 1).all()
    assert not weights["audio_tower.conv2.bias"].any() and weights["audio_tower.conv2.weight"].std() > 0.01
    save_model_folder(decoder, tmp_path)
    again = build_model(ModelConfig.from_folder(tmp_path), tmp_path)
    assert all(np.array_equal(weight.numpy(), weights[name]) for name, weight in named_weights(again).items())
