"""The thread of the engine: requests join and leave while others run, and its end is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from erniekit.inference.generation import generate, make_request
from erniekit.inference.sampling import Sampling
from erniekit.serving.engine_thread import EngineThread, StoppedError
from erniekit.serving.served import Served
from tests.serving.asking import serving

PROMPTS = [[5, 9, 33, 2], [7], [40, 41, 42, 43, 44, 45, 46, 3, 1, 8, 12]]
LONG = Sampling(max_new_tokens=60)


async def tokens_of(engine: EngineThread, request, count: int = 1000) -> list[int]:
    tokens = []
    async with aclosing(engine.answer(request)) as events:
        async for event in events:
            tokens += [event.token] if event.token is not None else []
            if len(tokens) == count:
                break
    return tokens


def test_requests_join_and_leave_while_others_run(served: Served) -> None:
    decoder, engine = served.chat.decoder, served.engine
    expected = generate(decoder, PROMPTS, LONG)
    requests = [make_request(decoder, prompt, LONG) for prompt in PROMPTS]

    async def run() -> list[list[int]]:
        first = asyncio.ensure_future(tokens_of(engine, requests[0]))
        left = await tokens_of(engine, requests[1], 5)  # leaves after 5 tokens
        last = await tokens_of(engine, requests[2])
        return [await first, left, last]

    first, left, last = asyncio.run(run())
    assert [first, last] == [expected[0], expected[2]] and left == expected[1][:5]
    assert engine._tickets == {}


def test_a_request_that_needs_too_much_memory_is_refused_alone(served: Served) -> None:
    request = make_request(served.chat.decoder, PROMPTS[0], LONG)
    with pytest.raises(Exception, match="does not fit"):
        asyncio.run(tokens_of(served.engine, replace(request, room=10**9)))
    assert asyncio.run(tokens_of(served.engine, request, 3))


def test_a_step_that_fails_ends_those_under_way_and_no_others(served: Served) -> None:
    request = make_request(served.chat.decoder, PROMPTS[0], LONG)

    def broken() -> dict:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        asyncio.run(tokens_of(served.engine, replace(request, inputs=broken)))
    assert asyncio.run(tokens_of(served.engine, request, 3))


def test_the_end_is_told_to_those_under_way_and_to_those_who_come() -> None:
    def numbers() -> Iterator[int]:
        yield from (1, 2)

    engine: EngineThread[str] = EngineThread(lambda: ("model", None))
    assert engine.start() == "model" and engine.alive

    async def run() -> None:
        async with aclosing(engine.iterate(numbers)) as items:
            assert [item async for item in items] == [1, 2]
        engine.stop()
        with pytest.raises(StoppedError):
            async with aclosing(engine.iterate(numbers)) as items:
                async for _ in items:
                    pass

    asyncio.run(run())
    engine.join()
    assert not engine.alive


def test_an_error_of_loading_is_that_of_the_start() -> None:
    def fail() -> tuple[str, None]:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        EngineThread(fail).start()


def test_answers_under_way_hear_of_the_end() -> None:
    from erniekit.inference.engine import ChatModel
    from tests.serving.conftest import TINY_ERNIE

    with serving(lambda: ChatModel.load(TINY_ERNIE, random_weights=True)) as own:
        request = make_request(own.chat.decoder, PROMPTS[0], Sampling(max_new_tokens=400))

        async def run() -> None:
            async with aclosing(own.engine.answer(request)) as events:
                async for _ in events:
                    own.engine.stop()

        with pytest.raises(StoppedError):
            asyncio.run(run())
