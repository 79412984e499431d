"""What `erniekit.rollouts` calls of Ray, in this process: calls happen at once, and workers die when a test says so."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__("a traceback of many lines")
        self.cause = cause


class Reference:
    def __init__(self, value: Any = None, error: Exception | None = None, ready: bool = True) -> None:
        self.value, self.error, self.ready = value, error, ready


class FakeRay(ModuleType):
    """Attributes tell what was asked of it; `deaths` and `mute` say which worker dies in, or never answers, which call.

    Workers are numbered over the whole run, so one that replaces another has a number of its own.
    """

    def __init__(self) -> None:
        super().__init__("ray")
        self.__spec__ = ModuleSpec("ray", None)
        self.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
        self.inits: list[dict[str, Any]] = []
        self.calls: list[tuple[int, str, tuple[Any, ...]]] = []
        self.deaths: set[tuple[int, str]] = set()
        self.mute: set[tuple[int, str]] = set()
        self.places: Mapping[int, Any] = {}  # what a worker answers, in the place of its own answer
        self.refuses: Exception | None = None
        self.processors, self.started, self.puts, self.shutdowns, self.running = 8, 0, 0, 0, False

    def init(self, **settings: Any) -> None:
        self.inits.append(settings)
        if self.refuses is not None:
            raise self.refuses
        self.running = True

    def is_initialized(self) -> bool:
        return self.running

    def shutdown(self) -> None:
        self.shutdowns, self.running = self.shutdowns + 1, False

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.processors)}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "this machine")

    def put(self, value: Any) -> Reference:
        self.puts += 1
        return Reference(value)

    def wait(self, references: list[Reference], timeout: float) -> tuple[list[Reference], list[Reference]]:
        return [each for each in references if each.ready], [each for each in references if not each.ready]

    def get(self, reference: Reference) -> Any:
        if reference.error is not None:
            raise reference.error
        return reference.value

    def remote(self, kind: Any) -> Any:
        def start() -> Any:
            number = self.started
            self.started += 1
            return _Handle(self, kind(), number)

        return SimpleNamespace(options=lambda **given: SimpleNamespace(remote=start))


class _Handle:
    def __init__(self, ray: FakeRay, actor: Any, number: int) -> None:
        self._ray, self._actor, self._number = ray, actor, number

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: self._call(name, given))

    def _call(self, name: str, given: tuple[Any, ...]) -> Reference:
        ray, key = self._ray, (self._number, name)
        values = tuple(each.value if isinstance(each, Reference) else each for each in given)
        ray.calls.append((*key, values))
        if key in ray.mute:
            return Reference(ready=False)
        if key in ray.deaths:
            return Reference(error=RayError("\nThe actor died.\n\tclass_name: RolloutWorker"))
        if name == "place" and self._number in ray.places:
            return Reference(ray.places[self._number])
        try:
            return Reference(getattr(self._actor, name)(*values))
        except Exception as error:
            return Reference(error=RayTaskError(error))
