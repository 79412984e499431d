"""Prompts are divided among workers, weights are sent to them, and those that die are replaced; without Ray."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.errors import TrainingError
from erniekit.rollouts import workers as workers_module
from erniekit.rollouts.records import policy_fingerprint
from erniekit.rollouts.sampling import sample_answers
from erniekit.rollouts.worker import Place
from erniekit.rollouts.workers import RolloutWorkers, group_shares, sent_weights, threads_of
from erniekit.training.collectives import SINGLE_PROCESS
from tests.rollouts.fake_ray import FakeRay
from tests.runners.test_policy import answer_prompts, prompts, rollouts  # noqa: F401 (fixtures)

SETTINGS = {"longest": 6, "stop_token_ids": (2,), "temperature": 1.0, "seed": 5}
ASKED = [ids for ids in ([11, 12, 13], [21, 22], [31, 32, 33, 34]) for _ in range(2)]  # three groups of two
STREAMS = range(40, 46)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    for name in ("OMP_NUM_THREADS", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1")  # so that what is set is set back
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return ray


@pytest.fixture
def address() -> Iterator[str]:
    """Where something listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def open_workers(make_config: Callable[..., Any], tiny_base: Path, fake: FakeRay) -> Callable[..., Any]:
    """The trained model, whose weights have left those of its folder, and its workers."""

    def opened(**parameters: Any) -> tuple[Any, RolloutWorkers]:
        from erniekit.build.adapters import adapter_plan
        from erniekit.build.model import initial_weights, open_model, read_model_config
        from erniekit.model.lora.lora import named_trainable_parameters

        config = make_config(
            stage="GRPO", model_name_or_path=str(tiny_base), continue_training=True, rewards=["length:1-12"],
            num_generations=2, gradient_accumulation_steps=4, max_completion_len=6,
            **{"rollout_workers": 2, **parameters},
        )  # fmt: skip
        model = open_model(config, initial_weights(config), adapters=adapter_plan(config, read_model_config(config)))
        for weight in named_trainable_parameters(model).values():
            weight.set_value(weight + 0.01)
        return model, RolloutWorkers(config, SETTINGS)

    return opened


def expected(model: Any) -> list[Any]:
    return sample_answers(model, ASKED, STREAMS, **SETTINGS)


def sampled(model: Any, workers: RolloutWorkers) -> list[Any]:
    workers.send(model, policy_fingerprint(model, SINGLE_PROCESS))
    return workers.sample(ASKED, STREAMS, 2)


def assert_equal_answers(found: list[Any], others: list[Any]) -> None:
    assert [(each.tokens, each.cut) for each in found] == [(each.tokens, each.cut) for each in others]
    for answer, other in zip(found, others, strict=True):
        np.testing.assert_allclose(answer.logps, other.logps, atol=1e-5)


@pytest.mark.parametrize(
    ("groups", "workers", "shares"),
    [(4, 1, [[0, 1, 2, 3]]), (5, 2, [[0, 2, 4], [1, 3]]), (2, 3, [[0], [1], []]), (0, 1, [[]])],
)
def test_groups_are_divided(groups: int, workers: int, shares: list[list[int]]) -> None:
    assert [list(share) for share in group_shares(groups, workers)] == shares


@pytest.mark.parametrize("init", ["kaiming", "pissa"])
def test_all_weights_are_sent_where_adapters_take_a_part_of_them(
    open_workers: Callable[..., Any], make_config: Callable[..., Any], init: str
) -> None:
    model, workers = open_workers(lora=True, lora_init=init)
    assert ("model.embed_tokens.weight" in sent_weights(workers.config, model)) == (init == "pissa")


def test_the_threads_of_a_machine_are_divided() -> None:
    """Those of the trainer, which waits meanwhile, on its machine; all cores on another."""
    places = {number: Place(node, "", 8, "", 0) for number, node in enumerate(["a", "b", "b", "b", "a", "a"])}
    assert threads_of(places, "a", 6) == {0: 2, 1: 2, 2: 2, 3: 2, 4: 2, 5: 2}
    assert set(threads_of(places, "a", 2).values()) == {1, 2}  # never none


@pytest.mark.parametrize("lora", [False, True], ids=["weights", "adapters"])
def test_workers_answer_as_one_process(open_workers: Callable[..., Any], fake: FakeRay, lora: bool) -> None:
    """With adapters nothing else is sent; each worker gets whole groups, and takes the weights once for a rollout."""
    from erniekit.model.lora.lora import named_trainable_parameters

    model, workers = open_workers(**({"lora": True, "lora_rank": 4} if lora else {}))
    assert_equal_answers(sampled(model, workers), expected(model))
    asked = {number: given for number, name, given in fake.calls if name == "sample"}
    assert [list(given[3]) for _, given in sorted(asked.items())] == [[40, 41, 44, 45], [42, 43]]
    assert asked[0][0].keys() == named_trainable_parameters(model).keys() and fake.puts == 1
    for weight in named_trainable_parameters(model).values():
        weight.set_value(weight * 0.5)
    assert_equal_answers(sampled(model, workers), expected(model))
    assert fake.started == 2 and fake.puts == 2
    workers.close()
    assert fake.shutdowns == 1 and not fake.running


def test_a_worker_that_dies_is_replaced(open_workers: Callable[..., Any], fake: FakeRay, logged: list[str]) -> None:
    fake.deaths = {(1, "sample")}
    model, workers = open_workers()
    assert_equal_answers(sampled(model, workers), expected(model))
    assert fake.started == 3
    (line,) = [line for line in logged if "has died" in line]
    assert "rollout worker 1 on " in line and "(The actor died); another one is started" in line


def test_a_worker_that_dies_twice_ends_the_run(open_workers: Callable[..., Any], fake: FakeRay) -> None:
    fake.deaths = {(0, "sample"), (2, "sample")}
    model, workers = open_workers()
    with pytest.raises(TrainingError, match=r"worker 0 on .* for the second time .*\n.*write fewer rollout_workers"):
        sampled(model, workers)


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (lambda ray: ray.deaths.add((1, "build")), r"worker 1 .* has died .* while it built its model\n.*memory"),
        (lambda ray: ray.mute.add((1, "place")), r"worker 1 has not started within 0 s\n.*installed on every machine"),
        (lambda ray: setattr(ray, "places", {0: Place("b", "far", 1, "0.1", 7)}), r"far has ERNIEKit 0.1, and this is"),
        (lambda ray: setattr(ray, "processors", 1), r"has 1 processors, and each of 2 rollout_workers"),
        (lambda ray: setattr(ray, "refuses", ConnectionError("no\nanswer")), "Ray cannot be started: no answer"),
    ],
    ids=["dies", "never starts", "another version", "too few processors", "no Ray"],
)
def test_what_cannot_start_is_told(
    open_workers: Callable[..., Any],
    fake: FakeRay,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[FakeRay], Any],
    told: str,
) -> None:
    monkeypatch.setattr(workers_module, "START_SECONDS", 0.0)
    prepare(fake)
    model, workers = open_workers()
    with pytest.raises(TrainingError, match=told):
        sampled(model, workers)
    workers.close()
    assert not fake.running


def test_other_weights_end_the_run(open_workers: Callable[..., Any]) -> None:
    model, workers = open_workers()
    workers.send(model, "of another model")
    with pytest.raises(
        TrainingError, match=r"worker 0: .*has other weights than the run.*of another model\n.*same folder"
    ):
        workers.sample(ASKED, STREAMS, 2)


def test_an_error_of_a_worker_is_told_in_a_line(open_workers: Callable[..., Any], fake: FakeRay) -> None:
    model, workers = open_workers()
    workers.send(model, policy_fingerprint(model, SINGLE_PROCESS))
    with pytest.raises(TrainingError, match=r"rollout worker 0 has failed: \w+Error: .*\n  Please report this"):
        workers.sample([[10**9]] * 6, STREAMS, 2)


def test_workers_compute_on_a_cpu(open_workers: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from erniekit.errors import ConfigurationError

    monkeypatch.setattr(workers_module.paddle, "get_device", lambda: "gpu:0")
    with pytest.raises(ConfigurationError, match="CPUs only, and this run on gpu:0"):
        open_workers()


@pytest.mark.proves("rollout_workers", "ray_address")
def test_a_run_samples_where_it_is_told_to(
    answer_prompts: Callable[..., Any],  # noqa: F811
    fake: FakeRay,
    address: str,
) -> None:
    alone = rollouts(answer_prompts(max_steps=1).output)
    assert not fake.inits
    run = answer_prompts(max_steps=1, rollout_workers=2, ray_address=address)
    assert rollouts(run.output) == alone
    assert fake.started == 2 and fake.inits[0]["address"] == address and not fake.running
    assert [name for _, name, _ in fake.calls if name == "sample"] == ["sample"] * 2
    assert "rollout workers: 2 on " in run.said
