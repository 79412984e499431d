"""Let processes of Ray sample the answers of a rollout: divide prompts, send weights, replace processes that die.

The answers are those of one process: each draws from the stream that its place in the run has, wherever it is sampled.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import paddle

import erniekit
from erniekit.config import Config
from erniekit.config.registry import PARAMETERS
from erniekit.environment import cpu_settings
from erniekit.errors import ConfigurationError, TrainingError, UserError
from erniekit.model.decoder import Decoder
from erniekit.model.lora.config import PISSA
from erniekit.model.lora.lora import named_adapter_weights
from erniekit.model.weights import named_weights
from erniekit.rollouts.ray_cluster import ray_cluster
from erniekit.rollouts.sampling import Sampled
from erniekit.rollouts.worker import Place, RolloutWorker

logger = logging.getLogger(__name__)

START_SECONDS = 600.0  # that a process may take to start; a cluster without room for it never starts it
POLL_SECONDS = 1.0  # between which a signal is heard
ATTEMPTS = 2  # at the prompts of a worker that dies


def group_shares(groups: int, workers: int) -> list[range]:
    """Return which groups of a rollout each worker samples; some may have none."""
    return [range(groups)[number::workers] for number in range(workers)]


def sent_weights(config: Config, model: Decoder) -> Mapping[str, paddle.Tensor]:
    """Return the weights that change in a run, by name; with adapters all others only where adapters take a part of
    them (PiSSA)."""
    adapters = named_adapter_weights(model)
    if config.lora.lora and config.lora.lora_init != PISSA:
        return adapters
    return named_weights(model) | adapters


def threads_of(places: Mapping[int, Place], here: str, threads: int) -> dict[int, int]:
    """Return how many threads each worker has: those of its machine, divided among the workers there.

    Args:
        here: Ray's name of this machine, where the trainer, which waits meanwhile, has so many `threads`.
    """
    beside = Counter(place.node for place in places.values())
    return {
        number: max(1, (threads if place.node == here else place.cores) // beside[place.node])
        for number, place in places.items()
    }


def threads_here() -> int:
    """Return how many threads this process computes with; of a list for nested regions, the first."""
    return int(cpu_settings()["OMP_NUM_THREADS"].partition(",")[0] or 1)


@dataclass(eq=False)
class RolloutWorkers:
    """The workers of a run. They start before the first rollout; nothing of them is kept between runs.

    Attributes:
        settings: how answers are sampled, see `sample_answers`.

    Raises:
        ConfigurationError: this process does not compute on a CPU.
    """

    config: Config
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        if paddle.get_device() != "cpu":
            raise ConfigurationError(
                f"rollout_workers: workers compute on CPUs only, and this run on {paddle.get_device()}\n"
                "  Write rollout_workers: 0, or device: cpu."
            )
        self._open = ExitStack()
        self._ray: ModuleType | None = None
        self._workers: dict[int, Any] = {}
        self._places: dict[int, Place] = {}
        self._weights: Any = None  # a reference to those in the object store
        self._fingerprint = ""

    def send(self, model: Decoder, fingerprint: str) -> None:
        """Put the weights of the next rollout where every worker reads them; the first time, start the workers.

        Raises:
            UserError: Ray or a worker cannot be started.
        """
        weights = {name: tensor.numpy() for name, tensor in sent_weights(self.config, model).items()}
        if self._ray is None:
            self._start(sum(values.nbytes for values in weights.values()))
        assert self._ray is not None
        self._weights = None  # the earlier ones leave the object store
        self._weights, self._fingerprint = self._ray.put(weights), fingerprint

    def sample(self, prompts: Sequence[Sequence[int]], streams: Sequence[int], group: int) -> list[Sampled]:
        """Return an answer to each prompt, with the weights that were sent last.

        Args:
            prompts: `group` equal ones after another.
            streams: see `sample_answers`.

        Raises:
            TrainingError: a worker has failed, or has died twice.
        """
        shares = {
            number: [place * group + row for place in share for row in range(group)]
            for number, share in enumerate(group_shares(len(prompts) // group, len(self._workers)))
            if share
        }
        found: list[Sampled | None] = [None] * len(prompts)
        died = ""
        for attempt in range(ATTEMPTS):
            if attempt and shares:
                logger.warning(f"{died}; another one is started, and samples its answers again")
                self._add(shares)
            asked = {
                number: self._workers[number].sample.remote(
                    self._weights,
                    self._fingerprint,
                    [list(prompts[row]) for row in rows],
                    [streams[row] for row in rows],
                    self.settings,
                )
                for number, rows in shares.items()
            }
            for number, reference in asked.items():
                answers, problem = self._get(number, reference)
                if answers is None:
                    died = problem
                    continue
                for row, answer in zip(shares.pop(number), answers, strict=True):
                    found[row] = answer
        if shares:
            raise TrainingError(
                f"{died}, for the second time with the same prompts\n  It may have run out of memory, which each "
                "worker needs for a model of its own: write fewer rollout_workers, or 0."
            )
        return [answer for answer in found if answer is not None]

    def processes(self) -> list[int]:
        """Return the process ids of the workers."""
        return [place.process for place in self._places.values()]

    def close(self) -> None:
        """End the workers, and Ray unless it is a cluster of others."""
        self._workers.clear()
        self._weights = self._ray = None
        self._open.close()

    def _start(self, weight_bytes: int) -> None:
        section = self.config.grpo
        began = time.perf_counter()
        self._ray = self._open.enter_context(ray_cluster(section.ray_address, section.rollout_workers, weight_bytes))
        self._add(range(section.rollout_workers))
        hosts = Counter(place.host for place in self._places.values())
        named = ", ".join(f"{count} on {host}" for host, count in hosts.items())
        logger.info(
            f"rollout workers: {named}; started in {time.perf_counter() - began:.1f} s, "
            f"{weight_bytes / 2**20:,.1f} MiB of weights for each rollout"
        )

    def _add(self, numbers: Iterable[int]) -> None:
        """Start workers with these numbers, in the place of those that had them, and let them build the model."""
        ray, numbers = self._ray, list(numbers)
        assert ray is not None
        remote = ray.remote(RolloutWorker).options(num_cpus=1, scheduling_strategy="SPREAD")
        self._workers |= {number: remote.remote() for number in numbers}
        self._places |= {number: self._place(number) for number in numbers}
        here = ray.get_runtime_context().get_node_id()
        threads = threads_of(self._places, here, threads_here())
        values = json.dumps({name: self.config[name] for name in PARAMETERS} | {"device": "cpu"})
        built = {number: self._workers[number].build.remote(values, os.getcwd(), threads[number]) for number in numbers}
        for number, reference in built.items():
            _, problem = self._get(number, reference)
            if problem:
                raise TrainingError(
                    f"{problem} while it built its model\n  It may have run out of memory, which each worker needs "
                    "for a model of its own: write fewer rollout_workers, or 0."
                )

    def _place(self, number: int) -> Place:
        place, problem = self._get(number, self._workers[number].place.remote(), START_SECONDS)
        if place is None:
            raise TrainingError(
                f"{problem or f'rollout worker {number} has not started within {START_SECONDS:g} s'}\n"
                "  ERNIEKit has to be installed on every machine of the cluster, for the same Python; `ray status` "
                "shows whether a processor is free for each worker."
            )
        if place.version != erniekit.__version__:
            raise TrainingError(
                f"rollout worker {number} on {place.host} has ERNIEKit {place.version}, and this is "
                f"{erniekit.__version__}\n  Install the same version on every machine."
            )
        return Place(*place)

    def _get(self, number: int, reference: Any, seconds: float | None = None) -> tuple[Any, str]:
        """Return the result of a call of a worker; or None, and how the worker has ended, "" after so many `seconds`.

        Raises:
            TrainingError: the call has failed.
        """
        ray = self._ray
        assert ray is not None
        until = None if seconds is None else time.monotonic() + seconds
        while not ray.wait([reference], timeout=POLL_SECONDS)[0]:  # returns now and then, so that signals are heard
            if until is not None and time.monotonic() > until:
                return None, ""
        try:
            return ray.get(reference), ""
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, UserError):
                raise TrainingError(f"rollout worker {number}: {cause}") from None
            raise TrainingError(
                f"rollout worker {number} has failed: {type(cause).__name__}: {cause}\n  Please report this."
            ) from error
        except ray.exceptions.RayError as error:
            said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            host = f" on {self._places[number].host}" if number in self._places else ""
            return None, f"rollout worker {number}{host} has died ({said.rstrip('.')})"
