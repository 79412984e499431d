"""Figures of a server in Prometheus' form."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from erniekit.inference.decoding.scheduler import Event, Scheduler

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
STEP_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class Metrics:
    """The figures of one server, in a registry of its own.

    Args:
        taken: returns the number of answers under way and waiting.
    """

    def __init__(self, taken: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        name = "erniekit_"
        self.requests = Counter(
            f"{name}requests", "Requests by endpoint and status.", ("endpoint", "status"), registry=registry
        )
        self.seconds = Histogram(
            f"{name}request_seconds", "From a request to the end of its answer.", ("endpoint",), buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self.first_seconds = Histogram(
            f"{name}first_token_seconds", "From a request to the first token.", buckets=SECONDS, registry=registry
        )
        self.prompt_tokens = Counter(f"{name}prompt_tokens", "Tokens of prompts that were accepted.", registry=registry)
        self.answer_tokens = Counter(f"{name}answer_tokens", "Tokens of answers.", registry=registry)
        self.left = Counter(f"{name}clients_left", "Answers whose client left before the end.", registry=registry)
        self._steps = Histogram(
            f"{name}step_seconds", "Of each step of decoding.", buckets=STEP_SECONDS, registry=registry
        )
        self._running = Gauge(f"{name}requests_running", "Requests computed side by side.", registry=registry)
        self._blocks = Gauge(
            f"{name}blocks_in_use", "Share of the memory for keys and values in use.", registry=registry
        )
        waiting = Gauge(f"{name}requests_in_flight", "Answers under way and waiting.", registry=registry)
        waiting.set_function(taken)

    def step(self, seconds: float, scheduler: Scheduler, events: Sequence[Event]) -> None:
        """Count a step of the scheduler."""
        self._steps.observe(seconds)
        self._running.set(scheduler.running)
        self._blocks.set(scheduler.blocks_in_use)
        self.answer_tokens.inc(sum(event.token is not None for event in events))

    def page(self) -> tuple[bytes, str]:
        """Return the figures, and their content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
