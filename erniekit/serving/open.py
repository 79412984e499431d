"""Load what a server serves, and serve it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from erniekit.config.sections.serving import ServingParameters
from erniekit.config.sections.speaking import SpeakingParameters
from erniekit.errors import ConfigurationError
from erniekit.inference.decoding.open_scheduler import open_scheduler
from erniekit.inference.decoding.scheduler import Event, Scheduler
from erniekit.inference.engine import ChatModel
from erniekit.inference.sampling import Sampling
from erniekit.inference.speaking.speaker import SpeechModel
from erniekit.model.decoder import Decoder
from erniekit.model.lora.sets import AdapterSets
from erniekit.serving.app import application, guarded
from erniekit.serving.engine_thread import EngineThread
from erniekit.serving.metrics import Metrics
from erniekit.serving.places import Places
from erniekit.serving.served import Served
from erniekit.web.listen import serve, url_of

logger = logging.getLogger(__name__)
GRACE_SECONDS = 20.0  # that answers under way get to end when the server is told to
TOLD_SECONDS = 5.0  # behind them, for telling the others
SPEAKING_AT_ONCE = 1  # a model that speaks takes one text after the other


@dataclass(frozen=True)
class Loading:
    """How the model is loaded.

    Attributes:
        load: loads it; called in the thread that computes.
        name: under which clients ask for it.
        adapters: folders of further adapters, by the names under which clients ask for them.
    """

    load: Callable[[], ChatModel | SpeechModel]
    name: str
    adapters: Mapping[str, Path] = field(default_factory=dict)


def open_served(
    loading: Loading,
    serving: ServingParameters,
    defaults: Sampling,
    speaking: SpeakingParameters | None = None,
) -> Served:
    """Load a model and start the thread that computes with it.

    Raises whatever loading raises.
    """

    def open_model() -> tuple[ChatModel | SpeechModel, Scheduler | None]:
        model = loading.load()
        if isinstance(model, SpeechModel):
            if loading.adapters:
                raise ConfigurationError("--adapters: a model that speaks takes those of --lora-path alone")
            return model, None
        return model, open_scheduler(
            model.decoder, max_running=serving.max_num_seqs, adapters=_adapter_sets(model, loading.adapters)
        )

    metrics: Metrics

    def count(seconds: float, scheduler: Scheduler, events: list[Event]) -> None:
        metrics.step(seconds, scheduler, events)

    engine: EngineThread[Any] = EngineThread(open_model, count)
    model = engine.start()
    running = SPEAKING_AT_ONCE if isinstance(model, SpeechModel) else serving.max_num_seqs
    places = Places(running, serving.max_waiting_requests)
    metrics = Metrics(lambda: places.taken)
    return Served(
        engine,
        model,
        loading.name,
        defaults,
        places,
        metrics,
        tuple(loading.adapters),
        speaking or SpeakingParameters(),
    )


def _adapter_sets(model: ChatModel, folders: Mapping[str, Path]) -> AdapterSets | None:
    if not folders:
        return None
    if not isinstance(model.decoder, Decoder):
        raise ConfigurationError("--adapters: an exported program takes none; name the trained model in its place")
    sets = AdapterSets(model.decoder)
    for name, folder in folders.items():
        sets.load(name, folder)
        logger.info(f"adapters: {name}: {folder}")
    return sets


def run(served: Served, listening: socket.socket, serving: ServingParameters, api_key: str) -> None:
    """Serve until SIGTERM or SIGINT, which is raised again at the end.

    Answers under way get some seconds to end; those that do not are told that the server ends.
    """
    url = url_of(listening)

    def told_to_end() -> None:
        if not served.stopping:
            served.stopping = True
            logger.info(f"ending; answers under way: {served.places.taken:,}, which have {GRACE_SECONDS:g} s")
            timer = threading.Timer(GRACE_SECONDS, served.engine.stop)
            timer.daemon = True
            timer.start()

    app = guarded(application(served), host=serving.host, api_key=api_key, max_body_bytes=serving.max_body_mb << 20)
    try:
        serve(
            app,
            listening,
            grace_seconds=GRACE_SECONDS + TOLD_SECONDS,
            on_ready=lambda: logger.info(f"serving {served.name} at {url}/v1"),
            on_signal=told_to_end,
        )
    finally:
        served.engine.stop()
        served.engine.join(TOLD_SECONDS)
