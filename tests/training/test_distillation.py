"""The objective of distillation on a tiny model: chunks, gradients, accumulation, and what it says of itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from erniekit.data.batch import Batch
from erniekit.data.collate import collate
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample
from erniekit.model import distillation_head
from erniekit.model.decoder import Decoder
from erniekit.model.divergence import Divergence
from erniekit.model.lora.lora import named_trainable_parameters
from erniekit.training.objectives.distillation import distillation, model_teacher
from erniekit.training.objectives.objective import Objective
from erniekit.training.step import train_step
from tests.model.tiny import tiny_model

VOCABULARY = 53
DIVERGENCES = [Divergence("forward_kl", temperature=2.0), Divergence("reverse_kl"), Divergence("jsd", 0.3, 1.5)]


def samples(count: int = 4) -> list[Sample]:
    random = np.random.default_rng(0)
    found = []
    for _ in range(count):
        ids = random.integers(1, VOCABULARY, int(random.integers(6, 16))).astype(np.int32)
        labels = np.where(np.arange(len(ids) - 1) < 3, IGNORE_INDEX, ids[1:]).astype(np.int32)
        found.append(Sample(ids[:-1], labels))
    return found


def batch_of(*rows: list[Sample]) -> Batch:
    return collate(rows, [[0] * len(row) for row in rows], 0)


def teacher(**changes: Any) -> Decoder:
    return tiny_model(seed=9, hidden_size=24, num_attention_heads=6, **changes)


def gradients(model: Decoder, objective: Objective, batches: list[Batch]) -> tuple[dict[str, np.ndarray], Any]:
    parameters = named_trainable_parameters(model)
    seen: dict[str, np.ndarray] = {}

    class Recording:
        def set_lr(self, rate: float) -> None: ...
        def clear_grad(self, set_to_zero: bool = True) -> None:
            for parameter in parameters.values():
                parameter.clear_gradient(set_to_zero)

        def step(self) -> None:
            seen.update({name: parameter.grad.numpy().copy() for name, parameter in parameters.items()})

    model.train()
    result = train_step(
        model,
        list(parameters.values()),
        Recording(),
        objective,
        batches,
        step=0,
        learning_rate=0.0,  # type: ignore[arg-type]
    )
    return seen, result.totals


def plain_loss(model: Decoder, other: Decoder, batch: Batch, of: Divergence, share: float) -> paddle.Tensor:
    """The mean loss from whole logits, by Paddle's own operators and autograd."""
    from erniekit.training.objectives.forward import DecoderForward, run_forward

    whole: Any = DecoderForward(lambda decoder, hidden, *_: decoder.head(decoder.norm(hidden)))
    labels = paddle.to_tensor(batch.labels).flatten()
    targets = paddle.nonzero(labels != IGNORE_INDEX).flatten()
    with paddle.no_grad():
        wanted = run_forward(whole, other, batch).reshape([-1, VOCABULARY])[targets]
    logits = run_forward(whole, model, batch).reshape([-1, VOCABULARY])[targets]
    softmax = paddle.nn.functional.softmax
    p, q = softmax(logits / of.temperature), softmax(wanted / of.temperature)
    m = of.beta * q + (1 - of.beta) * p

    def kl(a: paddle.Tensor, b: paddle.Tensor) -> paddle.Tensor:
        return (a * (paddle.log(a) - paddle.log(b))).sum(-1)

    value = {
        "forward_kl": lambda: kl(q, p),
        "reverse_kl": lambda: kl(p, q),
        "jsd": lambda: of.beta * kl(q, m) + (1 - of.beta) * kl(p, m),
    }[of.kind]()
    nll = paddle.nn.functional.cross_entropy(logits, labels[targets], reduction="none").flatten()
    return ((1 - share) * of.temperature**2 * value + share * nll).mean()


@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("divergence", DIVERGENCES, ids=lambda each: each.kind)
def test_chunks_give_the_loss_and_gradients_of_whole_logits(
    divergence: Divergence, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation_head, "chunk_rows", lambda *_: 5)
    batch = batch_of(samples()[:2], samples()[2:])
    objective = distillation(model_teacher(teacher()), divergence, share)
    seen, totals = gradients(tiny_model(seed=1), objective, [batch])
    other = tiny_model(seed=1)
    loss = plain_loss(other, teacher(), batch, divergence, share)
    loss.backward()
    assert totals.loss == pytest.approx(float(loss), rel=1e-5)
    for name, parameter in named_trainable_parameters(other).items():
        np.testing.assert_allclose(seen[name], parameter.grad.numpy(), rtol=1e-3, atol=2e-6, err_msg=name)


def test_four_at_once_are_four_one_by_one_and_four_in_a_row() -> None:
    objective = distillation(model_teacher(teacher()), DIVERGENCES[2], 0.25)
    whole, totals = gradients(tiny_model(seed=1), objective, [batch_of(*[[each] for each in samples()])])
    for batches in ([batch_of([each]) for each in samples()], [batch_of(samples())]):
        found, others = gradients(tiny_model(seed=1), objective, batches)
        assert others.loss == pytest.approx(totals.loss, rel=1e-5)
        assert others.metrics == pytest.approx(totals.metrics, rel=1e-5)
        for name, gradient in whole.items():
            np.testing.assert_allclose(found[name], gradient, rtol=1e-3, atol=2e-6, err_msg=name)


def test_a_student_that_is_its_teacher_has_nothing_to_learn() -> None:
    objective = distillation(model_teacher(tiny_model(seed=1)), Divergence("reverse_kl", temperature=2.0))
    seen, totals = gradients(tiny_model(seed=1), objective, [batch_of(samples())])
    assert totals.loss == pytest.approx(0.0, abs=1e-6) and totals.metrics["teacher_agreement"] == 1.0
    assert totals.metrics["sft_loss"] > 1 and totals.metrics["token_accuracy"] < 0.5
    assert max(float(np.abs(each).max()) for each in seen.values()) < 1e-5


def test_a_batch_without_targets_has_no_gradient() -> None:
    objective = distillation(model_teacher(teacher()), Divergence())
    no_targets = [Sample(each.input_ids, np.full_like(each.labels, IGNORE_INDEX)) for each in samples()]
    alone, _ = gradients(tiny_model(seed=1), objective, [batch_of(samples())])
    both, _ = gradients(tiny_model(seed=1), objective, [batch_of(samples()), batch_of(no_targets)])
    for name, gradient in alone.items():
        np.testing.assert_array_equal(both[name], gradient, err_msg=name)


def test_the_teacher_is_not_trained() -> None:
    other = teacher()
    before = {name: each.numpy().copy() for name, each in other.named_parameters()}
    gradients(tiny_model(seed=1), distillation(model_teacher(other), Divergence()), [batch_of(samples())])
    for name, parameter in other.named_parameters():
        assert parameter.stop_gradient and parameter.grad is None
        np.testing.assert_array_equal(parameter.numpy(), before[name])
