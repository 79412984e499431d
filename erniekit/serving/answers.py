"""One answer of a text model, as pieces of text with what clients ask for beside it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from erniekit.inference.decoding.scheduler import Event, Request
from erniekit.inference.engine import ChatModel
from erniekit.inference.generation import make_request
from erniekit.inference.sampling import TokenLogprobs
from erniekit.serving.engine_thread import EngineThread
from erniekit.serving.errors import RefusedError
from erniekit.serving.text_pieces import GrowingText, StopWords


class AnswerPiece(NamedTuple):
    """What one token, or the end, adds to an answer.

    Attributes:
        text: perhaps "".
        tokens: the tokens that came since the last piece.
        logprobs: of each of them, where they were asked for.
        finished: "stop" or "length" with the last piece; None: it goes on.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finished: str | None = None


@dataclass(frozen=True)
class Question:
    """A prompt, and how one answer to it is written.

    Attributes:
        request: as the scheduler takes it.
        stop_words: the answer ends before the first of these.
        keeps_control_tokens: write control tokens into the text, for a parser that looks for them.
    """

    request: Request
    stop_words: tuple[str, ...] = ()
    keeps_control_tokens: bool = False


@dataclass
class Answer:
    """A whole answer."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: str = "stop"

    def add(self, piece: AnswerPiece) -> None:
        """Take the next piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.finished = piece.finished or self.finished


async def answer_pieces(
    engine: EngineThread[Any], model: ChatModel, question: Question
) -> AsyncGenerator[AnswerPiece, None]:
    """Yield the pieces of an answer. Whoever closes this iterator before its end cancels the answer.

    Raises:
        RefusedError: the model has no next token, because its numbers overflow.
        UserError: there is too little memory for prompt and answer.
        StoppedError: the server ends.
    """
    decode = _with_control_tokens(model) if question.keeps_control_tokens else model.decode
    text, stops = GrowingText(decode), StopWords(question.stop_words)
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finished = "stop"
    async with aclosing(_events(engine, model, question.request)) as events:
        async for event in events:
            if event.finished == "failed":
                raise RefusedError(
                    "the model cannot go on: its logits are not finite, as after a training that diverged",
                    status=500,
                    code="not_finite",
                )
            finished = event.finished or finished
            if event.token is None:
                continue
            tokens.append(event.token)
            logprobs += [event.logprobs] if event.logprobs is not None else []
            piece, found = stops.add(text.add(event.token))
            if piece or logprobs or found:
                yield AnswerPiece(piece, tuple(tokens), tuple(logprobs), "stop" if found else None)
                tokens, logprobs = [], []
            if found:
                return
    piece, found = stops.add(text.rest())
    rest = piece if found else piece + stops.rest()
    yield AnswerPiece(rest, tuple(tokens), tuple(logprobs), "stop" if found else finished)


async def _events(engine: EngineThread[Any], model: ChatModel, request: Request) -> AsyncGenerator[Event, None]:
    """Yield the events of an answer, and behind a transcript in a spoken dialogue those of the answer to it."""
    tokens: list[int] = []
    async with aclosing(engine.answer(request)) as events:
        async for event in events:
            if event.token is not None:
                tokens.append(event.token)
            if event.finished != "stop" or not (header := _header(model, request, tokens)):
                yield event
                continue
            for token in header:
                yield Event(event.request, token, None)
            prompt = [*request.prompt, *tokens, *header]
            following = make_request(model.decoder, prompt, request.sampling, request.stream)
            following = replace(following, adapters=request.adapters)
            async with aclosing(engine.answer(following)) as others:
                async for other in others:
                    yield other


def _header(model: ChatModel, request: Request, answer: Sequence[int]) -> list[int]:
    return model.continuation(request.prompt, answer, request.sampling)


def _with_control_tokens(model: ChatModel) -> Any:
    return lambda tokens: model.tokenizer.decode(tokens, skip_special_tokens=False)


def token_text(model: ChatModel, token: int) -> str:
    """Return the text of one token, for lists of probabilities."""
    return model.tokenizer.decode([token], skip_special_tokens=False)
