"""The thread that owns the model: requests come to it through a queue, and their tokens go back to the event loop.

It runs the scheduler of `erniekit generate`, to which requests come, and from which they go, between two steps. What
else computes with Paddle, such as a model that speaks, is called in this thread, too.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

from erniekit.errors import UserError
from erniekit.inference.decoding.scheduler import Event, Request, Scheduler

logger = logging.getLogger(__name__)
Model = TypeVar("Model")
Result = TypeVar("Result")


class StoppedError(Exception):
    """The server ends, and with it every answer under way."""


class _Ticket:
    """A place where what happens to a request, or comes of a call, is laid for the event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.id: int | None = None  # of the scheduler
        self.left = threading.Event()  # nobody waits any more


_END = object()


class EngineThread(Generic[Model]):
    """Runs a scheduler in a thread of its own.

    Args:
        open_model: loads the model, in the thread; with it comes its scheduler, or None if it has none.
        on_step: called in the thread after each step with its seconds, the scheduler, and the step's events.
    """

    def __init__(
        self,
        open_model: Callable[[], tuple[Model, Scheduler | None]],
        on_step: Callable[[float, Scheduler, list[Event]], None] = lambda seconds, scheduler, events: None,
    ) -> None:
        self._open, self._on_step = open_model, on_step
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[int, _Ticket] = {}
        self._scheduler: Scheduler | None = None
        self._stopped = False
        self._opened: Future[Model] = Future()
        self._thread = threading.Thread(target=self._run, name="erniekit-engine", daemon=True)

    def start(self) -> Model:
        """Load the model and begin to answer; return the model, of which others read what needs no computation.

        Raises whatever loading raises.
        """
        self._thread.start()
        return self._opened.result()

    def stop(self) -> None:
        """End the thread; what is under way ends with StoppedError."""
        self._inbox.put(None)

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended, or so long."""
        self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive() and not self._stopped

    async def answer(self, request: Request) -> AsyncGenerator[Event, None]:
        """Yield what happens to a request until it has ended. Whoever closes this iterator before cancels the request.

        Raises:
            UserError: prompt and answer need more memory than there is.
            StoppedError: the server ends.
        """
        ticket = _Ticket()
        async with aclosing(self._items(ticket, partial(self._submit, ticket, request))) as events:
            async for event in events:
                yield event
                if event.finished:
                    return

    async def iterate(self, make: Callable[[], Iterator[Result]]) -> AsyncGenerator[Result, None]:
        """Yield what an iterator yields that computes in the thread. Whoever closes this one before ends that one,
        too, at its next item.

        Raises whatever it raises, or StoppedError.
        """
        ticket = _Ticket()
        async with aclosing(self._items(ticket, partial(self._iterate, ticket, make))) as items:
            async for item in items:
                yield item

    async def _items(self, ticket: _Ticket, command: Callable[[], None]) -> AsyncGenerator[Any, None]:
        self._inbox.put(command)
        if self._stopped:  # perhaps after the last look into the inbox
            raise StoppedError
        try:
            while (item := await ticket.items.get()) is not _END:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            ticket.left.set()
            self._inbox.put(partial(self._cancel, ticket))

    # In the thread.

    def _run(self) -> None:
        try:
            model, self._scheduler = self._open()
        except Exception as error:  # of loading, for `start`
            self._opened.set_exception(error)
            return
        self._opened.set_result(model)
        scales = getattr(getattr(model, "decoder", None), "activation_scales", None)
        try:
            with nullcontext() if scales is None else scales.cache_weight_codes():
                while self._obey():
                    if self._scheduler is not None and self._scheduler.unfinished:
                        self._step(self._scheduler)
        finally:
            self._end_all(StoppedError())

    def _obey(self) -> bool:
        """Do what the inbox asks; wait for it where nothing is under way. Return False when the thread is to end."""
        is_idle = self._scheduler is None or not self._scheduler.unfinished
        while True:
            try:
                command = self._inbox.get() if is_idle else self._inbox.get_nowait()
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            is_idle = False

    def _step(self, scheduler: Scheduler) -> None:
        began = time.perf_counter()
        try:
            events = scheduler.step()
        except Exception as error:
            logger.exception("a step of decoding has failed, and the answers under way with it")
            for request in list(self._tickets):
                scheduler.cancel(request)
            self._end_all(error)
            return
        self._on_step(time.perf_counter() - began, scheduler, events)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Ticket, Event]]] = {}
        for event in events:
            ticket = self._tickets.pop(event.request) if event.finished else self._tickets[event.request]
            by_loop.setdefault(ticket.loop, []).append((ticket, event))
        for loop, items in by_loop.items():  # one call a step: each wakes the loop
            _call(loop, partial(_lay_all, items))

    def _submit(self, ticket: _Ticket, request: Request) -> None:
        if self._scheduler is None:
            _lay(ticket, UserError("the model writes no text"))
            return
        if ticket.left.is_set():
            return
        try:
            ticket.id = self._scheduler.submit(request)
        except Exception as error:  # mostly a UserError; none of them ends the thread
            _lay(ticket, error)
            return
        self._tickets[ticket.id] = ticket

    def _cancel(self, ticket: _Ticket) -> None:
        if self._scheduler is not None and ticket.id is not None and self._tickets.pop(ticket.id, None) is not None:
            self._scheduler.cancel(ticket.id)

    def _iterate(self, ticket: _Ticket, make: Callable[[], Iterator[Any]]) -> None:
        try:
            if ticket.left.is_set():
                return
            for item in make():
                if ticket.left.is_set():
                    return
                _lay(ticket, item)
        except Exception as error:
            _lay(ticket, error)
        else:
            _lay(ticket, _END)

    def _end_all(self, error: Exception) -> None:
        """Tell everybody who waits that nothing comes any more; after StoppedError also those who come."""
        self._stopped = isinstance(error, StoppedError)
        tickets = list(self._tickets.values())
        self._tickets.clear()
        for ticket in tickets:
            _lay(ticket, error)
        while self._stopped:  # what came before the end and was not begun
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            waiting = command.args[0] if isinstance(command, partial) else None
            if isinstance(waiting, _Ticket):
                _lay(waiting, error)


def _lay(ticket: _Ticket, item: Any) -> None:
    _call(ticket.loop, partial(ticket.items.put_nowait, item))


def _lay_all(items: list[tuple[_Ticket, Event]]) -> None:
    for ticket, event in items:
        ticket.items.put_nowait(event)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:  # the loop is closed: nobody waits
        logger.debug("an answer came after the end of its event loop")
