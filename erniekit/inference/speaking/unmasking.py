"""Write the codes of a text by unmasking: all are masked at first, and each step writes the ones that are surest.

The algorithm is that of OmniVoice (`_generate_iterative` of the Python package `omnivoice` 0.2.1), after MaskGIT
(Chang et al., 2022, arXiv:2202.04200) with classifier-free guidance (Ho and Salimans, 2022, arXiv:2207.12598).

Shapes: C levels, T frames, V rows of a level: the codes, and the mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import paddle

from erniekit.config.sections.speaking import SpeakingParameters
from erniekit.inference.speaking import PreparedUtterance, Written
from erniekit.inference.speaking.code_passes import CodeDocument, CodePass, grouped, refuse_not_finite
from erniekit.model.architectures.speaking import CodeLayout

LIKELY_SHARE = 0.1  # of a codebook's codes, from which one is drawn


def time_steps(steps: int, shift: float) -> list[float]:
    """Return the share of codes that are written before each step, and after the last one: s x / (1 + (s - 1) x) with
    x = i / N, in float32 as the package computes it."""
    half, width = (steps + 1) // 2, float(np.float32(1.0) / np.float32(steps))
    numbers = np.arange(steps + 1)
    # `torch.linspace`: from both ends, each rounded once
    x = np.where(numbers < half, width * numbers, 1.0 - width * (steps - numbers)).astype(np.float32)
    return [float(t) for t in np.float32(shift) * x / (np.float32(1.0) + np.float32(shift - 1) * x)]


def schedule(codes: int, steps: int, shift: float) -> list[int]:
    """Return how many codes each step writes; the last one writes what is left."""
    times, left = time_steps(steps, shift), codes
    counts = []
    for step in range(steps):
        count = left if step == steps - 1 else min(math.ceil(codes * (times[step + 1] - times[step])), left)
        counts.append(count)
        left -= count
    return counts


def gumbel(uniforms: np.ndarray) -> np.ndarray:
    """Return Gumbel noise, float32, of numbers from [0, 1)."""
    small = np.float32(1e-10)
    return -np.log(-np.log(uniforms.astype(np.float32) + small) + small)


def surest(
    scores_CT: np.ndarray,
    written_CT: np.ndarray,
    count: int,
    *,
    layer_penalty: float,
    temperature: float = 0.0,
    uniforms_CT: np.ndarray | None = None,
) -> np.ndarray:
    """Return the flat indices [count] of the codes that a step writes: those with the largest scores, of equal ones the
    first in order of level and frame.

    Args:
        scores_CT: float32, the log-probability of the code that the model would write.
        written_CT: bool, which codes are written already; at least `count` are not.
        layer_penalty: what a score loses for each level above the first.
        temperature: above 0, draw them: Gumbel noise of `uniforms_CT` is added to scores / temperature.
    """
    scores = scores_CT - np.float32(layer_penalty) * np.arange(len(scores_CT), dtype=np.float32)[:, None]
    if temperature > 0.0:
        assert uniforms_CT is not None
        scores = scores / np.float32(temperature) + gumbel(uniforms_CT)
    flat = np.where(written_CT, -np.inf, scores).reshape(-1)
    return np.argsort(-flat, kind="stable")[:count]


def predicted(
    logits: paddle.Tensor,
    without_text: paddle.Tensor | None = None,
    *,
    scale: float = 0.0,
    mask_id: int | None = None,
    temperature: float = 0.0,
    uniforms: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the code that a model would write at each place, int64 [...], and the largest log-probability of any code
    there, float32 [...].

    Args:
        logits: float32 [..., V].
        without_text: the logits without the text, for guidance: log p + scale (log p - log p without text), normalised
            again; None: no guidance.
        mask_id: is never written.
        temperature: above 0, draw codes from the likeliest tenth: Gumbel noise of `uniforms` [..., V] is added to
            log p / temperature.
    """
    if without_text is None:
        scores = logits.clone()
    else:  # both normalisations drop out in the one below
        scores = (1.0 + scale) * logits
        scores.subtract_(scale * without_text)
    largest = scores.max(axis=-1, keepdim=True)
    log_sums = (largest + (scores - largest).exp_().sum(axis=-1, keepdim=True).log()).squeeze(-1)  # with the mask
    if mask_id is not None:
        scores[..., mask_id] = -math.inf
    likeliest = scores.argmax(axis=-1, keepdim=True)
    sure = (paddle.take_along_axis(scores, likeliest, axis=-1).squeeze(-1) - log_sums).numpy()
    if temperature == 0.0:
        return likeliest.squeeze(-1).numpy(), sure
    assert uniforms is not None
    values, codes = (x.numpy() for x in paddle.topk(scores, math.ceil(LIKELY_SHARE * scores.shape[-1])))
    drawn = (values - log_sums.numpy()[..., None]) / np.float32(temperature)
    drawn += gumbel(np.take_along_axis(uniforms, codes, axis=-1))
    return np.take_along_axis(codes, drawn.argmax(axis=-1)[..., None], axis=-1)[..., 0], sure


class Unmasking:
    """Writes codes with a model that was trained to fill in masked ones.

    Args:
        decoder: a `Decoder` of this family.
        seed: of the random draws; those of a request depend on its number and the step alone.
    """

    _settings: SpeakingParameters

    def __init__(self, decoder: Any, layout: CodeLayout, settings: SpeakingParameters, seed: int) -> None:
        assert layout.mask_id is not None, "a family of masked codes"
        self._decoder, self._settings, self._seed = decoder, settings, seed
        self._levels, self._mask_id = layout.levels, layout.mask_id
        self._first_rows = np.array(layout.first_rows, np.int64)

    def write(self, requests: Sequence[PreparedUtterance]) -> Iterator[Written]:
        """Yield the codes [C, T] of every request; those that share a row become ready together."""
        for request, codes in self.steps(requests):
            if not (codes == self._mask_id).any():
                yield Written(request, codes)

    def steps(self, requests: Sequence[PreparedUtterance]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the codes of every request after each step, where those not written yet are the mask."""
        documents = [self._documents(request) for request in requests]
        for group in grouped([sum(len(each.ids) for each in of_request) for of_request in documents]):
            yield from self._fill(group, requests, documents)

    def _documents(self, request: PreparedUtterance) -> list[CodeDocument]:
        """Return what a request reads: text, voice and masked frames; for guidance also the masked frames alone."""
        assert request.frames, "masked codes have a given number of frames"
        masked = self._in_tables(np.full((self._levels, request.frames), self._mask_id, np.int64))
        voice = masked[:0] if request.voice_codes is None else self._in_tables(request.voice_codes)
        text = np.array(request.text_ids, np.int64)
        codes = np.concatenate([np.full((len(text), self._levels), -1, np.int64), voice, masked])
        ids = np.zeros(len(codes), np.int64)
        ids[: len(text)] = text
        alone = CodeDocument(np.zeros(len(masked), np.int64), masked)
        return [CodeDocument(ids, codes), *([alone] if self._settings.guidance_scale else [])]

    def _in_tables(self, codes_CT: np.ndarray) -> np.ndarray:
        """Return the rows of codes in the tables, [T, C]."""
        return codes_CT.T.astype(np.int64) + self._first_rows

    def _fill(
        self,
        group: Sequence[int],
        requests: Sequence[PreparedUtterance],
        documents: Sequence[Sequence[CodeDocument]],
    ) -> Iterator[tuple[int, np.ndarray]]:
        settings = self._settings
        row = CodePass(self._decoder, [document for index in group for document in documents[index]])
        ends = iter(row.starts[1:].tolist())
        places = {}
        for index in group:
            frames = requests[index].frames or 0
            places[index] = [slice(end - frames, end) for end in (next(ends) for _ in documents[index])]
        codes = {index: np.full((self._levels, requests[index].frames or 0), self._mask_id) for index in group}
        counts = {index: schedule(codes[index].size, settings.unmask_steps, settings.time_shift) for index in group}
        for step in range(settings.unmask_steps):
            hidden = row.hidden()
            for index in group:
                if not counts[index][step]:
                    continue
                generator = np.random.default_rng([self._seed, requests[index].number, step])
                self._write_step(
                    row,
                    hidden,
                    places[index],
                    codes[index],
                    counts[index][step],
                    generator,
                    requests[index].text_number,
                )
                for own in places[index]:
                    row.codes[own] = self._in_tables(codes[index])
                yield index, codes[index].copy()

    def _write_step(
        self,
        row: CodePass,
        hidden: paddle.Tensor,
        places: Sequence[slice],
        codes_CT: np.ndarray,
        count: int,
        generator: np.random.Generator,
        text_number: int,
    ) -> None:
        """Write `count` codes of a request in their place."""
        settings = self._settings
        logits = [row.logits_of_levels(hidden, own) for own in places]  # of each document, [T, C, V]
        uniforms = None
        if settings.class_temperature > 0.0:
            uniforms = generator.random((*codes_CT.shape, logits[0].shape[-1]), np.float32).swapaxes(0, 1)
        found_TC, scores_TC = predicted(
            *logits,
            scale=settings.guidance_scale,
            mask_id=self._mask_id,
            temperature=settings.class_temperature,
            uniforms=uniforms,
        )
        refuse_not_finite(scores_TC, text_number)
        chosen = surest(
            scores_TC.T,
            codes_CT != self._mask_id,
            count,
            layer_penalty=settings.layer_penalty,
            temperature=settings.position_temperature,
            uniforms_CT=generator.random(codes_CT.shape, np.float32) if settings.position_temperature > 0 else None,
        )
        codes_CT.reshape(-1)[chosen] = found_TC.T.reshape(-1)[chosen]
