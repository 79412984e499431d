"""What a request for text asks for, from its body to its answers."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from erniekit.serving.answers import Answer, AnswerPiece, Question, answer_pieces
from erniekit.serving.endpoint import Reply, once
from erniekit.serving.merged import merged
from erniekit.serving.questions import Wanted
from erniekit.serving.served import Served
from erniekit.serving.shapes import Shape


@dataclass
class Asked:
    """A request for text.

    Attributes:
        model: the name under which it is answered.
        answers: how many answers it has, for which places are taken.
        make: returns a question for each answer; called in a thread of its own.
        prompts: how many prompts it has.
    """

    served: Served
    model: str
    wanted: Wanted
    shape: Shape
    answers: int
    make: Callable[[], Sequence[Question]]
    prompts: int = 1
    prompt_tokens: int = 0
    answer_tokens: int = 0
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    async def reply(self, request: Request) -> Reply:
        """Return the answers, whole or as a stream."""
        if self.wanted.streams:
            return Reply(self._stream())
        return Reply(await once(request, self._whole()))

    async def _pieces(self) -> AsyncGenerator[tuple[int, AnswerPiece], None]:
        """Yield the pieces of all answers as they come, each with the number of its answer; hold their places."""
        served, began = self.served, time.monotonic()
        with served.places.take(self.answers):
            questions = await served.prepare(self.make)
            prompts = questions[:: max(1, len(questions) // self.prompts)]
            self.prompt_tokens = sum(len(question.request.prompt) for question in prompts)
            served.metrics.prompt_tokens.inc(self.prompt_tokens)
            chat = served.chat
            every = merged([answer_pieces(served.engine, chat, question) for question in questions])
            async with aclosing(every) as pieces:
                async for number, piece in pieces:
                    if not self.answer_tokens:
                        served.metrics.first_seconds.observe(time.monotonic() - began)
                    self.answer_tokens += len(piece.tokens)
                    yield number, piece

    async def _whole(self) -> JSONResponse:
        answers = [Answer() for _ in range(self.answers)]
        async with aclosing(self._pieces()) as pieces:
            async for number, piece in pieces:
                answers[number].add(piece)
        choices = [self.shape.choice(number, answer) for number, answer in enumerate(answers)]
        return JSONResponse({**self._head(self.shape.name), "choices": choices, "usage": self._usage()})

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events."""
        begun = set[int]()
        async with aclosing(self._pieces()) as pieces:
            async for number, piece in pieces:
                if number not in begun:
                    begun.add(number)
                    for choice in self.shape.first(number):
                        yield self._event([choice])
                for choice in self.shape.pieces(number, piece):
                    yield self._event([choice])
        if self.wanted.tells_usage:
            yield self._event([], usage=self._usage())
        yield b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {**self._head(self.shape.chunk_name), "choices": choices, **more}
        return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": f"{self.shape.prefix}-{self.id}", "object": name, "created": self.created, "model": self.model}

    def _usage(self) -> dict[str, int]:
        asked, answered = self.prompt_tokens, self.answer_tokens
        return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}
