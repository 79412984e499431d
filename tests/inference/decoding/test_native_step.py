"""The native step computes what the decoder computes: every family that it takes, any batch, adapters and codes."""

from __future__ import annotations

import mmap
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import paddle
import pytest

from erniekit.inference.decoding.native_step import SLAB_BYTES, NativeStep, block_bytes, refusal
from erniekit.inference.decoding.step import BLOCK_TOKENS, StepBatch
from erniekit.model.architectures.registry import ARCHITECTURES
from erniekit.model.attention import AttentionPlan
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import add_adapters, merge_adapters, named_adapters
from erniekit.model.mlp import ACTIVATION_KINDS, ACTIVATIONS
from erniekit.model.quantization.packed import pack_linears
from erniekit.model.quantization.settings import WEIGHT_ONLY, WeightOnly
from erniekit.model.weights import named_linears
from erniekit.native import openmp
from tests.model.tiny import audio_arrays, logits_of, tiny_model
from tests.model.tiny_speech import omnivoice_config, speaking_model, vall_e_config

pytestmark = pytest.mark.usefixtures("native_kernels")

FAMILIES = {
    "ernie4_5": {},
    "ernie4_5 with biases and a head of its own": {"use_bias": True, "tie_word_embeddings": False},
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 6},
    "llama, scaled rope": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        "num_key_value_heads": 1,
    },
    "qwen2": {"num_key_value_heads": 4},
    "qwen3": {"head_dim": 20},
    "glm4": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 2},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "mistral": {"sliding_window": 19},
}


def model_of(family, **changes):
    return tiny_model(model_type=family.split()[0].strip(","), **FAMILIES.get(family, {}), **changes)


def a_batch(*sequences, wanted=None):
    """A step of sequences, each (ids, tokens in the cache, blocks); all logits are wanted."""
    counts = [len(ids) for ids, _, _ in sequences]
    longest = max(len(blocks) for _, _, blocks in sequences)
    return StepBatch(
        token_ids=np.concatenate([ids for ids, _, _ in sequences]).astype(np.int64),
        positions=np.concatenate([cached + np.arange(len(ids)) for ids, cached, _ in sequences]),
        starts=np.cumsum([0, *counts]).astype(np.int32),
        cached=np.array([cached for _, cached, _ in sequences], np.int32),
        block_tables=np.array([[*blocks, *[-1] * (longest - len(blocks))] for _, _, blocks in sequences], np.int32),
        wanted=np.arange(sum(counts)) if wanted is None else np.array(wanted, np.int64),
    )


def tokens_of(seed, count, vocabulary=53):
    return np.random.default_rng(seed).integers(0, vocabulary, count)


def assert_close(ours, expected):
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_single_tokens_give_the_decoders_logits(family):
    decoder = model_of(family)
    assert refusal(decoder) is None
    step, ids, blocks = NativeStep(decoder), tokens_of(1, 75), [3, 1, 0, 5, 4]
    got = [step.logits(a_batch((ids[:21], 0, blocks))), step.logits(a_batch((ids[21:60], 21, blocks)))]
    got += [step.logits(a_batch((ids[i : i + 1], i, blocks))) for i in range(60, 75)]
    assert_close(np.concatenate(got), logits_of(decoder, ids))


@pytest.mark.parametrize("activation", ACTIVATION_KINDS)
def test_every_activation_is_that_of_the_decoder(monkeypatch, activation):
    monkeypatch.setitem(ARCHITECTURES, "llama", replace(ARCHITECTURES["llama"], activation=activation))
    decoder, ids = tiny_model(seed=1, model_type="llama", intermediate_size=37), tokens_of(1, 20)
    assert refusal(decoder) is None
    assert_close(NativeStep(decoder).logits(a_batch((ids, 0, [1, 0]))), logits_of(decoder, ids))


def test_gates_without_a_kernel_are_refused(monkeypatch):
    for activation in ACTIVATIONS.keys() - ACTIVATION_KINDS.keys():
        monkeypatch.setitem(ARCHITECTURES, "llama", replace(ARCHITECTURES["llama"], activation=activation))
        assert f"no kernel computes its gate, {activation}" in refusal(tiny_model(model_type="llama"))


def test_models_that_write_codes_are_refused():
    for config in (omnivoice_config(), vall_e_config()):
        assert refusal(speaking_model(config)) == "it writes codes"


def test_the_library_of_products_changes_nothing(monkeypatch):
    decoder, ids = model_of("qwen3"), tokens_of(2, 75)  # more rows than products of our own take
    with_mkl = NativeStep(decoder).logits(a_batch((ids, 0, range(5))))
    step = NativeStep(decoder)
    step._model.sgemm = None
    assert_close(step.logits(a_batch((ids, 0, range(5)))), with_mkl)


def test_sequences_side_by_side_do_not_see_each_other():
    decoder = model_of("mistral")
    step = NativeStep(decoder)
    texts = [tokens_of(seed, length) for seed, length in enumerate((37, 1, 16, 50))]
    tables = [[0, 7, 2], [9], [4], [1, 3, 5, 6]]
    first = [10, 1, 16, 49]  # in the first step; the rest comes in the second
    rows = step.logits(
        a_batch(*((text[:count], 0, blocks) for text, count, blocks in zip(texts, first, tables, strict=True)))
    )
    rest = [number for number, text in enumerate(texts) if len(text) > first[number]]
    more = step.logits(a_batch(*((texts[n][first[n] :], first[n], tables[n]) for n in rest)))
    starts, further = np.cumsum([0, *first]), np.cumsum([0, *(len(texts[n]) - first[n] for n in rest)])
    for number, text in enumerate(texts):
        own = [rows[starts[number] : starts[number + 1]]]
        if number in rest:
            place = rest.index(number)
            own.append(more[further[place] : further[place + 1]])
        assert_close(np.concatenate(own), logits_of(decoder, text))


def test_a_row_of_few_has_the_same_bits_whoever_is_beside_it():
    step = NativeStep(model_of("qwen2"))
    texts = [tokens_of(seed, 12) for seed in range(64)]
    alone = [step.logits(a_batch((text, 0, [number]))) for number, text in enumerate(texts)]
    newest = [step.logits(a_batch((text[:1], 12, [number]))) for number, text in enumerate(texts)]
    together = step.logits(a_batch(*((text[:1], 12, [number]) for number, text in enumerate(texts))))
    assert np.array_equal(np.concatenate(newest), together)
    assert not np.array_equal(alone[0], alone[1])


@pytest.mark.parametrize(
    "counts", [[1] * 64, [1] * 48, [1] * 40, [20, 1, 4, 25], [25, 20, 1, 18], [50, 3], [30, 40]], ids=str
)
def test_the_number_of_threads_changes_no_bit(counts):
    """Whether each group of them takes some of the sequences, or all divide columns; MKL's products may differ."""
    texts = [tokens_of(seed, count) for seed, count in enumerate(counts)]
    blocks = [[4 * number + i for i in range(4)] for number in range(len(counts))]
    wanted = [place for place in range(sum(counts)) if place % 3]
    found = []
    for threads in (1, 2, 3, 4):
        step = NativeStep(model_of("qwen2"))
        with openmp.threads(threads):
            step.logits(a_batch(*((tokens_of(99, 7), 0, own) for own in blocks)))
            found.append(
                step.logits(a_batch(*((text, 7, own) for text, own in zip(texts, blocks, strict=True)), wanted=wanted))
            )
        assert_close(found[-1], found[0]) if sum(counts) > 64 else np.testing.assert_array_equal(found[-1], found[0])
    assert len(found[0]) == len(wanted)


def test_what_others_left_in_a_block_is_not_read():
    decoder, ids = model_of("ernie4_5"), tokens_of(3, 5)
    step = NativeStep(decoder)
    clean = step.logits(a_batch((ids, 0, [0])))
    for slab in step._slabs:
        slab[:] = np.where(slab == 0, 0, np.nan)  # padding of heads stays zero
    size = block_bytes(decoder.config) // 4
    channels = size // (decoder.config.num_hidden_layers * 2 * decoder.config.num_key_value_heads)
    memory = step._slabs[0][0].reshape(decoder.config.num_hidden_layers, 2, -1, channels)
    memory[:, 1] = np.nan  # all values, those of places without a token as well
    assert np.array_equal(step.logits(a_batch((ids, 0, [0]))), clean)


def test_a_key_that_overflows_is_seen_in_the_logits():
    """Of the only layer: its own values, and the states of later tokens, are finite."""
    decoder = tiny_model(model_type="llama", num_hidden_layers=1)
    embedding, keys = decoder.embedding.weight.numpy(), decoder.layers[0].self_attn.k_proj.weight.numpy()
    embedding[:, 0], embedding[7], keys[0] = 0, 0, 3e38
    embedding[7, 0] = 1
    decoder.embedding.weight.set_value(embedding)
    decoder.layers[0].self_attn.k_proj.weight.set_value(keys)
    decoder.layers[0].input_layernorm.weight.set_value(np.ones(16, np.float32))
    step = NativeStep(decoder)
    assert np.isfinite(step.logits(a_batch((np.array([5, 9, 11]), 0, [0])))).all()
    assert np.isnan(step.logits(a_batch((np.array([7, 5, 9, 11]), 0, [0])))).all()


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="the memory of a process is read from /proc")
def test_a_step_takes_memory_as_blocks_are_used():
    np.zeros(SLAB_BYTES, np.int8)  # from now on the heap has memory of this size
    decoder, batch = tiny_model(), a_batch((tokens_of(3, 5), 0, [0]))
    before, steps = resident_bytes(), []
    for _ in range(12):
        steps.append(NativeStep(decoder))
        steps[-1].logits(batch)
    assert resident_bytes() - before < 6 * SLAB_BYTES


def test_only_wanted_logits_are_computed():
    decoder, ids = model_of("llama"), tokens_of(4, 20)
    step = NativeStep(decoder)
    every = step.logits(a_batch((ids, 0, [0, 1])))
    some = step.logits(a_batch((ids, 0, [0, 1]), wanted=[3, 19]))
    assert_close(some, every[[3, 19]])
    assert step.logits(a_batch((ids, 0, [0, 1]), wanted=[])).shape == (0, 53)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_stand_beside_the_weights_or_in_them(dora):
    decoder, ids = model_of("llama"), tokens_of(5, 75)
    plain = NativeStep(decoder).logits(a_batch((ids, 0, range(5))))
    add_adapters(decoder, LoraSettings(rank=3, alpha=6, dora=dora), seed=1)
    rng = np.random.default_rng(0)
    for adapter in named_adapters(decoder).values():
        adapter.lora_B.set_value(rng.standard_normal(adapter.lora_B.shape).astype(np.float32) * 0.1)
    step, expected = NativeStep(decoder), logits_of(decoder, ids)
    assert np.abs(expected - plain).max() > 0.01 * np.abs(plain).max()
    assert_close(step.logits(a_batch((ids, 0, range(5)))), expected)
    assert_close(step.logits(a_batch((ids[:9], 0, [0]))), expected[:9])
    merge_adapters(decoder)
    assert_close(NativeStep(decoder).logits(a_batch((ids, 0, range(5)))), expected)


@pytest.mark.parametrize("algorithm", WEIGHT_ONLY)
@pytest.mark.parametrize("hidden", [16, 64])  # groups of 16 and of 64 inputs
def test_codes_mean_what_quantization_means(algorithm, hidden):
    decoder = model_of("qwen2", hidden_size=hidden, intermediate_size=3 * hidden)
    values = {path: linear.weight.numpy().T for path, linear in named_linears(decoder).items()}
    pack_linears(named_linears(decoder), WeightOnly(algorithm), decoder.config.architecture)
    for path, linear in named_linears(decoder).items():
        linear.product.fill(path, values[path], decoder.tp)
    step, ids = NativeStep(decoder), tokens_of(6, 75)
    expected = logits_of(decoder, ids)
    assert_close(step.logits(a_batch((ids, 0, range(5)))), expected)  # by MKL
    ends = [0, 1, 3, 40, 75]
    got = [step.logits(a_batch((ids[i:j], i, range(5)))) for i, j in pairwise(ends)]
    assert_close(np.concatenate(got), expected)


def test_what_training_writes_into_weights_acts():
    decoder, ids = model_of("ernie4_5"), tokens_of(7, 10)
    step = NativeStep(decoder)
    before = step.logits(a_batch((ids, 0, [0])))
    with paddle.no_grad():
        decoder.layers[1].mlp.down_proj.weight.add_(paddle.ones([1]))
    after = step.logits(a_batch((ids, 0, [0])))
    assert not np.allclose(before, after)
    assert_close(after, logits_of(decoder, ids))


def test_states_of_recordings_stand_among_the_embeddings():
    decoder = tiny_model(model_type="qwen2_audio")
    config = decoder.config
    audio = config.architecture.audio(config)
    states = audio.tokens_of(audio.window_frames)
    ids = np.array([5, *[audio.placeholder_id] * states, 9, 11])
    features = np.random.default_rng(0).standard_normal((1, audio.mel_bins, audio.window_frames)).astype(np.float32)
    arrays = audio_arrays(config, ids, features, [audio.window_frames])
    batch = a_batch((ids, 0, [0, 1]))
    heard = StepBatch(**{**vars(batch), "inputs": {name: values.numpy() for name, values in arrays.items()}})
    step = NativeStep(decoder)
    plan = AttentionPlan.build(np.full((1, 1, len(ids), 1), len(ids), np.int32))
    positions = paddle.to_tensor(np.arange(len(ids))[None])
    expected = decoder.head(decoder(paddle.to_tensor(ids[None]), positions, plan, **arrays)).numpy()[0]
    assert_close(step.logits(heard), expected)
    assert not np.allclose(step.logits(batch), expected)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "mixtral", "num_local_experts": 4}, "experts"),
        ({"model_type": "deepseek_v3"}, "layers of its own"),
        ({"model_type": "gpt_oss"}, "layers of its own"),
        ({"head_dim": 514}, "heads have 514 channels"),
    ],
)
def test_other_decoders_are_refused_with_a_reason(changes, why):
    assert why in refusal(tiny_model(**changes))


def test_other_types_of_weights_are_refused():
    decoder = tiny_model()
    decoder.to(dtype="float64")
    assert "is not contiguous float32" in refusal(decoder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.array([1, 53])}, "vocabulary has 53"),
        ({"token_ids": np.array([-1, 2])}, "token ids from -1"),
        ({"cached": np.array([BLOCK_TOKENS - 1], np.int32)}, "fewer blocks than tokens"),
        ({"wanted": np.array([2])}, "is wanted that is not in the batch"),
        ({"starts": np.array([0, 1], np.int32)}, "do not fit the tokens"),
    ],
)
def test_nothing_outside_of_its_arrays_is_read(changes, message):
    batch = a_batch((np.array([1, 2]), 0, [0]), wanted=[1])
    with pytest.raises(ValueError, match=message):
        NativeStep(tiny_model()).logits(StepBatch(**{**vars(batch), **changes}))
