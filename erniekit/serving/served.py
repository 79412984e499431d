"""What a server serves: a model that writes text or one that speaks, under its names, with what requests default to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from erniekit.config.sections.speaking import SpeakingParameters
from erniekit.inference.engine import ChatModel
from erniekit.inference.sampling import Sampling
from erniekit.inference.speaking.speaker import SpeechModel
from erniekit.serving.engine_thread import EngineThread
from erniekit.serving.errors import RefusedError
from erniekit.serving.grammar import Grammars
from erniekit.serving.metrics import Metrics
from erniekit.serving.places import Places

Result = TypeVar("Result")


@dataclass(eq=False)
class Served:
    """A model and what stands around it; one for each server.

    Attributes:
        name: of the model, as clients write it.
        adapters: the names of sets of adapters, which clients write in place of the model's.
        defaults: how answers are written where a request does not say.
        speaking: how codes are written, by a model that speaks.
        stopping: whether the server has been told to end.
    """

    engine: EngineThread[Any]
    model: ChatModel | SpeechModel
    name: str
    defaults: Sampling
    places: Places
    metrics: Metrics
    adapters: tuple[str, ...] = ()
    speaking: SpeakingParameters = field(default_factory=SpeakingParameters)
    created: int = field(default_factory=lambda: int(time.time()))
    stopping: bool = False

    @property
    def chat(self) -> ChatModel:
        """The model that writes text.

        Raises:
            RefusedError: it speaks instead.
        """
        if isinstance(self.model, ChatModel):
            return self.model
        raise RefusedError(f"{self.name} speaks and writes no text; ask /v1/audio/speech", code="wrong_model")

    @property
    def speech(self) -> SpeechModel:
        """The model that speaks.

        Raises:
            RefusedError: it writes text instead.
        """
        if isinstance(self.model, SpeechModel):
            return self.model
        raise RefusedError(
            f"{self.name} writes text and does not speak; serve a model of stage TTS", code="wrong_model"
        )

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.chat)

    def adapters_of(self, model: str) -> str:
        """Return the set of adapters that a request names as its model; "" for the model itself.

        Raises:
            RefusedError: there is no such model.
        """
        if model in ("", self.name):
            return ""
        if model in self.adapters:
            return model
        raise RefusedError(
            f"model: there is no {model[:200]!r} here; there is {', '.join((self.name, *self.adapters))}",
            status=404,
            param="model",
            code="model_not_found",
        )

    async def prepare(self, function: Callable[[], Result]) -> Result:
        """Return what a function returns that takes time and no Paddle, such as rendering and encoding a prompt.

        One runs at a time: templates are rendered by one process.
        """
        return await asyncio.get_running_loop().run_in_executor(self._preparing, function)

    @cached_property
    def _preparing(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="erniekit-prompts")
