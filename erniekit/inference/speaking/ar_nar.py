"""Write the codes of a text level after level: the first one token by token (AR), each further one at once (NAR).

So VALL-E speaks (Wang et al., 2023, arXiv:2301.02111). Codes of the first level are tokens behind the vocabulary of the
text, which the scheduler decodes with keys and values in its cache; a further level is one pass over all frames.

Shapes: C levels, T frames, P frames of the voice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from erniekit.build.speech_tokens import SpeechTokens
from erniekit.config.sections.speaking import SpeakingParameters
from erniekit.data.ar_nar_codes import CONTINUATION
from erniekit.data.code_segments import frame_rows
from erniekit.errors import UserError
from erniekit.inference.decoding.open_scheduler import open_scheduler
from erniekit.inference.decoding.scheduler import MAX_RUNNING, Request
from erniekit.inference.sampling import Sampling
from erniekit.inference.speaking import PreparedUtterance, Written
from erniekit.inference.speaking.code_passes import CodeDocument, CodePass, grouped, refuse_not_finite
from erniekit.inference.speaking.unmasking import predicted
from erniekit.model.architectures.speaking import CodeLayout
from erniekit.model.lora.lora import without_adapters


class ArNar:
    """Writes codes with a model that was trained to write them level after level.

    Args:
        decoder: a `Decoder` of this family.
        sampling: of the first level; its limits of length and its stop tokens do not count.
        adapted: the levels that adapters serve; they are switched off at others. None: all.
    """

    _settings: SpeakingParameters

    def __init__(
        self,
        decoder: Any,
        layout: CodeLayout,
        tokens: SpeechTokens,
        settings: SpeakingParameters,
        sampling: Sampling,
        *,
        adapted: Sequence[int] | None = None,
    ) -> None:
        assert layout.stop is not None, "a family that writes level after level"
        self._decoder, self._layout, self._tokens = decoder, layout, tokens
        self._settings, self._adapted = settings, adapted
        first = decoder.config.vocab_size
        self._first_code = first
        self._sampling = replace(sampling, min_p=settings.min_p, stop_token_ids=(first + layout.stop,))

    def write(self, requests: Sequence[PreparedUtterance]) -> Iterator[Written]:
        """Yield the codes [C, T] of every request; T may be 0, where the model chose to say nothing."""
        first, cut = self._first_level(requests)
        lengths = [len(self._head(request, 0)[0]) + len(codes) for request, codes in zip(requests, first, strict=True)]
        for group in grouped(lengths):
            spoken = [index for index in group if len(first[index])]
            codes = self._further_levels([requests[index] for index in spoken], [first[index] for index in spoken])
            by_index = dict(zip(spoken, codes, strict=True))
            nothing = np.zeros((self._layout.levels, 0), np.int64)
            yield from (Written(index, by_index.get(index, nothing), cut[index]) for index in group)

    def _first_level(self, requests: Sequence[PreparedUtterance]) -> tuple[list[list[int]], list[bool]]:
        """Return the codes of level 0 of each request, and whether it had not ended."""
        codes: list[list[int]] = [[] for _ in requests]
        cut = [False] * len(requests)
        with self._adapters_for(0):
            scheduler = open_scheduler(self._decoder, max_running=min(MAX_RUNNING, max(1, len(requests))))
            for request in requests:
                scheduler.submit(self._request(request))
            while scheduler.unfinished:
                for event in scheduler.step():
                    if event.finished == "failed":
                        refuse_not_finite(np.array(np.nan), requests[event.request].text_number)
                    if event.token is not None:
                        codes[event.request].append(event.token - self._first_code)
                    cut[event.request] = event.finished == "length"
        return codes, cut

    def _request(self, request: PreparedUtterance) -> Request:
        """Return what the scheduler decodes; text is no answer, so its tokens are not among what may follow."""
        ids, codes, positions = self._head(request, 0)
        limit = self._decoder.config.max_position_embeddings
        if len(ids) >= limit:
            raise UserError(
                f"text {request.text_number} and its voice have {len(ids):,} positions, and the model has {limit:,} "
                "with the codes of what it says; shorten the text (--chunk-seconds) or the recording of the voice"
            )
        start = 0 if self._layout.restarts_positions else len(ids)
        return Request(
            ids.tolist(),
            self._sampling,
            min(request.most_frames, limit - len(ids)),
            request.number,
            None if request.voice_codes is None else partial(_as_inputs, codes),
            rotary=[*positions.tolist(), start] if self._layout.restarts_positions else None,
        )

    def _further_levels(
        self, requests: Sequence[PreparedUtterance], first: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """Return the codes [C, T] of all levels of some requests, which share a row."""
        codes = [np.array([own], np.int64) for own in first]
        for level in range(1, self._layout.levels if requests else 0):
            with self._adapters_for(level):
                row = CodePass(
                    self._decoder,
                    [self._document(request, own, level) for request, own in zip(requests, codes, strict=True)],
                )
                hidden = row.hidden()
                ends = row.starts[1:].tolist()
                for number, (request, end) in enumerate(zip(requests, ends, strict=True)):
                    frames = codes[number].shape[1]
                    logits = row.logits(hidden, slice(end - frames, end), level)[:, : self._layout.codebook_size]
                    found, scores = predicted(logits, **self._draws(request, level, logits.shape))
                    refuse_not_finite(scores, request.text_number)
                    codes[number] = np.concatenate([codes[number], found[None]])
        return codes

    def _draws(self, request: PreparedUtterance, level: int, shape: Sequence[int]) -> dict[str, Any]:
        temperature = self._settings.class_temperature
        if temperature == 0.0:
            return {}
        generator = np.random.default_rng([self._sampling.seed, request.number, level])
        return {"temperature": temperature, "uniforms": generator.random(tuple(shape), np.float32)}

    def _document(self, request: PreparedUtterance, codes_lT: np.ndarray, level: int) -> CodeDocument:
        """Return what the model reads to write a level: what stands before the response, and the levels below it."""
        ids, codes, positions = self._head(request, level)
        response = frame_rows(codes_lT[:level], self._layout.whole, self._layout.levels)
        frames = len(response)
        start = 0 if self._layout.restarts_positions else len(ids)
        return CodeDocument(
            np.concatenate([ids, np.zeros(frames, np.int64)]),
            np.concatenate([codes, response]),
            causal=not self._layout.both_ways,
            positions=np.concatenate([positions, start + np.arange(frames)]),
        )

    def _head(self, request: PreparedUtterance, level: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return token ids, rows of the code tables and positions of what stands before the response."""
        tokens = self._tokens
        texts = [[tokens.text[0], *request.text_ids, tokens.text[1]]]
        if request.language_ids:
            texts.append([tokens.language[0], *request.language_ids, tokens.language[1]])
        texts.append([tokens.levels[level]])
        parts = [np.array([*text, tokens.separator], np.int64) for text in texts]
        codes = [np.full((len(part), self._layout.levels), -1, np.int64) for part in parts]
        if request.voice_codes is not None:
            voice = frame_rows(request.voice_codes[: max(1, level)], self._layout.prompts, self._layout.levels)
            behind = [tokens.tasks[CONTINUATION]] * request.continues + [tokens.separator]
            parts.append(np.array([*[0] * len(voice), *behind], np.int64))
            codes.append(np.pad(voice, ((0, len(behind)), (0, 0)), constant_values=-1))
        ids = np.concatenate(parts)
        positions = np.arange(len(ids))
        if self._layout.restarts_positions:
            positions = np.concatenate([np.arange(len(part)) for part in parts])
        return ids, np.concatenate(codes), positions

    def _adapters_for(self, level: int) -> AbstractContextManager[Any]:
        """Return a context in which the adapters act, or not, as a level was trained."""
        serves = self._adapted is None or level in self._adapted
        return nullcontext() if serves or self._decoder.adapters is None else without_adapters(self._decoder)


def _as_inputs(codes_SC: np.ndarray) -> dict[str, np.ndarray]:
    return {"codes": codes_SC[None]}
