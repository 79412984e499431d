"""Steps over key-value blocks give the logits of one forward pass, however prompts are cut and sequences mixed."""

from __future__ import annotations

import numpy as np
import pytest

from erniekit.inference.decoding import cache_attention
from erniekit.inference.decoding.blocks import BlockTables
from erniekit.inference.decoding.cache_attention import length_classes
from erniekit.inference.decoding.decoder_step import DecoderStep
from erniekit.inference.decoding.native_step import NativeStep
from erniekit.inference.decoding.open_scheduler import CACHE_BYTES, block_count, open_scheduler
from erniekit.inference.decoding.scheduler import Request, Scheduler
from erniekit.inference.decoding.step import BLOCK_TOKENS, StepBatch
from erniekit.inference.sampling import Sampling
from erniekit.model.cpu_precision import CpuBFloat16
from erniekit.native import library
from tests.model.tiny import logits_of, tiny_model

FAMILIES = {
    "ernie4_5": {},
    "biases": {"model_type": "qwen2"},
    "windows and sinks": {"model_type": "gpt_oss", "sliding_window": 9},
    "norms of heads, windows": {"model_type": "gemma3_text", "sliding_window": 20, "query_pre_attn_scalar": 4},
    "latent attention": {"model_type": "deepseek_v3"},
    "experts": {"model_type": "qwen2_moe"},
}


class Sequences:
    """Sequences that grow step by step, in blocks that lie anywhere."""

    def __init__(self, decoder, texts):
        self.step, self.texts = DecoderStep(decoder, 64), texts
        self.cached = [0] * len(texts)
        self.blocks = BlockTables(64)
        for filler in range(3):  # so that block numbers are neither 0 nor in order
            self.blocks.extend(100 + filler, BLOCK_TOKENS)
        self.blocks.release(101)

    def advance(self, counts):
        """Feed so many tokens of each sequence, in this order; return the logits after each one's last."""
        ids, positions, numbers = [], [], list(counts)
        for number, count in counts.items():
            start = self.cached[number]
            assert self.blocks.extend(number, start + count)
            ids += self.texts[number][start : start + count]
            positions += range(start, start + count)
        starts = np.concatenate([[0], np.cumsum(list(counts.values()))]).astype(np.int32)
        batch = StepBatch(
            np.array(ids),
            np.array(positions),
            starts,
            np.array([self.cached[number] for number in numbers], np.int32),
            self.blocks.tables(numbers),
            starts[1:].astype(np.int64) - 1,
        )
        for number, count in counts.items():
            self.cached[number] += count
        return dict(zip(numbers, self.step.logits(batch), strict=True))


@pytest.fixture(params=list(FAMILIES))
def decoder(request):
    decoder = tiny_model(seed=2, **FAMILIES[request.param])
    decoder.to(dtype="float64")  # one of them amplifies rounding
    return decoder


def texts_of(*lengths):
    rng = np.random.default_rng(1)
    return [rng.integers(1, 53, length).tolist() for length in lengths]


def check(found, sequences, expected):
    for number, logits in found.items():
        np.testing.assert_allclose(
            logits, expected[number][sequences.cached[number] - 1], rtol=0, atol=1e-6 * np.abs(expected[number]).max()
        )


def test_mixed_steps_equal_one_forward_pass(decoder, monkeypatch):
    """Answers of several lengths, prompts that begin and prompts that go on in one step, in any order."""
    monkeypatch.setattr(cache_attention, "QUERY_TILE", 7)
    texts = texts_of(60, 5, 40, 100, 18)
    expected = [logits_of(decoder, text) for text in texts]
    sequences = Sequences(decoder, texts)
    for counts in (
        {2: 1, 0: 30},
        {0: 1, 1: 2, 2: 1},
        {3: 33, 0: 1, 2: 17, 1: 1},
        {0: 20, 4: 16, 3: 1, 2: 1, 1: 1},
        {4: 1, 3: 1, 2: 1, 0: 1},
        {3: 50, 4: 1},
        {0: 1, 2: 1, 3: 1},
    ):
        check(sequences.advance(counts), sequences, expected)


def test_logits_come_in_the_order_in_which_they_are_wanted():
    decoder = tiny_model()
    texts = texts_of(20, 9)
    sequences = Sequences(decoder, texts)
    sequences.advance({0: 19})
    blocks = sequences.blocks
    assert blocks.extend(0, 20) and blocks.extend(1, 9)
    batch = StepBatch(
        np.array([*texts[1], texts[0][19]]),
        np.array([*range(9), 19]),
        np.array([0, 9, 10], np.int32),
        np.array([0, 19], np.int32),
        blocks.tables([1, 0]),
        np.array([9, 3, 8]),
    )
    found = sequences.step.logits(batch)
    own, other = logits_of(decoder, texts[0]), logits_of(decoder, texts[1])
    np.testing.assert_allclose(found, [own[19], other[3], other[8]], rtol=0, atol=1e-4)


def test_a_step_may_want_no_logits_and_keeps_the_mode():
    decoder = tiny_model(hidden_dropout=0.5, attention_dropout=0.5)
    decoder.train()
    (text,) = texts_of(20)
    blocks = BlockTables(4)
    blocks.extend(0, 20)
    step = DecoderStep(decoder, 4)
    first = StepBatch(
        np.array(text[:12]), np.arange(12), np.array([0, 12], np.int32), np.zeros(1, np.int32), blocks.tables([0]),
        np.zeros(0, np.int64),
    )  # fmt: skip
    assert step.logits(first).shape == (0, 53)
    second = StepBatch(
        np.array(text[12:]), np.arange(12, 20), np.array([0, 8], np.int32), np.array([12], np.int32),
        blocks.tables([0]), np.array([7]),
    )  # fmt: skip
    found = step.logits(second)
    assert decoder.training
    decoder.eval()
    np.testing.assert_allclose(found[0], logits_of(decoder, text)[-1], rtol=0, atol=1e-4)


def test_numbers_that_overflow_stay_with_their_sequence():
    """Beside others in one step, and in blocks that another request gets afterwards."""
    decoder = tiny_model(tie_word_embeddings=False)
    embedding = decoder.embedding.weight.numpy()
    embedding[52] = np.nan
    decoder.embedding.weight.set_value(embedding)
    broken, *texts = [[52] * 40, *texts_of(9, 50, 12)]
    texts = [[token % 52 for token in text] for text in texts]
    sequences = Sequences(decoder, [texts[0], broken, texts[1], broken, texts[2]])
    expected = [logits_of(decoder, text) for text in texts]

    def advance(counts):
        found = sequences.advance(counts)
        assert np.isnan(found.pop(1)).all() and np.isnan(found.pop(3, np.nan)).all()
        own = {(0, 2, 4).index(number): logits for number, logits in found.items()}
        for number, logits in own.items():
            last = sequences.cached[(0, 2, 4)[number]] - 1
            np.testing.assert_allclose(logits, expected[number][last], rtol=0, atol=1e-4)

    advance({0: 8, 1: 20, 2: 30})
    advance({2: 10, 1: 1, 3: 10, 4: 5, 0: 1})
    for number in (1, 3, 4):
        sequences.blocks.release(number)
    sequences.cached[4] = 0
    for count in (11, 1):  # the second product reads all of a block that a broken sequence had
        found = sequences.advance({4: count})[4]
        np.testing.assert_allclose(found, expected[2][sequences.cached[4] - 1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["ernie4_5", "experts"])
def test_text_is_generated_in_float32_where_training_computes_in_bfloat16(family):
    plain, trained = (tiny_model(seed=2, **FAMILIES[family]) for _ in range(2))
    CpuBFloat16().apply_to(trained)
    (text,) = texts_of(20)
    found, expected = (Sequences(decoder, [text]).advance({0: 20})[0] for decoder in (trained, plain))
    np.testing.assert_array_equal(found, expected)
    assert np.abs(logits_of(trained, text)[-1] - expected).max() > 1e-3 * np.abs(expected).max()


def test_products_are_shared_by_lengths_up_to_twice_as_long():
    classes = length_classes(np.array([1, 15, 16, 31, 32, 63, 64, 100, 127, 128]))
    assert classes.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3, 4]


def test_answers_do_not_change_where_prompts_go_in_chunks_and_memory_is_short():
    decoder = tiny_model(seed=4)
    prompts = texts_of(3, 45, 20, 33)
    expected = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(logits_of(decoder, tokens)[-1].argmax()))
        expected.append(tokens[len(prompt) :])
    for blocks, settings in ((9, {"step_tokens": 10, "max_running": 3}), (64, {"step_tokens": 64, "max_running": 4})):
        scheduler = Scheduler(DecoderStep(decoder, blocks), blocks, **settings)
        for prompt in prompts:
            scheduler.submit(Request(prompt, Sampling(), 12))
        answers = {number: [] for number in range(4)}
        while scheduler.unfinished:
            for event in scheduler.step():
                answers[event.request].append(event.token)
        assert list(answers.values()) == expected


def test_blocks_have_room_for_the_longest_request_and_a_bound():
    decoder = tiny_model()
    bytes_of_a_block = 2 * 4 * BLOCK_TOKENS * 2 * 4 * 2  # keys and values, heads, their size, layers
    assert block_count(decoder) == CACHE_BYTES // bytes_of_a_block
    latent = tiny_model(model_type="deepseek_v3")
    assert block_count(latent) == CACHE_BYTES // (2 * 4 * BLOCK_TOKENS * 4 * 10 * 2)
    long = tiny_model(max_position_embeddings=1 << 30)
    assert block_count(long) == (1 << 30) // BLOCK_TOKENS


def test_any_number_of_requests_may_run_side_by_side():
    scheduler = open_scheduler(tiny_model(), max_running=600)
    for _ in range(600):
        scheduler.submit(Request([1], Sampling(), 2))
    assert len(scheduler.step()) == 600


def test_memory_is_taken_as_it_is_used():
    decoder = tiny_model()
    step = DecoderStep(decoder, block_count(decoder))
    scheduler = Scheduler(step, block_count(decoder))
    scheduler.submit(Request([1, 2, 3], Sampling(), 40))
    while scheduler.unfinished:
        scheduler.step()
    assert step._blocks.count == 4


def test_memory_is_not_taken_beyond_the_blocks_that_there_are():
    """It doubles as it grows."""
    step = DecoderStep(tiny_model(), 5)
    scheduler = Scheduler(step, 5)
    scheduler.submit(Request([1, 2, 3], Sampling(), 70))
    while scheduler.unfinished:
        scheduler.step()
    assert step._blocks.count == 5


def test_a_model_gets_the_step_that_can_compute_it(monkeypatch):
    gathered = tiny_model()
    gathered.layers[0].register_forward_pre_hook(lambda layer, inputs: None)  # as where ranks divide parameters
    for decoder in (tiny_model(model_type="qwen2_moe"), gathered):
        assert isinstance(open_scheduler(decoder)._step, DecoderStep)
    monkeypatch.setattr(library, "function", lambda name, arguments: None)  # as with `cpu_kernels: paddle`
    assert isinstance(open_scheduler(tiny_model())._step, DecoderStep)


def test_a_plain_model_gets_the_native_step(native_path):
    assert isinstance(open_scheduler(tiny_model())._step, NativeStep)
