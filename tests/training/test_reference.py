"""A reference stays what the model was, however it is kept, and puts the model back as it found it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from erniekit.errors import TrainingError
from erniekit.model import bf16
from erniekit.model.cpu_precision import CpuBFloat16
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import (
    add_adapters,
    load_adapters,
    named_adapter_weights,
    named_trainable_parameters,
    save_adapters,
)
from erniekit.model.weights import named_weights
from erniekit.training.objectives.reference import (
    AdapterReference,
    FrozenReference,
    PrecomputedReference,
    clone_tensors,
    has_missing_logps,
    precompute_missing_logps,
    set_values,
)

from ..model.tiny import pack, tiny_model
from .fakes import RecordingRanks, ReplayedRanks

KINDS = {
    "LoRA": LoraSettings(4, 8.0),
    "DoRA": LoraSettings(4, 8.0, dora=True),
    "PiSSA": LoraSettings(4, 8.0, init="pissa"),
}


def batch(*samples):
    return SimpleNamespace(samples=(tuple(samples),))


def answers(decoder, batch):
    """Two different sums of log-probabilities for each sample, of tokens that depend on its number."""
    chosen, rejected = [], []
    for sample in batch.samples[0]:
        ids = (np.arange(8) * (3 + sample) + sample) % 53
        log_probabilities = paddle.nn.functional.log_softmax(decoder.head(decoder(*pack(ids, [8]))))[0]
        chosen.append(log_probabilities[:4].diagonal().sum())
        rejected.append(log_probabilities[4:].diagonal().sum())
    return paddle.stack(chosen), paddle.stack(rejected)


def measure(decoder, batches):
    return [answers(decoder, batch) for batch in batches]


def of(reference, batch):
    (constants,) = reference([batch])
    return constants


def values(pair):
    return np.stack([part.numpy() for part in pair])


def stir(tensors, seed):
    rng = np.random.default_rng(seed)
    for tensor in tensors.values():
        tensor.set_value(tensor.numpy() + rng.standard_normal(tensor.shape).astype(np.float32) * 0.1)


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_adapters_aside_give_the_model_as_it_was(settings):
    model = tiny_model()
    before = values(answers(model, batch(0, 1)))
    add_adapters(model, settings, seed=3)
    started = clone_tensors(named_adapter_weights(model)) if settings.init == "pissa" else None
    reference = AdapterReference(model, measure, started)
    stir(named_trainable_parameters(model), 4)
    model.train()
    trained = values(answers(model, batch(0, 1)))

    np.testing.assert_allclose(values(of(reference, batch(0, 1))), before, rtol=2e-5)
    assert np.abs(trained - before).max() > 0.01  # the adapters do have an effect
    np.testing.assert_array_equal(values(answers(model, batch(0, 1))), trained)
    assert model.training


def test_gradients_are_those_of_the_trained_adapters():
    """The pass of the reference leaves no trace in the graph of the model's own."""

    def gradients(with_reference):
        model = tiny_model()
        add_adapters(model, KINDS["LoRA"], seed=3)
        stir(named_trainable_parameters(model), 4)
        reference = AdapterReference(model, measure, {name: 0 * w for name, w in named_adapter_weights(model).items()})
        if with_reference:
            assert all(part.stop_gradient for part in of(reference, batch(0)))
        answers(model, batch(0))[0].sum().backward()
        return [parameter.grad.numpy() for parameter in named_trainable_parameters(model).values()]

    for with_reference, without in zip(gradients(True), gradients(False), strict=True):
        np.testing.assert_array_equal(with_reference, without)


def test_adapters_that_take_turns_in_a_step_are_rounded_anew():
    """A step in bfloat16 rounds each weight once, but these have other values while the reference is asked."""
    model = tiny_model()
    add_adapters(model, KINDS["LoRA"], seed=3)
    stir(named_trainable_parameters(model), 4)
    CpuBFloat16().apply_to(model)
    reference = AdapterReference(model, measure, clone_tensors(named_adapter_weights(model)))
    stir(named_trainable_parameters(model), 5)

    def both():
        return values(of(reference, batch(0))), values(answers(model, batch(0)))

    expected = both()
    assert np.abs(expected[1] - expected[0]).max() > 0.01
    with bf16.weights_stay():
        for _ in range(2):
            np.testing.assert_array_equal(both(), expected)


def test_adapters_are_put_back_after_an_error():
    model = tiny_model()
    add_adapters(model, KINDS["LoRA"], seed=3)
    stir(named_trainable_parameters(model), 4)
    trained = values(answers(model, batch(0)))

    def broken(decoder, batches):
        raise KeyboardInterrupt

    for adapters in (None, clone_tensors(named_adapter_weights(model))):
        with pytest.raises(KeyboardInterrupt):
            AdapterReference(model, broken, adapters)([batch(0)])
        np.testing.assert_array_equal(values(answers(model, batch(0))), trained)


@pytest.mark.parametrize("adapters", [True, False])
def test_an_updated_reference_is_the_model_of_that_moment(adapters):
    model = tiny_model()
    if adapters:
        add_adapters(model, KINDS["LoRA"], seed=3)
        reference = AdapterReference(model, measure)
        assert not reference.tensors()  # the base model is its reference: nothing to keep
    else:
        reference = FrozenReference(tiny_model(), model, measure, updated=True)
    stir(named_trainable_parameters(model), 4)
    then = values(answers(model, batch(0)))
    assert not np.allclose(values(of(reference, batch(0))), then, rtol=1e-3)
    reference.update()
    kept = {name: tensor.numpy() for name, tensor in reference.tensors().items()}
    stir(named_trainable_parameters(model), 5)
    np.testing.assert_allclose(values(of(reference, batch(0))), then, rtol=1e-6)

    # what a checkpoint keeps is enough to go on
    if adapters:
        resumed = AdapterReference(model, measure, {name: paddle.to_tensor(value) for name, value in kept.items()})
    else:
        copy = tiny_model(seed=9)
        set_values(named_weights(copy), kept)
        resumed = FrozenReference(copy, model, measure, updated=True)
    np.testing.assert_array_equal(values(of(resumed, batch(0))), values(of(reference, batch(0))))


def test_a_copy_is_not_trained_and_is_kept_only_where_it_changes():
    model = tiny_model()
    copy = FrozenReference(tiny_model(), model, measure, updated=False)
    assert not copy.tensors()
    before = values(of(copy, batch(0)))
    stir(named_weights(model), 1)
    assert all(part.stop_gradient for part in of(copy, batch(0)))
    np.testing.assert_array_equal(values(of(copy, batch(0))), before)


def test_a_reference_that_gives_no_number_is_told_with_the_pair():
    model = tiny_model()
    norm = named_weights(model)["model.norm.weight"]
    norm.set_value(np.full(norm.shape, np.nan, np.float32))
    table = np.full((5, 2), np.nan, np.float32)
    with pytest.raises(TrainingError, match=r"^pairs.jsonl:4: .* not finite to 2 of 2 pairs"):
        precompute_missing_logps(table, [batch(3, 1)], model, measure, lambda sample: f"pairs.jsonl:{sample + 1}")


def test_pairs_are_measured_once():
    model = tiny_model(hidden_dropout=0.5)
    model.train()
    table = np.full((5, 2), np.nan, np.float32)
    calls = []

    def counted(decoder, batches):
        assert not decoder.training  # without dropout
        calls.extend(batch.samples[0] for batch in batches)
        return measure(decoder, batches)

    batches = [batch(3, 1), batch(1, 3), batch(1, 4)]  # the same pairs again in another epoch
    assert has_missing_logps(table, batches)
    assert precompute_missing_logps(table, batches, model, counted) == 3
    assert calls == [(3, 1), (1, 4)]
    assert not has_missing_logps(table, batches)
    assert has_missing_logps(table, [batch(0)])
    assert precompute_missing_logps(table, batches, model, counted) == 0
    assert model.training

    model.eval()
    stored = PrecomputedReference(table)
    np.testing.assert_allclose(values(of(stored, batch(4, 1))), values(answers(model, batch(4, 1))), rtol=1e-6)
    with pytest.raises(AssertionError, match="not measured"):
        of(stored, batch(0))
    assert not stored.tensors()


def test_continued_adapters_are_their_own_reference(tmp_path):
    first = tiny_model()
    add_adapters(first, KINDS["LoRA"], seed=3)
    stir(named_trainable_parameters(first), 4)
    save_adapters(first, tmp_path, "base")
    model = tiny_model()
    load_adapters(model, tmp_path)
    start = values(answers(model, batch(2)))
    reference = AdapterReference(model, measure, clone_tensors(named_adapter_weights(model)))
    stir(named_trainable_parameters(model), 5)
    np.testing.assert_array_equal(values(of(reference, batch(2))), start)


def test_a_pipeline_is_given_several_batches_at_once():
    """A pair that comes twice among them counts once; batches of which everything is known are left out."""
    ranks, model, turns = RecordingRanks(), tiny_model(), []
    ranks.num_forward_batches = 3
    table = np.full((6, 2), np.nan, np.float32)
    table[5] = -1.0

    def counted(decoder, some):
        turns.append([own.samples[0] for own in some])
        return measure(decoder, some)

    batches = [batch(3, 1), batch(5), batch(1, 2), batch(5)]
    assert precompute_missing_logps(table, batches, model, counted, ranks=ranks) == 3
    assert turns == [[(3, 1), (1, 2)]]
    assert table[5].tolist() == [-1.0, -1.0] and np.isnan(table[[0, 4]]).all() and np.isfinite(table[1:4]).all()


def test_ranks_measure_their_own_pairs_and_have_those_of_all():
    """Rank 1 knows its pairs already, and goes through the model as often as rank 0 all the same."""
    model = tiny_model()
    whole = np.full((5, 2), np.nan, np.float32)
    precompute_missing_logps(whole, [batch(3, 1), batch(4, 2)], model, measure)
    known = np.full((5, 2), np.nan, np.float32)
    known[[2, 4]] = whole[[2, 4]]
    of_ranks = [(np.full((5, 2), np.nan, np.float32), [batch(3, 1)]), (known, [batch(4, 2)])]
    recordings = [RecordingRanks(), RecordingRanks()]
    for (table, batches), ranks in zip(of_ranks, recordings, strict=True):
        precompute_missing_logps(table.copy(), batches, model, measure, ranks=ranks)
    for table, batches in of_ranks:
        turns = []

        def counted(decoder, some, turns=turns):
            turns.append(len(some))
            return measure(decoder, some)

        ranks = ReplayedRanks(*(recording.asked for recording in recordings))
        assert precompute_missing_logps(table, batches, model, counted, ranks=ranks) == 2
        assert turns == [1]
        np.testing.assert_allclose(table, whole, rtol=1e-5)
        assert np.isnan(table[0]).all()
