"""Every family against transformers: logits, gradients, files and greedy generation."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
import transformers

from erniekit.inference.generation import generate
from erniekit.inference.sampling import Sampling
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.stacked_experts import place_of
from erniekit.model.builder import build_model
from erniekit.model.head import token_loss
from erniekit.model.weights import named_weights, save_model_folder

from .families import CASES, CLASSES, VOCABULARY, random_model
from .test_decoder import our_hidden, ours_from

pytestmark = pytest.mark.parity
# By default, of the first two layers and the last.
MOE_LAYERS = {"deepseek_v3": 1, "ernie4_5_moe": 2, "gpt_oss": 3, "mixtral": 3, "qwen2_moe": 3, "qwen3_moe": 3}
every_case = pytest.mark.parametrize(("family", "shape"), CASES.values(), ids=CASES.keys())


def our_gradients(ours):
    """The gradient of each tensor of a file, as it is stored; None where no gradient reaches a weight."""
    architecture, stored = ours.config.architecture, {}
    for name, weight in named_weights(ours).items():
        gradient = None if weight.grad is None else weight.grad.numpy()
        place = place_of(name, architecture.stacked_experts)
        if place is None:
            stored[name] = gradient.T if architecture.is_linear(name) else gradient
            continue
        *inputs, outputs = gradient.shape
        shape = (ours.config.moe_num_experts, *inputs, outputs * place.parts)
        place.of(stored.setdefault(place.stored, np.zeros(shape, np.float32)))[...] = gradient
    return stored


@every_case
def test_logits_and_gradients_agree(family, shape, tmp_path):
    theirs = random_model(family, **shape)
    ours = ours_from(theirs, tmp_path)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, VOCABULARY, (1, 150))
    labels = np.where(rng.random((1, 150)) < 0.3, -100, rng.integers(0, VOCABULARY, (1, 150)))

    their_logits = theirs(input_ids=torch.tensor(ids)).logits
    their_loss = torch.nn.functional.cross_entropy(their_logits[0], torch.tensor(labels[0]), reduction="sum")
    their_loss.backward()
    hidden = our_hidden(ours, ids[0], [150])
    our_logits = ours.head(hidden).numpy()
    our_loss = token_loss(ours, hidden, paddle.to_tensor(labels)).loss_sum
    our_loss.backward()
    assert float(our_loss) == pytest.approx(their_loss.item(), rel=1e-6)

    assert np.std(our_logits) > 1.0
    np.testing.assert_allclose(our_logits, their_logits.detach().numpy(), atol=8e-5)
    our_weights = named_weights(ours)
    assert set(our_weights) == set(ours.config.weight_shapes())
    gradients = our_gradients(ours)
    buffers = {name for name, _ in theirs.named_buffers() if name.endswith("e_score_correction_bias")}
    assert set(gradients) - buffers == {name for name, _ in theirs.named_parameters()}
    for name, parameter in theirs.named_parameters():
        if not parameter.requires_grad:  # a router's correction
            assert gradients[name] is None
            continue
        expected, gradient = parameter.grad.numpy(), gradients[name]
        scale = np.abs(expected).max()
        assert scale > 1e-4, name
        assert np.abs(gradient - expected).max() < 1e-4 * scale, name


@every_case
def test_what_we_save_loads_in_transformers(family, shape, tmp_path):
    random_model(family, **shape).config.save_pretrained(tmp_path)
    ours = build_model(ModelConfig.from_folder(tmp_path), None, seed=5)
    save_model_folder(ours, tmp_path / "ours", max_shard_bytes=12_000)
    theirs, info = CLASSES[family][1].from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    by_type = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(by_type) is type(theirs)
    ids = np.random.default_rng(4).integers(0, VOCABULARY, (1, 40))
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(ours.head(our_hidden(ours, ids[0], [40])).numpy(), expected, atol=1e-5)


@every_case
def test_greedy_answers_agree(family, shape, tmp_path):
    theirs = random_model(family, **shape)
    ours = ours_from(theirs, tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, length).tolist() for length in (1, 7, 30)]
    settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [theirs.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() for prompt in prompts]
    assert len(set(map(tuple, expected))) == 3
    assert generate(ours, prompts, Sampling(max_new_tokens=30)) == expected


@every_case
def test_frequencies_agree(family, shape, tmp_path):
    config = random_model(family, **shape).config
    config.save_pretrained(tmp_path)
    model_config = ModelConfig.from_folder(tmp_path)
    ours = model_config.architecture.rope_tables(model_config)[0]
    kind = (getattr(config, "rope_scaling", None) or {}).get("rope_type", "default")
    expected, magnitude = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    np.testing.assert_allclose([pair for pair in ours.per_pair if pair], expected.numpy(), rtol=1e-6)
    assert ours.magnitude == pytest.approx(magnitude, rel=1e-6)


@pytest.mark.parametrize("family", CLASSES)
def test_absent_keys_have_their_defaults(family):
    theirs = CLASSES[family][0]().to_dict()
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    ours = ModelConfig.from_json({"model_type": family, **{key: theirs[key] for key in needed}})
    names = ["rope_theta", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "initializer_range"]
    names += ours.architecture.own_fields
    keys = {name: ours.architecture.key_names.get(name, name) for name in names if name != "moe_layer_end_index"}
    known = {name: key for name, key in keys.items() if key in theirs}
    assert {name: getattr(ours, name) for name in known} == {name: theirs[key] for name, key in known.items()}
    # null: as another key says; transformers 4.55 has no attribute for Gemma's old `sliding_window_pattern`
    own = {key: value for key, value in ours.own.items() if value is not None and key != "sliding_window_pattern"}
    assert own == {key: theirs[key] for key in own}
    layers = [ours.is_moe_layer(layer) for layer in (0, 1, ours.num_hidden_layers - 1)]
    assert layers.count(True) == MOE_LAYERS.get(family, 0)
    if family not in ("ernie4_5", "ernie4_5_moe"):  # theirs says 128; Paddle's ERNIE folders leave the key out
        assert ours.head_dim == (theirs.get("head_dim") or ours.hidden_size // ours.num_attention_heads)
