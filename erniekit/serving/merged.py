"""Several answers at once, as one stream of their pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

Item = TypeVar("Item")


async def merged(parts: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield the items of all iterators as they come, each with the number of its iterator.

    Whoever closes this one closes all; the first exception ends all.
    """
    queue: asyncio.Queue[tuple[int, Any, BaseException | None]] = asyncio.Queue()

    async def pump(number: int, items: AsyncGenerator[Item, None]) -> None:
        error: BaseException | None = None
        try:
            async with aclosing(items):
                async for item in items:
                    queue.put_nowait((number, [item], None))
        except Exception as caught:
            error = caught
        queue.put_nowait((number, [], error))

    tasks = [asyncio.ensure_future(pump(number, items)) for number, items in enumerate(parts)]
    left = len(tasks)
    try:
        while left:
            number, found, error = await queue.get()
            if error is not None:
                raise error
            left -= not found
            for item in found:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
