"""The decoder against transformers' Ernie4_5ForCausalLM: logits, gradients and files."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import paddle  # noqa: E402

from erniekit.model.attention import AttentionPlan  # noqa: E402
from erniekit.model.builder import build_model  # noqa: E402
from erniekit.model.configuration import ModelConfig  # noqa: E402
from erniekit.model.head import token_loss  # noqa: E402
from erniekit.model.weights import is_transposed, named_weights, save_model_folder  # noqa: E402

pytestmark = pytest.mark.parity

SHAPES = {
    "grouped queries, tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "one key head, untied": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "as many key heads, bias": {"num_key_value_heads": 4, "use_bias": True, "tie_word_embeddings": True},
    "odd head size": {"num_key_value_heads": 2, "head_dim": 18, "use_bias": True, "tie_word_embeddings": False},
    "three layers, other theta": {"num_hidden_layers": 3, "rope_theta": 10000.0, "rms_norm_eps": 1e-3},
}
VOCABULARY = 61


def random_model(seed=0, **shape):
    """A transformers model whose weights are large enough, and whose norms uneven enough, for errors to show."""
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        **shape,
    }
    torch.manual_seed(seed)
    model = transformers.Ernie4_5ForCausalLM(transformers.Ernie4_5Config(**values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.4, 1.8)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            else:
                parameter.normal_(0.0, 0.25)
    return model.eval()


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


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_and_gradients_agree(shape, tmp_path):
    theirs = random_model(**shape)
    ours = ours_from(theirs, tmp_path)
    rng = np.random.default_rng(1)
    # transformers gives the padding token's embedding no gradient, so it is left out of the inputs.
    ids = rng.integers(1, VOCABULARY, (1, 150))
    labels = np.where(rng.random((1, 150)) < 0.3, -100, rng.integers(0, VOCABULARY, (1, 150)))

    their_logits = theirs(input_ids=torch.tensor(ids)).logits
    torch.nn.functional.cross_entropy(their_logits[0], torch.tensor(labels[0]), reduction="sum").backward()
    hidden = our_hidden(ours, ids[0], [150])
    our_logits = ours.head(hidden).numpy()
    token_loss(ours, hidden, paddle.to_tensor(labels)).loss_sum.backward()

    assert np.std(our_logits) > 1.0
    np.testing.assert_allclose(our_logits, their_logits.detach().numpy(), atol=1e-4)
    their_gradients = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    our_weights = named_weights(ours)
    assert set(our_weights) == set(their_gradients)
    for name, parameter in our_weights.items():
        ours_grad = parameter.grad.numpy().T if is_transposed(name) else parameter.grad.numpy()
        scale = np.abs(their_gradients[name]).max()
        assert scale > 1e-4, name
        assert np.abs(ours_grad - their_gradients[name]).max() < 1e-3 * scale, name


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


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("max_shard_bytes", [10**9, 12_000])
def test_what_we_save_loads_in_transformers(shape, max_shard_bytes, tmp_path):
    config = random_model(**shape).config
    config.save_pretrained(tmp_path)
    ours = build_model(ModelConfig.from_folder(tmp_path), None, seed=5)
    save_model_folder(ours, tmp_path / "ours", max_shard_bytes=max_shard_bytes)
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
