"""The objective over pairs as a whole: its gradient is the slope of its loss, and its passes leave the model alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from erniekit.config.sections.dpo import DpoParameters
from erniekit.config.sections.moe import MoeParameters
from erniekit.data.collate import collate
from erniekit.data.pairs import EncodedAnswer, join_pair
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import add_adapters, named_adapter_weights, named_trainable_parameters
from erniekit.model.weights import named_weights
from erniekit.training.objectives import preference as preference_module
from erniekit.training.objectives.preference import answer_log_probabilities, preference, reference_logps_function
from erniekit.training.objectives.preference_losses import LOSSES
from erniekit.training.objectives.reference import AdapterReference, FrozenReference, set_values
from erniekit.training.step import train_step

from ..model.tiny import EXPERTS, tiny_model


def pairs(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    for number, sizes in enumerate(lengths):
        prompt, chosen, rejected = (rng.integers(1, 53, size).tolist() for size in sizes)
        yield join_pair(prompt, EncodedAnswer(chosen, chosen), EncodedAnswer(rejected, rejected), 1.0 + number)


def batch_of(*lengths, seed=0):
    samples = list(pairs(*lengths, seed=seed))
    return collate([samples], [list(range(len(samples)))], 0, pairs=True)


measure = reference_logps_function(answer_log_probabilities())


def settings_of(name, **changes):
    noise = {"label_smoothing": 0.1} if name in ("sigmoid", "robust", "simpo") else {}
    return DpoParameters(loss_type=name, **{"beta": 0.2, "sft_loss_ratio": 0.3, "dpop_lambda": 3.0, **noise, **changes})


@pytest.mark.parametrize("changes", [{}, {"normalize_logps": True, "pref_loss_ratio": 0.5}], ids=["sums", "rescaled"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_the_slope_of_the_loss(name, changes):
    """Along a random direction of all weights. KTO's divergence counts as a constant, so its step is fixed first."""
    decoder, other = tiny_model(), tiny_model(seed=5)
    batch = batch_of((6, 4, 7), (3, 5, 2), (4, 1, 3))
    objective = preference(settings_of(name, **changes), FrozenReference(other, decoder, measure, updated=False))
    loss = objective.loss_for(decoder, [batch])
    loss(decoder, batch).loss_sum.backward()
    rng = np.random.default_rng(1)
    weights = named_weights(decoder)
    values = {key: weight.numpy().copy() for key, weight in weights.items()}
    directions = {key: rng.standard_normal(value.shape).astype(np.float32) for key, value in values.items()}
    expected = sum(float((weights[key].grad.numpy().astype(np.float64) * directions[key]).sum()) for key in weights)

    def at(step):
        set_values(weights, {key: value + np.float32(step) * directions[key] for key, value in values.items()})
        with paddle.no_grad():
            return float(loss(decoder, batch).loss_sum)

    step = 1e-3
    slope = (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step)  # error of order step^4
    assert abs(expected) > 1e-3
    assert slope == pytest.approx(expected, rel=2e-2)


def test_kto_and_references_leave_routers_alone():
    """Only the pass that learns counts for the balance of experts: what else runs through the model does not."""

    def biases(reference_of, name):
        decoder = tiny_model(**EXPERTS)
        decoder.balance.section = MoeParameters(moe_aux_loss_lambda=0.1, moe_router_bias_update_rate=0.01)
        decoder.train()
        reference = reference_of(decoder)
        objective = preference(settings_of(name, reference_free=reference is None), reference)
        weights = [weight for weight in named_weights(decoder).values() if not weight.stop_gradient]
        batches = [batch_of((6, 4, 7), (3, 5, 2), seed=1), batch_of((9, 2, 2), seed=2)]
        optimizer = paddle.optimizer.SGD(0.0, parameters=weights)
        result = train_step(decoder, weights, optimizer, objective, batches, step=0, learning_rate=0.0)
        moved = [
            weight.numpy() for key, weight in named_weights(decoder).items() if key.endswith("e_score_correction_bias")
        ]
        return np.concatenate(moved), result.totals.metrics["router_aux_loss"]

    expected, figure = biases(lambda decoder: None, "orpo")
    assert (np.abs(expected) > 0).any()
    for name in ("sigmoid", "kto_pair"):
        # the model itself as its reference, in the midst of the step, as with adapters put aside
        moved, shown = biases(lambda decoder: AdapterReference(decoder, measure), name)
        np.testing.assert_array_equal(moved, expected)
        assert shown == pytest.approx(figure, rel=1e-5)


def test_dropout_is_drawn_as_if_nothing_else_ran():
    """The passes of the reference and of KTO's divergence take no random number from the pass that learns."""

    def step_of(measured):
        decoder = tiny_model(hidden_dropout=0.3, attention_dropout=0.2)
        add_adapters(decoder, LoraSettings(4, 8.0, dropout=0.1), seed=0)
        decoder.train()
        batches = [batch_of((6, 4, 7), (3, 5, 2), seed=1), batch_of((9, 2, 2), seed=2)]
        weights = list(named_trainable_parameters(decoder).values())
        optimizer = paddle.optimizer.SGD(1.0, parameters=weights)
        reference = AdapterReference(decoder, measure)
        if measured:
            table = reference(batches)

            def reference(asked):
                return [table[next(number for number, own in enumerate(batches) if own is batch)] for batch in asked]

        objective = preference(settings_of("kto_pair"), reference)
        train_step(decoder, weights, optimizer, objective, batches, step=3, learning_rate=1.0)
        return {key: weight.numpy() for key, weight in named_adapter_weights(decoder).items()}

    passes, table = step_of(measured=False), step_of(measured=True)
    for key, values in passes.items():
        np.testing.assert_array_equal(values, table[key], err_msg=key)


@pytest.mark.parametrize("training", [True, False])
def test_the_pass_over_the_step_puts_the_mode_back_and_leaves_no_gradient(training):
    decoder = tiny_model()
    decoder.train() if training else decoder.eval()
    reference = FrozenReference(tiny_model(seed=5), decoder, measure, updated=False)
    objective = preference(settings_of("kto_pair"), reference)
    objective.loss_for(decoder, iter([batch_of((6, 4, 7)), batch_of((3, 5, 2), seed=1)]))
    assert decoder.training is training
    assert all(layer.training is training for layer in decoder.sublayers())
    assert all(weight.grad is None for weight in named_weights(decoder).values())


def test_the_divergence_of_kto_is_measured_without_dropout():
    decoder = tiny_model(hidden_dropout=0.4)
    objective = preference(
        settings_of("kto_pair"), FrozenReference(tiny_model(seed=5), decoder, measure, updated=False)
    )
    batch = batch_of((6, 4, 7), (3, 5, 2))
    decoder.train()
    decoder.begin_micro_batch(step=7, micro_batch=0, dropout_scale=1.0, loss_weight=1.0)
    found = objective.loss_for(decoder, [batch])
    decoder.eval()
    expected = objective.loss_for(decoder, [batch])
    (answers,), (other,) = measure(decoder, [batch]), measure(tiny_model(seed=5), [batch])
    assert max(float((own - its).mean()) for own, its in zip(answers, other, strict=True)) > 0  # it counts
    assert float(found(decoder, batch).loss_sum) == float(expected(decoder, batch).loss_sum)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reference", ["none", "copy"])
def test_figures_are_numbers_and_those_that_mean_something(name, reference):
    decoder = tiny_model()
    other = FrozenReference(tiny_model(seed=5), decoder, measure, updated=False) if reference == "copy" else None
    settings = settings_of(name, reference_free=reference == "none", sft_loss_ratio=0.0)
    batch = batch_of((6, 4, 7), (3, 5, 2))
    micro_loss = preference(settings, other).loss_for(decoder, [batch])(decoder, batch)
    metric_sums = {key: float(value) for key, value in micro_loss.metric_sums.items()}
    assert np.isfinite(list(metric_sums.values())).all()
    compared = reference == "copy" and not LOSSES[name].length_normalized
    assert ("kl_to_reference" in metric_sums) is compared
    assert ("sft_loss" in metric_sums) is (name == "orpo")
    assert metric_sums["reward_margin"] == pytest.approx(
        metric_sums["reward_chosen"] - metric_sums["reward_rejected"], rel=1e-4, abs=1e-5
    )
    assert 0 <= metric_sums["reward_accuracy"] <= batch.pairs.count


def test_the_weights_of_the_parts():
    """ORPO's own SFT loss counts as a part of it, the one that is asked for on top does not."""
    decoder, batch = tiny_model(), batch_of((6, 4, 7), (3, 5, 2))
    for name, own in (("orpo", 1.0), ("simpo", 0.0)):
        found = preference(settings_of(name, pref_loss_ratio=0.5, sft_loss_ratio=0.25)).loss(decoder, batch)
        part, sft = float(found.metric_sums["preference_loss"]), float(found.metric_sums["sft_loss"])
        assert float(found.loss_sum) == pytest.approx(0.5 * (part + own * sft) + 0.25 * sft, rel=1e-6)


def test_a_loss_without_a_reference_never_asks_for_one():
    def refuse(batch):
        raise AssertionError("asked")

    decoder, batch = tiny_model(), batch_of((6, 4, 7))
    for settings in (settings_of("simpo"), settings_of("orpo"), settings_of("sigmoid", reference_free=True)):
        preference(settings, refuse).loss(decoder, batch)
    with pytest.raises(AssertionError, match="asked"):
        preference(settings_of("sigmoid"), refuse).loss(decoder, batch)


def test_the_reference_is_asked_before_the_model_runs():
    """It may borrow the model, whose graph would then be of other adapters."""
    order = []

    class Watched:
        def __init__(self, decoder):
            self.decoder = decoder

        def forward_layers(self, *given):
            order.append("model")
            return self.decoder.forward_layers(*given)

        def __getattr__(self, name):
            return getattr(self.decoder, name)

    def reference(batches):
        order.append("reference")
        return [(paddle.zeros([1]), paddle.zeros([1]))]

    preference(settings_of("sigmoid"), reference).loss(Watched(tiny_model()), batch_of((6, 4, 7)))
    assert order == ["reference", "model"]


def test_sums_over_long_answers_keep_their_digits(monkeypatch):
    """A running sum in float32 would be off by 1e-5 and more."""
    count, rng = 30_000, np.random.default_rng(0)
    values = -rng.exponential(2.0, (2, count)).astype(np.float32)
    tokens = SimpleNamespace(values=paddle.to_tensor(values.reshape(-1)))
    monkeypatch.setattr(preference_module, "token_log_probabilities", lambda *inputs, **heads: tokens)
    prompt, chosen, rejected = [1], [2] * count, [3] * count
    sample = join_pair(prompt, EncodedAnswer(chosen, chosen), EncodedAnswer(rejected, rejected))
    batch = collate([[sample]], [[0]], 0, pairs=True)
    decoder = SimpleNamespace(norm=lambda states: states)
    answers = answer_log_probabilities().loss_head(decoder, paddle.zeros([1, 2 * count + 1, 1]), None, batch, None)
    found = [float(answers.chosen), float(answers.rejected)]
    np.testing.assert_allclose(found, values.astype(np.float64).sum(1), rtol=1e-7)
    assert (float(answers.chosen_lengths), float(answers.rejected_lengths)) == (count, count)
