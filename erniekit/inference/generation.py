"""Generate text token by token with a key-value cache, for one prompt or a batch of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import paddle
import paddle.nn.functional as F

from erniekit.errors import UserError
from erniekit.export.saved_program import SavedProgram
from erniekit.inference.sampling import Sampling, random_stream, sample_token
from erniekit.model.attention import MASKED, AttentionPlan
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
    answers: list[list[int]] = [[] for _ in prompts]
    scales = decoder.activation_scales
    with nullcontext() if scales is None else scales.cache_weight_codes():
        numbers = range(len(prompts)) if streams is None else streams
        for tokens in _token_steps(decoder, prompts, sampling, numbers, audio):
            for answer, token in zip(answers, tokens, strict=True):
                if token is not None:
                    answer.append(token)
    return answers


def stream(
    decoder: TextModel, prompt: Sequence[int], sampling: Sampling, number: int = 0, audio: Audio = None
) -> Iterator[int]:
    """Answer one prompt, yielding each token id as soon as it is chosen. Raises like `generate`.

    Args:
        number: of the stream of random draws; another number gives another sampled answer.
        audio: the recordings of the prompt; None: it has none.
    """
    for (token,) in _token_steps(decoder, [prompt], sampling, [number], audio):
        if token is not None:
            yield token


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


def _token_steps(
    decoder: TextModel, prompts: Sequence[Sequence[int]], sampling: Sampling, streams: Sequence[int], audio: Audio
) -> Iterator[list[int | None]]:
    """Yield per step one token id for each prompt, None for those that have ended."""
    if not prompts:
        return
    for number, prompt in enumerate(prompts, start=1):
        check_prompt(decoder, prompt, sampling, number)
    limit = length_limit(decoder, sampling.max_length)
    room = [min(sampling.max_new_tokens, limit - len(prompt)) for prompt in prompts]
    stops = set(sampling.stop_token_ids)
    generators = [random_stream(sampling, number) for number in streams]
    seen = [list(prompt) for prompt in prompts]
    ended = [False] * len(prompts)
    if isinstance(decoder, SavedProgram):
        if audio is not None:
            raise UserError("a recording: an exported program reads text only; name the trained model in its place")
        next_logits = decoder.cached_logits(prompts)
    else:
        next_logits = _cached_logits(decoder, prompts, audio)
    for step in range(max(room)):
        logits = next_logits([tokens[-1] for tokens in seen] if step else None)
        chosen: list[int | None] = []
        for row, row_logits in enumerate(logits):
            token = sample_token(row_logits, seen[row], sampling, generators[row])
            seen[row].append(token)
            ended[row] = ended[row] or step >= room[row] or token in stops
            chosen.append(None if ended[row] else token)
        if all(ended):
            return
        yield chosen


def _cached_logits(
    decoder: Decoder, prompts: Sequence[Sequence[int]], audio: Audio
) -> Callable[[Sequence[int] | None], np.ndarray]:
    """Return a function that computes the next logits [B, V] of every prompt and keeps the key-value cache.

    Its argument is the newest token of each row; None in the first call, which reads the prompts.
    """
    cache = KeyValueCache([len(prompt) for prompt in prompts])

    def next_logits(newest: Sequence[int] | None) -> np.ndarray:
        if newest is None:
            return _prompt_logits(decoder, prompts, cache, audio)
        return _next_logits(decoder, newest, cache)

    return next_logits


class KeyValueCache:
    """Keys and values of the tokens so far, per layer [B, K, slots, D]; replaces an `AttentionPlan`.

    The prompts fill the first slots, padded on the right to the longest; each later token takes one more slot in every
    row. Padding is never attended to.
    """

    def __init__(self, prompt_lengths: Sequence[int]) -> None:
        self.prompt_lengths = np.asarray(prompt_lengths)
        self.new_tokens = 0
        longest = int(self.prompt_lengths.max())
        # One document per row. The columns of the padded tail have its start as their end, so no row attends to them.
        ends = np.broadcast_to(self.prompt_lengths[:, None], (len(prompt_lengths), longest))
        self._prompt_plan = AttentionPlan.build(ends[:, None, :, None])
        self._padding = np.arange(longest) >= self.prompt_lengths[:, None]
        self._mask: paddle.Tensor | None = None
        self._windowed_masks: dict[int, paddle.Tensor] = {}  # of the newest tokens, by window
        self._keys: dict[int, paddle.Tensor] = {}
        self._values: dict[int, paddle.Tensor] = {}

    def extend(self) -> paddle.Tensor:
        """Add a slot for one more token per row; return the tokens' position ids [B, 1]."""
        positions = self.prompt_lengths + self.new_tokens
        self.new_tokens += 1
        self._windowed_masks.clear()
        if self._padding.any():
            masked = np.pad(self._padding, ((0, 0), (0, self.new_tokens)))
            self._mask = paddle.to_tensor(np.where(masked, np.float32(MASKED), np.float32(0))[:, None, None])
        return paddle.to_tensor(positions[:, None])

    def _windowed_mask(self, window: int) -> paddle.Tensor:
        """Return the mask [B, 1, 1, slots] of padding and of positions before the last `window` ones of each row."""
        if window in self._windowed_masks:
            return self._windowed_masks[window]
        longest = self._padding.shape[1]
        queries = self.prompt_lengths[:, None] + self.new_tokens - 1
        new_positions = self.prompt_lengths[:, None] + np.arange(self.new_tokens)
        prompt_positions = np.broadcast_to(np.arange(longest), self._padding.shape)
        positions = np.concatenate([prompt_positions, new_positions], axis=1)
        masked = np.pad(self._padding, ((0, 0), (0, self.new_tokens))) | (queries - positions >= window)
        self._windowed_masks[window] = paddle.to_tensor(
            np.where(masked, np.float32(MASKED), np.float32(0))[:, None, None]
        )
        return self._windowed_masks[window]

    def attend(
        self,
        q_BSHD: paddle.Tensor,
        k_BSKD: paddle.Tensor,
        v_BSKD: paddle.Tensor,
        *,
        layer: int,
        dropout: float,
        key: Sequence[int],
        window: int | None = None,
        sinks_H: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """Compute attention within the prompts, or of one new token per row to everything before it."""
        assert dropout == 0.0, "text is generated in evaluation mode"
        k_BKSD, v_BKSD = k_BSKD.transpose([0, 2, 1, 3]), v_BSKD.transpose([0, 2, 1, 3])
        if self.new_tokens == 0:
            self._keys[layer], self._values[layer] = k_BKSD, v_BKSD
            return self._prompt_plan.attend(q_BSHD, k_BSKD, v_BSKD, window=window, sinks_H=sinks_H)
        keys = self._keys[layer] = paddle.concat([self._keys[layer], k_BKSD], axis=2)
        values = self._values[layer] = paddle.concat([self._values[layer], v_BKSD], axis=2)
        batch, _, heads, head_dim = q_BSHD.shape
        # The query heads that share a key head become rows of one product.
        q = (q_BSHD * head_dim**-0.5).reshape([batch, keys.shape[1], -1, head_dim])
        scores = paddle.matmul(q, keys, transpose_y=True)
        mask = self._mask if window is None else self._windowed_mask(window)
        if mask is not None:
            scores = scores + mask
        if sinks_H is not None:
            sinks = sinks_H.astype(scores.dtype).reshape([1, *scores.shape[1:3], 1])
            scores = paddle.concat([scores, sinks.expand([batch, -1, -1, -1])], axis=-1)
        probabilities = F.softmax(scores)[..., : keys.shape[2]]
        return paddle.matmul(probabilities, values).reshape([batch, 1, heads, head_dim])


@paddle.no_grad()
def _prompt_logits(
    decoder: Decoder, prompts: Sequence[Sequence[int]], cache: KeyValueCache, audio: Audio = None
) -> np.ndarray:
    """Fill the cache with the prompts; return the logits after each prompt's last token [B, V]."""
    longest = max(map(len, prompts))
    ids = np.zeros((len(prompts), longest), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    positions = np.broadcast_to(np.arange(longest), ids.shape)
    sound = {name: paddle.to_tensor(array) for name, array in (audio or {}).items()}
    hidden = _evaluate(decoder, paddle.to_tensor(ids), paddle.to_tensor(positions), cache, **sound)
    last = np.arange(len(prompts)) * longest + cache.prompt_lengths - 1
    rows = paddle.gather(hidden.reshape([-1, hidden.shape[-1]]), paddle.to_tensor(last))
    with decoder.tp.no_sequence_parallel():
        return decoder.head(rows).numpy()


@paddle.no_grad()
def _next_logits(decoder: Decoder, newest: Sequence[int], cache: KeyValueCache) -> np.ndarray:
    """Feed every row's newest token; return the logits of the token after it [B, V]."""
    positions = cache.extend()
    ids = paddle.to_tensor(np.array(newest, np.int64)[:, None])
    rows = _evaluate(decoder, ids, positions, cache)[:, 0]
    with decoder.tp.no_sequence_parallel():
        return decoder.head(rows).numpy()


def _evaluate(
    decoder: Decoder, ids: paddle.Tensor, positions: paddle.Tensor, cache: KeyValueCache, **inputs: paddle.Tensor
) -> paddle.Tensor:
    """Run one forward pass without dropout; return the hidden states of all tokens on every rank."""
    training = decoder.training
    decoder.eval()
    try:
        with decoder.tp.no_sequence_parallel():
            return decoder(ids, positions, cache, **inputs)
    finally:
        if training:
            decoder.train()
