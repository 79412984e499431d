"""Our model of the family omnivoice computes what the package of that name does; tools/parity/record_omnivoice.py."""

from __future__ import annotations

import json

import numpy as np
import paddle
import pytest

from erniekit.model.architectures.config_reading import written_config
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.speaking import code_layout, codebook_weights
from erniekit.model.attention import AttentionPlan
from erniekit.model.builder import build_model
from erniekit.model.code_layers import code_logits, level_losses
from erniekit.model.storage.safetensors import SafetensorsFile
from erniekit.model.weights import named_weights, save_model_folder
from tests.model.omnivoice_cases import BASES, LEVELS, RECORDED, SEED, documents, outer_values
from tests.model.seeded_weights import seeded_weight


@pytest.fixture(params=BASES)
def base(request):
    return request.param


def recorded_of(base):
    with np.load(RECORDED) as file:
        return {name.partition("/")[2]: file[name] for name in file.files if name.startswith(f"{base}/")}


def seeded_model(base):
    config = ModelConfig.from_json({"model_type": "omnivoice", **outer_values(), "llm_config": BASES[base]})
    decoder = build_model(config, None)
    shapes, is_linear = config.weight_shapes(), config.architecture.is_linear
    for name, parameter in named_weights(decoder).items():
        values = seeded_weight(name, shapes[name], SEED)
        parameter.set_value(np.ascontiguousarray(values.T) if is_linear(name) else values)
    return decoder


def hidden_and_labels(decoder, **options):
    """The documents in one row: hidden states [1, S, H] after the norm, and labels [1, S, C]."""
    found, first_rows = documents(**options), np.array(code_layout(decoder.config).whole)
    lengths = [len(each.ids) + each.codes.shape[1] for each in found]
    ends = np.cumsum(lengths)
    ids = np.concatenate([np.pad(each.ids, (0, each.codes.shape[1])) for each in found])
    codes, labels = (
        np.concatenate([np.pad(of, ((len(each.ids), 0), (0, 0)), constant_values=none) for each, of in pairs])
        for none, pairs in (
            (-1, [(each, each.codes.T + first_rows) for each in found]),
            (-100, [(each, each.labels.T) for each in found]),
        )
    )
    columns = np.stack([np.repeat(ends, lengths), np.repeat(ends - lengths, lengths)], -1).astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in lengths])
    context = decoder.context(paddle.to_tensor(positions[None]), AttentionPlan.build(columns[None, None], causal=False))
    embedded = decoder.embed({"input_ids": paddle.to_tensor(ids[None]), "codes": paddle.to_tensor(codes[None])})
    return decoder.norm(decoder.forward_layers(embedded, context)), labels[None]


def loss_of(decoder, fused, **options):
    """sum_c w_c S_c / N_c of one micro-batch, as the package averages it."""
    hidden, labels = hidden_and_labels(decoder, **options)
    weights = np.array(codebook_weights(decoder.config)) / sum(codebook_weights(decoder.config))
    losses = level_losses(decoder, hidden, labels, fused=fused)
    return sum(each.loss_sum * (w / max(1, int(each.target_count))) for each, w in zip(losses, weights, strict=True))


def test_logits_are_the_packages(base):
    decoder, expected = seeded_model(base), recorded_of(base)["logits"]
    hidden, _ = hidden_and_labels(decoder)
    for level in range(LEVELS):
        found = code_logits(decoder, hidden[0], level).numpy()
        np.testing.assert_allclose(found, expected[:, level], atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("fused", [False, True])
def test_loss_and_gradients_are_the_packages(base, fused):
    decoder, expected = seeded_model(base), recorded_of(base)
    loss = loss_of(decoder, fused)
    assert float(loss) == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert float(loss) == pytest.approx(float(expected["packed_loss"]), rel=1e-5)
    loss.backward()
    for name, parameter in named_weights(decoder).items():
        gradient = expected[f"gradient/{name}"]
        found = parameter.grad.numpy().T if decoder.config.architecture.is_linear(name) else parameter.grad.numpy()
        np.testing.assert_allclose(found, gradient, atol=1e-3 * np.abs(gradient).max(), err_msg=name)


def test_a_level_without_masked_codes_has_no_loss(base):
    loss = float(loss_of(seeded_model(base), fused=False, last_level=False))
    assert loss == pytest.approx(float(recorded_of(base)["loss_without_last_level"]), rel=1e-5)


def test_a_saved_folder_is_the_packages(base, tmp_path):
    saved = json.loads(bytes(recorded_of(base)["saved"]))
    assert ModelConfig.from_json(saved["config"]) == seeded_model(base).config
    decoder = seeded_model(base)
    save_model_folder(decoder, tmp_path)
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert {name: [file.stored(name).dtype, list(file.shape(name))] for name in file.names()} == saved["tensors"]
    written = written_config(decoder.config)
    own = ("model_type", "audio_vocab_size", "audio_mask_id", "num_audio_codebook", "audio_codebook_weights")
    assert {key: written[key] for key in own} == {key: saved["config"][key] for key in own}
    ours, theirs = written["llm_config"], saved["config"]["llm_config"]
    assert {key: value for key, value in theirs.items() if key in ours and key != "rope_parameters"}.items() >= {
        key: ours[key] for key in BASES[base] if key not in ("rope_theta", "head_dim")
    }.items()
