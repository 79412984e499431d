"""Weight files in other layouts than Hugging Face's. Arrays are arranged here by plain loops, as the layouts are
described, and must come back under their Hugging Face names."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import paddle
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.errors import ModelFileError
from erniekit.model.architectures.architecture import ALWAYS
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.registry import ARCHITECTURES
from erniekit.model.builder import build_model
from erniekit.model.storage.layouts import find_layout, open_weights
from erniekit.model.storage.safetensors import SafetensorsFile
from erniekit.model.storage.shards import weight_files
from erniekit.model.weights import load_weights, named_weights, save_weights

from ..tiny import logits_of, tiny_config, tiny_model

LINEARS = ("_proj.weight", "mlp.gate.weight", "mtp_linear_proj.0.weight")
MOE = {"moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 6, "moe_num_shared_experts": 2}


def random_weights(config, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in config.weight_shapes().items()}


def in_paddle_layout(config, weights, prefix, fused):
    """What Paddle's programs store: [in, out] linears under the family's name, projections fused along the outputs."""
    stored = {}
    for name, values in weights.items():
        is_linear = name.endswith(LINEARS) or name == "lm_head.weight"
        stored[name.replace("model.", f"{prefix}.", 1)] = values.T.copy() if is_linear else values
    if not fused:
        return stored
    for name in [name for name in stored if ".q_proj." in name]:
        q, k, v = (stored.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj"))
        if prefix == "ernie" and config.num_attention_heads != config.num_key_value_heads:
            pieces = [q, k, v]
        else:
            pieces, size = [], config.head_dim
            group = config.num_attention_heads // config.num_key_value_heads * size
            for head in range(config.num_key_value_heads):
                pieces.append(q[..., head * group : (head + 1) * group])
                pieces += [part[..., head * size : (head + 1) * size] for part in (k, v)]
        stored[name.replace("q_proj", "qkv_proj")] = np.concatenate(pieces, -1)
    whole = "up_gate_proj" if prefix == "ernie" else "gate_up_fused_proj"
    for name in [name for name in stored if ".gate_proj." in name]:
        gate, up = stored.pop(name), stored.pop(name.replace("gate_proj", "up_proj"))
        stored[name.replace("gate_proj", whole)] = np.concatenate([gate, up], -1)
    return stored


def write(folder, stored, metadata=None, shards=1):
    names = sorted(stored)
    if shards == 1:
        safetensors.numpy.save_file(stored, folder / "model.safetensors", metadata)
        return
    weight_map = {name: f"part-{number % shards}.safetensors" for number, name in enumerate(names)}
    for file in set(weight_map.values()):
        part = {name: stored[name] for name in names if weight_map[name] == file}
        safetensors.numpy.save_file(part, folder / file, metadata)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@st.composite
def configurations(draw):
    family, prefix = draw(
        st.sampled_from(
            [
                ("ernie4_5", "ernie"),
                ("ernie4_5_moe", "ernie"),
                ("llama", "llama"),
                ("qwen2", "qwen2"),
                ("qwen3", "qwen2"),
            ]
        )
    )
    key_heads = draw(st.integers(1, 3))
    values = {
        "model_type": family,
        "vocab_size": draw(st.integers(5, 9)),
        "hidden_size": draw(st.sampled_from([8, 12])),
        "intermediate_size": draw(st.sampled_from([8, 10])),
        "num_hidden_layers": 2,
        "num_attention_heads": key_heads * draw(st.integers(1, 3)),
        "num_key_value_heads": key_heads,
        "head_dim": draw(st.sampled_from([2, 4])),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if family == "ernie4_5_moe":
        values |= {**MOE, "num_nextn_predict_layers": draw(st.integers(0, 1))}
    else:
        values |= dict.fromkeys(set(ARCHITECTURES[family].biases.values()) - {ALWAYS}, draw(st.booleans()))
    return ModelConfig.from_json(values), prefix


@settings(max_examples=40, deadline=None, derandomize=True)
@given(configurations(), st.booleans(), st.integers(1, 3))
def test_every_weight_comes_back_from_paddles_layout(tmp_path_factory, case, fused, shards):
    config, prefix = case
    folder = tmp_path_factory.mktemp("model")
    weights = random_weights(config)
    write(folder, in_paddle_layout(config, weights, prefix, fused), {"format": "np"}, shards)
    stored = open_weights(config, folder)
    assert stored.layout.prefix == f"{prefix}." and bool(stored.layout.qkv) == fused
    for name, values in weights.items():
        np.testing.assert_array_equal(stored.read(name), values, err_msg=name)
        whole = np.zeros_like(values.T if stored.is_transposed(name) else values)
        for rows, block in stored.row_blocks(name):
            whole[rows] = block
        np.testing.assert_array_equal(whole.T if stored.is_transposed(name) else whole, values, err_msg=name)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_the_decoder_is_filled_from_paddles_layout(fused, key_heads, tmp_path, logged):
    decoder = tiny_model(num_key_value_heads=key_heads, tie_word_embeddings=False, use_bias=True)
    save_weights(decoder, tmp_path)
    hf = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    (tmp_path / "paddle").mkdir()
    write(tmp_path / "paddle", in_paddle_layout(decoder.config, hf, "ernie", fused), {"format": "np"})
    again = build_model(decoder.config, tmp_path / "paddle", log_level=logging.INFO)
    np.testing.assert_array_equal(logits_of(again, [1, 2, 3]), logits_of(decoder, [1, 2, 3]))
    (line,) = [line for line in logged if line.startswith("weights: ")]
    assert "ernie.* names, linears [in, out]" in line and ("fused qkv_proj and up_gate_proj" in line) == fused


@pytest.mark.parametrize("fused", [False, True])
def test_experts_and_further_predictions_are_filled_from_paddles_layout(fused, tmp_path):
    decoder = tiny_model(
        model_type="ernie4_5_moe", **MOE, num_hidden_layers=3, moe_layer_start_index=1, num_nextn_predict_layers=1
    )
    save_weights(decoder, tmp_path)
    hf = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert any("mtp_linear_proj" in name for name in hf) and any(".experts.2." in name for name in hf)
    (tmp_path / "paddle").mkdir()
    write(tmp_path / "paddle", in_paddle_layout(decoder.config, hf, "ernie", fused), {"format": "np"})
    again = build_model(decoder.config, tmp_path / "paddle")
    for (name, ours), theirs in zip(named_weights(decoder).items(), named_weights(again).values(), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), err_msg=name)


def test_long_tensors_are_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("erniekit.model.storage.safetensors._BLOCK", 256)
    decoder = tiny_model(use_bias=True)
    save_weights(decoder, tmp_path)
    hf = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    write(tmp_path, in_paddle_layout(decoder.config, hf, "ernie", fused=True))
    again = tiny_model(seed=7, use_bias=True)
    load_weights(again, tmp_path)
    np.testing.assert_array_equal(logits_of(again, [1, 2, 3]), logits_of(decoder, [1, 2, 3]))


SQUARE = {"hidden_size": 16, "intermediate_size": 16, "num_key_value_heads": 4, "head_dim": 4}


@pytest.mark.parametrize(
    ("prefix", "metadata", "transposed"),
    [
        ("model", {"format": "pt"}, False),
        ("model", {"format": "np"}, True),
        ("ernie", None, True),
        ("ernie", {"format": "np"}, True),
    ],
)
def test_metadata_and_names_tell_the_order_of_square_linears(prefix, metadata, transposed, tmp_path):
    config = tiny_config(**SQUARE)
    weights = random_weights(config)
    write(tmp_path, {name.replace("model.", f"{prefix}."): values for name, values in weights.items()}, metadata)
    name = "model.layers.0.mlp.up_proj.weight"
    expected = weights[name].T if transposed else weights[name]
    np.testing.assert_array_equal(open_weights(config, tmp_path).read(name), expected)


def test_square_linears_without_any_hint_are_refused(tmp_path):
    config = tiny_config(**SQUARE)
    write(tmp_path, random_weights(config))
    with pytest.raises(ModelFileError, match="it is unknown whether they are"):
        open_weights(config, tmp_path)


def test_fused_projections_of_unknown_order_are_refused(tmp_path):
    config = tiny_config()
    write(tmp_path, in_paddle_layout(config, random_weights(config), "model", fused=True))
    with pytest.raises(ModelFileError, match="more than one order"):
        open_weights(config, tmp_path)


def test_a_misfit_is_told_in_the_names_of_the_file(tmp_path):
    config = tiny_config()
    stored = in_paddle_layout(config, random_weights(config), "ernie", fused=True)
    del stored["ernie.layers.1.mlp.up_gate_proj.weight"]
    stored["ernie.layers.0.self_attn.qkv_proj.weight"] = np.zeros((16, 33), np.float32)
    stored["ernie.layers.0.self_attn.qkv_proj.bias"] = np.zeros(32, np.float32)
    write(tmp_path, stored)
    with pytest.raises(ModelFileError) as error:
        open_weights(config, tmp_path)
    for line in (
        "ernie.layers.1.mlp.up_gate_proj.weight: missing",
        "ernie.layers.0.self_attn.qkv_proj.weight: shape [16, 33], expected [16, 32]",
        "ernie.layers.0.self_attn.qkv_proj.bias: the model has no such weight (model.safetensors)",
    ):
        assert line in str(error.value)


@pytest.mark.parametrize("changed", [False, True])
def test_a_tied_head_may_be_stored_in_another_type(changed, tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].astype(np.float16)
    head = weights["model.embed_tokens.weight"].astype(np.float32)
    head[-1, -1] += changed
    write(tmp_path, {**weights, "lm_head.weight": head})
    if changed:
        with pytest.raises(ModelFileError, match="tie_word_embeddings"):
            open_weights(config, tmp_path)
    else:
        open_weights(config, tmp_path)


def test_names_without_any_structure_are_listed(tmp_path):
    config = tiny_config()
    write(tmp_path, {**random_weights(config), "weight": np.zeros(1, np.float32)})
    with pytest.raises(ModelFileError, match=r"\n  weight: the model has no such weight"):
        open_weights(config, tmp_path)


def test_stored_rotary_frequencies_are_passed_over(tmp_path):
    config = tiny_config(model_type="llama")
    weights = random_weights(config)
    write(tmp_path, {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)})
    assert open_weights(config, tmp_path).read("model.norm.weight").shape == (16,)


@pytest.mark.parametrize("aux_free", [True, False])
def test_only_routers_that_never_had_a_correction_may_lack_it(aux_free, tmp_path):
    config = tiny_config(model_type="ernie4_5_moe", **MOE, moe_use_aux_free=aux_free)
    name = "model.layers.1.mlp.moe_statics.e_score_correction_bias"
    weights = random_weights(config)
    assert name in weights
    write(tmp_path, {key: values for key, values in weights.items() if key != name})
    if aux_free:
        with pytest.raises(ModelFileError, match=f"{name}: missing"):
            open_weights(config, tmp_path)
    else:
        stored = open_weights(config, tmp_path)
        assert not stored.read(name).any() and stored.dtype(name) == "F32"
        assert [block.shape for _, block in stored.row_blocks(name)] == [(1, 3)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_read_exactly(dtype, tmp_path):
    decoder = tiny_model()
    source = paddle.to_tensor(np.random.default_rng(0).standard_normal((53, 16)).astype(np.float32)).astype(dtype)
    bits = source.view("uint16" if dtype == "bfloat16" else "int16").numpy()
    save_weights(decoder, tmp_path)
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    name = "model.embed_tokens.weight"
    header = {name: {"dtype": {"bfloat16": "BF16", "float16": "F16"}[dtype], "shape": [53, 16]}}
    header[name]["data_offsets"] = [0, bits.nbytes]
    text = json.dumps(header).encode()
    (tmp_path / "half.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bits.tobytes())
    rest = {key: values for key, values in stored.items() if key != name}
    safetensors.numpy.save_file(rest, tmp_path / "rest.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weight_map = {**dict.fromkeys(rest, "rest.safetensors"), name: "half.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    load_weights(decoder, tmp_path)
    np.testing.assert_array_equal(decoder.embedding.weight.numpy(), source.astype("float32").numpy())
    assert decoder.embedding.weight.dtype == paddle.float32


def test_a_git_lfs_pointer_is_told_from_a_damaged_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 721488048\n")
    with pytest.raises(ModelFileError, match=r"git-lfs pointer.*\n.*git lfs pull"):
        SafetensorsFile(path)


def test_a_truncated_shard_is_named(tmp_path):
    config = tiny_config()
    write(tmp_path, random_weights(config), shards=2)
    path = tmp_path / "part-1.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelFileError, match=r"part-1\.safetensors: .*truncated"):
        open_weights(config, tmp_path)


def test_integers_in_place_of_weights_are_named(tmp_path):
    config = tiny_config()
    stored = random_weights(config)
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        stored[name] = stored[name].astype(np.int32)
    write(tmp_path, stored)
    with pytest.raises(ModelFileError, match=r"(?s)1\.mlp\.up_proj\.weight: holds I32.*model\.norm\.weight: holds I32"):
        open_weights(config, tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fused", [False, True])
def test_weights_that_are_not_finite_are_named(tmp_path, value, fused):
    config = tiny_config(num_key_value_heads=4)
    stored = random_weights(config)
    stored["model.layers.1.self_attn.k_proj.weight"][3, 5] = value
    stored["model.embed_tokens.weight"][:] = 3e38  # whose sum is infinite
    write(
        tmp_path,
        in_paddle_layout(config, stored, "ernie", True) if fused else stored,
        {"format": "np" if fused else "pt"},
    )
    name = r"ernie\.layers\.1\.self_attn\.qkv_proj" if fused else r"model\.layers\.1\.self_attn\.k_proj"
    weights = open_weights(config, tmp_path)
    weights.read("model.embed_tokens.weight")
    with pytest.raises(ModelFileError, match=rf"model\.safetensors: {name}\.weight: 1 of .* NaN or infinite"):
        weights.read("model.layers.1.self_attn.k_proj.weight")
    with pytest.raises(ModelFileError, match=rf"{name}\.weight: 1 of"):
        build_model(config, tmp_path)


@pytest.mark.parametrize(
    ("file", "model_type", "advice"),
    [
        ("model_state.pdparams", "qwen2", "from paddlenlp.transformers import"),
        ("model_state-00001-of-00002.pdparams", "ernie4_5_moe", "from paddleformers.transformers import"),
        ("pytorch_model.bin", "llama", "safe_serialization=True"),
    ],
)
def test_pickled_weights_are_refused_with_a_way_out(file, model_type, advice, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / file).write_bytes(b"\x80\x02}q\x00.")
    assert not list(weight_files(tmp_path))
    with pytest.raises(ModelFileError, match="pickle") as error:
        open_weights(tiny_config(), tmp_path)
    assert advice in str(error.value)


def test_the_layout_is_described():
    config = tiny_config()
    layout = find_layout(config, config.weight_shapes(), {"pt"}, where="here")
    assert str(layout) == "Hugging Face layout"


@pytest.mark.parametrize("case", ["grouped", "ungrouped"])
def test_ernies_own_files_give_its_own_logits(case, tmp_path):
    """Files and logits of paddleformers 0.1.6, recorded by tests/parity/record_paddle_ernie.py."""
    vector = np.load(Path(__file__).parent / "paddle_ernie.npz", allow_pickle=False)
    prefix = f"{case}/stored/"
    write(tmp_path, {name.removeprefix(prefix): vector[name] for name in vector if name.startswith(prefix)})
    (tmp_path / "config.json").write_bytes(vector[f"{case}/config"].tobytes())
    decoder = build_model(ModelConfig.from_folder(tmp_path), tmp_path)
    assert vector[f"{case}/logits"].std() > 0.5
    np.testing.assert_allclose(logits_of(decoder, vector["ids"]), vector[f"{case}/logits"], atol=1e-4)
