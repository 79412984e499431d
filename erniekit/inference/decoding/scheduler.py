"""Which tokens of which requests each step computes: continuous batching (Yu et al., 2022, Orca) with prompts in chunks
(Agrawal et al., 2023, arXiv:2308.16369), over key-value blocks.

A step takes the newest token of every answer, then as many tokens of prompts as it has room for. Requests begin in the
order in which they were submitted; prompts that begin alike have the blocks of that part in common. Where blocks run
out, the request that began last gives its blocks back and is computed again later. Nothing depends on time, so that
ranks which submit the same requests compute the same steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from erniekit.errors import UserError
from erniekit.inference.decoding.blocks import BlockTables, Content, blocks_of
from erniekit.inference.decoding.step import BLOCK_TOKENS, Step, StepBatch
from erniekit.inference.sampling import (
    Sampling,
    TokenLogprobs,
    draw_by_temperature,
    random_stream,
    sample_token,
    token_logprobs,
)

MAX_RUNNING = 64  # requests whose answers grow side by side
STEP_TOKENS = 512  # of all requests in one step; more of a prompt wait for the next one

Finish = Literal["stop", "length", "failed"]
Inputs = Callable[[], Mapping[str, np.ndarray]]


class Constraint(Protocol):
    """Says which tokens may follow, such as those of a grammar; it belongs to one request."""

    def allowed(self) -> np.ndarray:
        """Return which tokens may come next, bool [V]; at least one."""
        ...

    def accept(self, token: int) -> None:
        """Take the token that has come."""
        ...


@dataclass(frozen=True)
class Request:
    """A prompt to be answered.

    Attributes:
        prompt: token ids, at least one.
        sampling: how tokens are chosen, and which ones end the answer; its `max_new_tokens` and `max_length` do not
            count, but `room`.
        room: the most tokens of the answer, at least one.
        stream: the number of the stream of random draws, which counts the prompts of a command from 0.
        inputs: reads the further arrays that the prompt needs (`StepBatch.inputs`), when it is computed; None: it needs
            none.
        rotary: the positions by which the tokens of the prompt are turned, and that of the first token of the answer,
            from which the others count on; None: their places.
        constraint: which tokens may follow; None: all.
        adapters: the name of the set of adapters with which it is computed; "": the model as it was loaded.
    """

    prompt: Sequence[int]
    sampling: Sampling
    room: int
    stream: int = 0
    inputs: Inputs | None = None
    rotary: Sequence[int] | None = None
    constraint: Constraint | None = None
    adapters: str = ""


class Event(NamedTuple):
    """What happened to a request in a step.

    Attributes:
        request: its id.
        token: the next token of its answer; None where the model chose to stop, or cannot choose.
        finished: why the answer ends here: "stop", by a token that is not part of it; "length", with its last token;
            or "failed", because logits are not finite, while those of others may be; None: it goes on.
        logprobs: how probable the token was, where `Sampling.logprobs` asks for it.
        ending: the token by which the model chose to stop, with the same; None: it goes on, or has no more room.
    """

    request: int
    token: int | None
    finished: Finish | None
    logprobs: TokenLogprobs | None = None
    ending: tuple[int, TokenLogprobs | None] | None = None


@dataclass(eq=False)
class _Sequence:
    """A request under way: the first `cached` of its tokens have keys and values in its blocks."""

    id: int
    request: Request
    tokens: list[int]
    generator: np.random.Generator
    cached: int = 0
    answered: int = 0

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.cached

    def rotary(self, count: int) -> np.ndarray:
        """Return the positions by which its next tokens are turned."""
        places = np.arange(self.cached, self.cached + count)
        if self.request.rotary is None:
            return places
        given, behind = np.array(self.request.rotary), len(self.request.prompt)
        return np.where(places < behind, given[np.minimum(places, behind)], given[behind] + places - behind)

    @property
    def needs_inputs(self) -> bool:
        return self.request.inputs is not None and self.cached == 0

    @property
    def shares_blocks(self) -> bool:
        """Whether its tokens alone decide what its keys and values are."""
        return self.request.inputs is None and self.request.rotary is None


class Scheduler:
    """Answers requests that may arrive and leave between any two steps; for one thread at a time.

    It is for weights that stay as they are; when they have changed, open another one, which costs next to nothing. A
    step that raises leaves every request as it was; the one at fault can be cancelled.

    Args:
        step: computes logits and holds the keys and values.
        blocks: how many blocks it holds.
        max_running: how many requests are computed side by side.
        step_tokens: the most tokens of a step, unless one prompt with further inputs has more.
    """

    def __init__(
        self, step: Step, blocks: int, *, max_running: int = MAX_RUNNING, step_tokens: int = STEP_TOKENS
    ) -> None:
        if not 0 < max_running <= step_tokens:
            raise ValueError(f"max_running is {max_running}; it must be 1 to step_tokens, {step_tokens}")
        self._step, self._blocks = step, BlockTables(blocks)
        self._max_running, self._step_tokens = max_running, step_tokens
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # in the order in which they were submitted
        self._submitted = 0
        self._turn = 0  # of sets of adapters

    @property
    def unfinished(self) -> int:
        """The number of requests that are waiting or under way."""
        return len(self._waiting) + len(self._running)

    @property
    def running(self) -> int:
        """The number of requests that have blocks."""
        return len(self._running)

    @property
    def blocks_in_use(self) -> float:
        """The share of the key-value blocks that requests have."""
        return 1.0 - self._blocks.free / self._blocks.count

    def submit(self, request: Request) -> int:
        """Queue a request; return its id, which counts from 0.

        Raises:
            UserError: prompt and answer need more blocks than there are.
        """
        assert request.prompt and request.room > 0, "a request has a prompt, and room for an answer"
        longest = len(request.prompt) + request.room - 1  # the last token of an answer is not read
        if blocks_of(longest) > self._blocks.count:
            raise UserError(
                f"a prompt of {len(request.prompt):,} tokens with an answer of up to {request.room:,} does not fit "
                f"into the {self._blocks.count * BLOCK_TOKENS:,} tokens of memory for keys and values; shorten one"
            )
        generator = random_stream(request.sampling, request.stream)
        self._waiting.append(_Sequence(self._submitted, request, list(request.prompt), generator))
        self._submitted += 1
        return self._waiting[-1].id

    def cancel(self, request: int) -> None:
        """Forget a request, of which no further event comes; nothing happens if it has ended."""
        self._blocks.release(request)
        self._running = [sequence for sequence in self._running if sequence.id != request]
        self._waiting = deque(sequence for sequence in self._waiting if sequence.id != request)

    def step(self) -> list[Event]:
        """Compute one step; return what it brought, at most one event for each request. Without requests: nothing."""
        self._make_room()
        self._admit()
        chosen = self._choose()
        if not chosen:
            return []
        logits_RV = self._step.logits(self._batch(chosen))
        for sequence, count in chosen:
            if sequence.cached < len(sequence.request.prompt):
                self._offer(sequence, sequence.cached, sequence.cached + count)
            sequence.cached += count
        ready = [sequence for sequence, _ in chosen if sequence.cached == len(sequence.tokens)]
        tokens = _drawn_together(ready, logits_RV)
        finite = np.isfinite(logits_RV.max(axis=1)).tolist()  # of NaN the largest is NaN
        return [
            self._advance(sequence, logits_V, tokens.get(sequence.id)) if sound else self._fail(sequence)
            for sequence, logits_V, sound in zip(ready, logits_RV, finite, strict=True)
        ]

    def _make_room(self) -> None:
        """Give every running request the blocks for its newest token, the oldest first."""
        for sequence in list(self._running):
            if len(sequence.tokens) <= self._blocks.room(sequence.id):
                continue
            while sequence in self._running and not self._blocks.extend(sequence.id, len(sequence.tokens)):
                last = self._running.pop()
                self._blocks.release(last.id)
                last.cached = 0
                self._waiting.appendleft(last)

    def _admit(self) -> None:
        """Begin waiting requests, as long as each that runs could take one more block."""
        while self._waiting and len(self._running) < self._max_running:
            first = self._waiting[0]
            if self._running and blocks_of(len(first.tokens)) + len(self._running) > self._blocks.free:
                return
            fits = self._blocks.extend(first.id, len(first.tokens))
            assert fits, "submit has refused what does not fit alone"
            self._running.append(self._waiting.popleft())

    def _choose(self) -> list[tuple[_Sequence, int]]:
        """Return the requests of this step, each with the number of its tokens."""
        running = self._of_one_set()
        for sequence in running:
            if sequence.needs_inputs:  # its arrays say something about every token of the prompt
                return [(sequence, len(sequence.request.prompt))]
        if all(sequence.pending == 1 for sequence in running):
            return [(sequence, 1) for sequence in running]
        running = self._that_need_not_wait(running)
        chosen = [(sequence, 1) for sequence in running if sequence.pending == 1]
        budget = self._step_tokens - len(chosen)
        for sequence in running:
            count = min(sequence.pending, budget)
            if sequence.pending > 1 and count:
                chosen.append((sequence, count))
                budget -= count
        return chosen

    def _that_need_not_wait(self, running: list[_Sequence]) -> list[_Sequence]:
        """Return the requests but those whose next block one before them computes, for both.

        Prompts take over the blocks that others have with the same tokens. Their last token they compute themselves.
        """
        found, computed = [], set()
        for sequence in running:
            if sequence.pending > 1 and sequence.shares_blocks:
                content = self._after_adoption(sequence)
                if content in computed:
                    continue
                if content is not None:
                    computed.add(content)
            found.append(sequence)
        return found

    def _after_adoption(self, sequence: _Sequence) -> Content | None:
        """Take over what others have computed for a request; return what its next block will hold, if others can use
        it."""
        while (number := sequence.cached // BLOCK_TOKENS) < (len(sequence.tokens) - 1) // BLOCK_TOKENS:
            content = self._content(sequence, number)
            if sequence.cached % BLOCK_TOKENS or not self._blocks.adopt(sequence.id, number, content):
                return content
            sequence.cached += BLOCK_TOKENS
        return None

    def _content(self, sequence: _Sequence, number: int) -> Content:
        return self._blocks.content(sequence.id, number, sequence.tokens, sequence.request.adapters)

    def _offer(self, sequence: _Sequence, begin: int, end: int) -> None:
        """Let others have the blocks that are full now that so many tokens of a prompt are computed."""
        for number in range(begin // BLOCK_TOKENS, end // BLOCK_TOKENS) if sequence.shares_blocks else ():
            self._blocks.offer(sequence.id, number, self._content(sequence, number))

    def _of_one_set(self) -> list[_Sequence]:
        """Return the running requests of one set of adapters, with which a step is computed: each set in turn."""
        sets = list(dict.fromkeys(sequence.request.adapters for sequence in self._running))
        if len(sets) < 2:
            return self._running
        self._turn += 1
        chosen = sets[self._turn % len(sets)]
        return [sequence for sequence in self._running if sequence.request.adapters == chosen]

    def _batch(self, chosen: Sequence[tuple[_Sequence, int]]) -> StepBatch:
        counts = np.array([count for _, count in chosen])
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        cached = np.array([sequence.cached for sequence, _ in chosen], np.int32)
        tokens = [token for own, count in chosen for token in own.tokens[own.cached : own.cached + count]]
        ends = np.array([len(sequence.tokens) for sequence, _ in chosen])
        first, _ = chosen[0]
        turned = any(sequence.request.rotary is not None for sequence, _ in chosen)
        return StepBatch(
            token_ids=np.array(tokens, np.int64),
            positions=np.arange(len(tokens)) + np.repeat(cached - starts[:-1], counts),
            starts=starts,
            cached=cached,
            block_tables=self._blocks.tables([sequence.id for sequence, _ in chosen]),
            wanted=starts[1:][cached + counts == ends].astype(np.int64) - 1,
            inputs=first.request.inputs() if first.needs_inputs and first.request.inputs else {},
            rotary=np.concatenate([own.rotary(count) for own, count in chosen]) if turned else None,
            adapters=first.request.adapters,
        )

    def _advance(
        self, sequence: _Sequence, logits_V: np.ndarray, drawn: tuple[int, TokenLogprobs | None] | None
    ) -> Event:
        """Take the next token of an answer, which may be drawn already."""
        request, sampling = sequence.request, sequence.request.sampling
        token, logprobs = drawn or _chosen(sequence, logits_V)
        if token in sampling.stop_token_ids:
            self._finish(sequence)
            return Event(sequence.id, None, "stop", ending=(token, logprobs))
        if request.constraint is not None:
            request.constraint.accept(token)
        sequence.tokens.append(token)
        sequence.answered += 1
        if sequence.answered < request.room:
            return Event(sequence.id, token, None, logprobs)
        self._finish(sequence)
        return Event(sequence.id, token, "length", logprobs)

    def _fail(self, sequence: _Sequence) -> Event:
        self._finish(sequence)
        return Event(sequence.id, None, "failed")

    def _finish(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        self._blocks.release(sequence.id)


def _drawn_together(
    sequences: Sequence[_Sequence], logits_RV: np.ndarray
) -> dict[int, tuple[int, TokenLogprobs | None]]:
    """Return the next tokens of those that draw by temperature alone, by the ids of their requests."""
    rows = [
        row
        for row, sequence in enumerate(sequences)
        if sequence.request.constraint is None and sequence.request.sampling.draws_by_temperature
    ]
    if not rows:
        return {}
    own = [sequences[row] for row in rows]
    logits_RV = logits_RV if len(rows) == len(logits_RV) else logits_RV[rows]
    samplings = [sequence.request.sampling for sequence in own]
    tokens = draw_by_temperature(logits_RV, samplings, [sequence.generator for sequence in own])
    return {sequence.id: token for sequence, token in zip(own, tokens, strict=True)}


def _chosen(sequence: _Sequence, logits_V: np.ndarray) -> tuple[int, TokenLogprobs | None]:
    """Choose the next token of an answer."""
    request, sampling, shown = sequence.request, sequence.request.sampling, logits_V
    if request.constraint is not None:
        logits_V = np.where(request.constraint.allowed(), logits_V, np.float32(-np.inf))
    token = sample_token(logits_V, sequence.tokens, sampling, sequence.generator, answered=sequence.answered)
    if sampling.logprobs is None:
        return token, None
    if sampling.tempered_logprobs:
        shown = shown / np.float32(sampling.temperature)
    return token, token_logprobs(shown, token, sampling.logprobs)
