"""Generate text with a model: for prompts that are there together, or for one as its tokens come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np

from erniekit.errors import UserError
from erniekit.export.saved_program import SavedProgram
from erniekit.inference.decoding.open_scheduler import open_scheduler
from erniekit.inference.decoding.scheduler import MAX_RUNNING, Event, Inputs, Request
from erniekit.inference.sampling import Sampling
from erniekit.model.decoder import Decoder

TextModel = Decoder | SavedProgram
Audio = Mapping[str, np.ndarray] | None  # the arrays of the prompts' recordings, see `audio_prompts.prompt_audio`


def generate(
    decoder: TextModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    streams: Sequence[int] | None = None,
    audio: Audio = None,
) -> list[list[int]]:
    """Return the token ids of the answer to every prompt, without the stop token.

    Prompts may differ in length; each gets the answer that `stream` gives for it alone with the same number.

    Args:
        streams: the number of each prompt's stream of random draws; default: its index in `prompts`.
        audio: the recordings of the prompts; None: they have none.

    Raises:
        UserError: a prompt is empty, or leaves no room for an answer (see `length_limit`); or it has recordings, and
            the model is an exported program.
    """
    numbers = range(len(prompts)) if streams is None else streams
    return answer_requests(
        decoder,
        [
            make_request(decoder, prompt, sampling, number, _row_inputs(decoder, audio, row, len(prompt)))
            for row, (prompt, number) in enumerate(zip(prompts, numbers, strict=True))
        ],
    )


def stream(
    decoder: TextModel, prompt: Sequence[int], sampling: Sampling, number: int = 0, audio: Audio = None
) -> Iterator[int]:
    """Answer one prompt, yielding each token id as soon as it is chosen. Raises like `generate`.

    Args:
        number: of the stream of random draws; another number gives another sampled answer.
        audio: the recordings of the prompt; None: it has none.
    """
    inputs = _row_inputs(decoder, audio, 0, len(prompt))
    for event in _events(decoder, [make_request(decoder, prompt, sampling, number, inputs)], 1):
        if event.token is not None:
            yield event.token


def make_request(
    decoder: TextModel, prompt: Sequence[int], sampling: Sampling, stream: int = 0, inputs: Inputs | None = None
) -> Request:
    """Return the request for an answer to a prompt, as long as there is room for it.

    Args:
        stream: the number of its stream of random draws, and in messages, which count from 1, that of the prompt.
        inputs: reads the arrays of its recordings; None: it has none.

    Raises:
        UserError: the prompt is empty or leaves no room for an answer, or the model has no such token.
    """
    check_prompt(decoder, prompt, sampling, stream + 1)
    size = decoder.config.vocab_size
    if max(prompt) >= size:
        raise UserError(
            f"a prompt has the token {max(prompt):,}, and the model's vocabulary has {size:,}: the tokenizer beside it "
            "is of another model"
        )
    room = min(sampling.max_new_tokens, length_limit(decoder, sampling.max_length) - len(prompt))
    return Request(prompt, sampling, room, stream, inputs)


def answer_requests(
    decoder: TextModel,
    requests: Sequence[Request],
    *,
    max_running: int = MAX_RUNNING,
    report: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """Return the token ids of the answer to every request, without the stop token.

    Args:
        max_running: how many are computed side by side; the next one begins where one has ended.
        report: called whenever answers are complete, with their number.
    """
    answers: list[list[int]] = [[] for _ in requests]
    scales = decoder.activation_scales
    done = 0
    with nullcontext() if scales is None else scales.cache_weight_codes():
        for event in _events(decoder, requests, max_running):
            if event.token is not None:
                answers[event.request].append(event.token)
            if event.finished:
                done += 1
                report(done)
    return answers


def length_limit(decoder: TextModel, max_length: int | None) -> int:
    """Return the maximum tokens of prompt and answer together: `max_length`, but not more than the model allows."""
    own_limit = decoder.config.max_position_embeddings
    return own_limit if max_length is None else min(max_length, own_limit)


def check_prompt(decoder: TextModel, prompt: Sequence[int], sampling: Sampling, number: int) -> None:
    """Raise UserError for a prompt that cannot be answered; `number` counts from 1 and is for the message."""
    limit = length_limit(decoder, sampling.max_length)
    if not 0 < len(prompt) < limit:
        whose = "max_model_len" if limit == sampling.max_length else "the model's max_position_embeddings"
        raise UserError(
            f"prompt {number} has {len(prompt):,} tokens; it needs at least 1 and, to leave room for an answer, "
            f"fewer than {whose} {limit:,}"
        )


def _events(decoder: TextModel, requests: Sequence[Request], max_running: int) -> Iterator[Event]:
    """Yield what happens to requests, whose ids are their numbers in the list, until all have ended.

    Raises:
        UserError: the model has no next token for one of them.
    """
    scheduler = open_scheduler(decoder, max_running=max_running)
    for request in requests:
        scheduler.submit(request)
    while scheduler.unfinished:
        for event in scheduler.step():
            if event.finished == "failed":
                number = requests[event.request].stream + 1  # the requests may be some of many prompts
                raise UserError(
                    f"the model cannot answer prompt {number:,}: its logits are not finite. Its numbers "
                    "overflow, as after a training that diverged, or in float16; take an earlier checkpoint, or a "
                    "model in bfloat16 or float32"
                )
            yield event


def _row_inputs(decoder: TextModel, audio: Audio, row: int, length: int) -> Inputs | None:
    """Return what reads the arrays of one prompt's recordings out of those of a batch; None if it has none."""
    if audio is None:
        return None
    if isinstance(decoder, SavedProgram):
        raise UserError("a recording: an exported program reads text only; name the trained model in its place")
    of_model = decoder.config.architecture.audio
    assert of_model is not None, "only a model with an encoder has recordings"
    return partial(_row_arrays, audio, row, length, of_model(decoder.config).window_tokens)


def _row_arrays(audio: Mapping[str, np.ndarray], row: int, length: int, window_tokens: int) -> dict[str, np.ndarray]:
    """Return the arrays of one row of a batch, with the windows whose states stand in it."""
    states = audio["audio_states"][row, :length]
    placed = states[states >= 0]
    if not len(placed):
        return {}
    first, last = placed.min() // window_tokens, placed.max() // window_tokens
    return {
        "audio_features": audio["audio_features"][first : last + 1],
        "audio_frames": audio["audio_frames"][first : last + 1],
        "audio_states": np.where(states < 0, states, states - first * window_tokens)[None],
    }
