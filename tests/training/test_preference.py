"""Packed pairs give what separate dialogues give, and the loss does not depend on how pairs lie in batches."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.config.sections.dpo import DpoParameters
from erniekit.data.collate import collate
from erniekit.data.pairs import EncodedAnswer, join_pair
from erniekit.data.templates.ernie import Sample
from erniekit.model.weights import named_weights
from erniekit.training.evaluation import evaluate
from erniekit.training.objectives.objective import supervised
from erniekit.training.objectives.preference import answer_log_probabilities, preference, reference_logps_function
from erniekit.training.objectives.preference_losses import LOSSES
from erniekit.training.objectives.reference import FrozenReference
from erniekit.training.step import train_step

from ..model.tiny import tiny_model

RNG = np.random.default_rng(0)
LENGTHS = [(9, 4, 6), (1, 3, 1), (5, 7, 2), (12, 1, 5)]
TOKENS = [[RNG.integers(1, 53, length).tolist() for length in lengths] for lengths in LENGTHS]


def joined(window=None):
    return [
        join_pair(prompt, EncodedAnswer(chosen, chosen), EncodedAnswer(rejected, rejected), 1.0 + number, window)
        for number, (prompt, chosen, rejected) in enumerate(TOKENS)
    ]


PAIRS = joined()
HEADS = [{}, {"sparse_head": True}, {"fused_head": True}, {"dense_mask": True}]
# pairs of the rows of micro-batches
LAYOUTS = {
    "one row": [[[0, 1, 2, 3]]],
    "four micro-batches": [[[0]], [[1]], [[2]], [[3]]],
    "four rows": [[[0], [1], [2], [3]]],
    "mixed": [[[2, 0], [3]], [[1]]],
    "with an empty one": [[[0, 1, 2, 3]], [[]]],
}


def batches(layout):
    return [collate([[PAIRS[i] for i in row] for row in rows], rows, 0, pairs=True) for rows in LAYOUTS[layout]]


def documents():
    """The same dialogues as single documents, one to a batch: chosen and rejected of each pair in turn."""
    for prompt, *answers in TOKENS:
        for answer in answers:
            tokens = prompt + answer
            labels = [-100] * (len(prompt) - 1) + answer
            yield collate([[Sample(np.array(tokens[:-1], np.int32), np.array(labels, np.int32))]], [[0]], 0)


def gradients(decoder):
    return {name: weight.grad.numpy().copy() for name, weight in named_weights(decoder).items()}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [{}, {"model_type": "qwen3", "num_key_value_heads": 4}])
def test_packed_answers_have_the_log_probabilities_of_separate_dialogues(heads, layout, shape):
    decoder = tiny_model(**shape)
    weights = RNG.standard_normal((len(PAIRS), 2)).astype(np.float32)
    alone = supervised()
    sums = []
    for number, document in enumerate(documents()):
        loss = alone.loss(decoder, document).loss_sum
        (-loss * float(weights[divmod(number, 2)])).backward()
        sums.append(-float(loss))
    expected, expected_gradients = np.array(sums).reshape(-1, 2), gradients(decoder)

    decoder.clear_gradients()
    found = np.full((len(PAIRS), 2), np.nan)
    for batch in batches(layout):
        answers = answer_log_probabilities(**heads)(decoder, batch)
        order = [sample for row in batch.samples for sample in row]
        if order:
            found[order] = np.stack([answers.chosen.numpy(), answers.rejected.numpy()], 1)
            assert answers.chosen_lengths.numpy().tolist() == [LENGTHS[i][1] for i in order]
            assert answers.rejected_lengths.numpy().tolist() == [LENGTHS[i][2] for i in order]
        weighted = paddle.to_tensor(weights[order].reshape(-1, 2))
        (answers.chosen * weighted[:, 0] + answers.rejected * weighted[:, 1]).sum().backward()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for name, gradient in gradients(decoder).items():
        scale = np.abs(expected_gradients[name]).max()
        np.testing.assert_allclose(gradient, expected_gradients[name], atol=1e-4 * scale, err_msg=name)


@pytest.mark.parametrize("dense_mask", [False, True])
@pytest.mark.parametrize("model_type", ["mistral", "gpt_oss"])  # the second has sinks, too
def test_answers_see_their_prompt_through_a_window_as_separate_dialogues_do(model_type, dense_mask):
    decoder = tiny_model(model_type=model_type, sliding_window=6)
    assert decoder.config.windows == {6}
    alone = supervised()
    expected = [-float(alone.loss(decoder, document).loss_sum) for document in documents()]
    samples = joined(window=6)
    assert [len(sample.documents) for sample in samples] == [1, 0, 1, 1]
    measure = answer_log_probabilities(dense_mask=dense_mask)
    found = measure(decoder, collate([samples], [range(4)], 0, pairs=True))
    np.testing.assert_allclose(np.stack([found.chosen, found.rejected], 1).ravel(), expected, rtol=1e-6)
    with pytest.raises(AssertionError, match="share a prompt"):  # what would be wrong cannot be computed
        measure(decoder, collate([PAIRS], [range(4)], 0, pairs=True))


def step_of(name, layout, **changes):
    """The gradient of the step before clipping, and its figures."""
    decoder = tiny_model()
    decoder.train()
    reference = FrozenReference(
        tiny_model(seed=5), decoder, reference_logps_function(answer_log_probabilities()), updated=False
    )
    settings = DpoParameters(loss_type=name, beta=0.3, **{"sft_loss_ratio": 0.5, **changes})
    objective = preference(settings, reference, sparse_head=True)
    parameters = list(named_weights(decoder).values())
    optimizer = paddle.optimizer.SGD(1.0, parameters=parameters)
    before = {key: weight.numpy() for key, weight in named_weights(decoder).items()}
    result = train_step(decoder, parameters, optimizer, objective, batches(layout), step=0, learning_rate=1.0)
    after = {key: weight.numpy() for key, weight in named_weights(decoder).items()}
    return {key: before[key] - after[key] for key in before}, result


VARIANTS = [(name, {}) for name in LOSSES] + [
    ("sigmoid", {"offset_alpha": 1.0, "label_smoothing": 0.1}), ("ipo", {"normalize_logps": True}),
    ("kto_pair", {"normalize_logps": True, "pref_loss_ratio": 0.5}), ("nca_pair", {"reference_free": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_accumulation_and_packing_change_nothing(name, changes):
    if name == "robust":
        changes = {**changes, "label_smoothing": 0.1}
    expected, first = step_of(name, "one row", **changes)
    assert first.totals.units == 4
    assert max(np.abs(gradient).max() for gradient in expected.values()) > 1e-4
    for layout in list(LAYOUTS)[1:]:
        found, result = step_of(name, layout, **changes)
        assert result.totals.loss == pytest.approx(first.totals.loss, rel=2e-6, abs=1e-7), layout
        assert result.totals.metrics == pytest.approx(first.totals.metrics, rel=1e-5, abs=1e-6), layout
        for key, gradient in found.items():
            scale = np.abs(expected[key]).max()
            np.testing.assert_allclose(gradient, expected[key], atol=1e-4 * scale, err_msg=f"{layout} {key}")


def test_the_divergence_of_kto_is_that_of_the_step():
    """A wrong one, of the micro-batch, would show."""
    decoder, other = tiny_model(), tiny_model(seed=5)
    reference = FrozenReference(other, decoder, reference_logps_function(answer_log_probabilities()), updated=False)
    objective = preference(DpoParameters(loss_type="kto_pair"), reference)
    whole = objective.loss_for(decoder, batches("one row"))(decoder, batches("one row")[0]).loss_sum
    parts = objective.loss_for(decoder, batches("four micro-batches"))
    apart = sum(float(parts(decoder, batch).loss_sum) for batch in batches("four micro-batches"))
    alone = sum(
        float(objective.loss_for(decoder, [batch])(decoder, batch).loss_sum) for batch in batches("four micro-batches")
    )
    assert apart == pytest.approx(float(whole), rel=1e-6)
    assert abs(alone - apart) > 1e-3 * abs(apart)
    assert decoder.training  # put back after the pass over the step


class Plan:
    def __init__(self, layout):
        self.batches = batches(layout)

    def steps_in_epoch(self, epoch):
        return len(self.batches)

    def micro_batches(self, step):
        return [self.batches[step]]

    def source_of(self, step):
        return "pairs"

    dp_rank, dp_world_size = 0, 1

    def local_steps(self, stop):
        return enumerate(self.batches[:stop])


@pytest.mark.parametrize("name", LOSSES)
def test_evaluation_does_not_depend_on_the_batches(name):
    decoder = tiny_model()
    other = tiny_model(seed=5)
    reference = FrozenReference(other, decoder, reference_logps_function(answer_log_probabilities()), updated=False)
    settings = DpoParameters(loss_type=name, label_smoothing=0.1 if name == "robust" else 0.0)
    results = [evaluate(decoder, Plan(layout), preference(settings, reference)) for layout in LAYOUTS]
    for result in results:
        assert result.units == 4 and result.perplexity is None
        assert result.loss == pytest.approx(results[0].loss, rel=2e-6)
        assert result.metrics == pytest.approx(results[0].metrics, rel=1e-5, abs=1e-6)


def test_figures_mean_what_they_say():
    _, result = step_of("sigmoid", "mixed", sft_loss_ratio=0.0)
    metrics = result.totals.metrics
    decoder, other = tiny_model(), tiny_model(seed=5)
    (batch,) = batches("one row")
    own = answer_log_probabilities()(decoder, batch)
    ref = answer_log_probabilities()(other, batch)
    chosen, rejected = own.chosen.numpy() - ref.chosen.numpy(), own.rejected.numpy() - ref.rejected.numpy()
    expected = {
        "preference_loss": np.log1p(np.exp(-0.3 * (chosen - rejected))).mean(),
        "reward_chosen": 0.3 * chosen.mean(),
        "reward_rejected": 0.3 * rejected.mean(),
        "reward_margin": 0.3 * (chosen - rejected).mean(),
        "reward_accuracy": (chosen > rejected).mean(),
        "logps_chosen": own.chosen.numpy().mean(),
        "logps_rejected": own.rejected.numpy().mean(),
        "kl_to_reference": (chosen + rejected).mean() / 2,
    }
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert result.totals.loss == pytest.approx(expected["preference_loss"], rel=1e-5)
    _, with_sft = step_of("sigmoid", "mixed")
    sft = -(own.chosen.numpy() / own.chosen_lengths.numpy()).mean()
    assert with_sft.totals.metrics["sft_loss"] == pytest.approx(sft, rel=1e-5)
    assert with_sft.totals.loss == pytest.approx(expected["preference_loss"] + 0.5 * sft, rel=1e-5)
    orpo = step_of("orpo", "mixed", sft_loss_ratio=0.0)[1].totals
    assert orpo.loss == pytest.approx(orpo.metrics["preference_loss"] + sft, rel=1e-5)
    assert "kl_to_reference" not in orpo.metrics


def test_rescaled_log_probabilities():
    (batch,) = batches("one row")
    decoder = tiny_model()
    plain = answer_log_probabilities()(decoder, batch)
    settings = DpoParameters(loss_type="ipo", normalize_logps=True, reference_free=True, beta=1.0)
    found = preference(settings).loss(decoder, batch)
    chosen, rejected = plain.chosen.numpy(), plain.rejected.numpy()
    lengths = plain.chosen_lengths.numpy(), plain.rejected_lengths.numpy()
    mean = (lengths[0] + lengths[1]) / 2
    expected = ((chosen * mean / lengths[0] - rejected * mean / lengths[1] - 0.5) ** 2).sum()
    assert float(found.loss_sum) == pytest.approx(expected, rel=1e-5)
    # logps are shown as they are
    assert float(found.metric_sums["logps_chosen"]) == pytest.approx(chosen.sum(), rel=1e-6)


def test_offsets_are_of_each_pair():
    (batch,) = batches("one row")
    decoder = tiny_model()
    answers = answer_log_probabilities()(decoder, batch)
    settings = DpoParameters(reference_free=True, offset_alpha=2.0, beta=0.5)
    loss = float(preference(settings).loss(decoder, batch).loss_sum)
    logits = 0.5 * (answers.chosen.numpy() - answers.rejected.numpy()) - 2.0 * np.log([1.0, 2.0, 3.0, 4.0])
    assert loss == pytest.approx(np.log1p(np.exp(-logits)).sum(), rel=1e-5)
