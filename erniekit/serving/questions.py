"""Turn the fields of a request into what the engine computes: sampling, stop words, prompts, a question per answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from erniekit.data.placeholders import EncodedPrompt
from erniekit.errors import UserError
from erniekit.inference.audio_prompts import prompt_inputs
from erniekit.inference.decoding.scheduler import Constraint, Inputs
from erniekit.inference.engine import ChatModel
from erniekit.inference.generation import length_limit, make_request
from erniekit.inference.sampling import Sampling
from erniekit.serving.answers import Question
from erniekit.serving.errors import RefusedError
from erniekit.serving.fields import Fields

MOST_STOP_WORDS, MOST_LOGPROBS, LARGEST_SEED = 16, 20, 2**63 - 1
MOST_BIASES = 1024
CHARACTERS_A_TOKEN = 256  # no vocabulary has longer words, so a text of more has more tokens than the limit
PROMPT_TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True)
class Wanted:
    """What a request says of its answers, whatever its prompt is.

    Attributes:
        count: of answers to each prompt.
        streams: whether they are sent as they grow.
        tells_usage: whether a stream ends with the numbers of tokens.
    """

    sampling: Sampling
    stop_words: tuple[str, ...]
    count: int
    streams: bool
    tells_usage: bool


def wanted(fields: Fields, model: ChatModel, defaults: Sampling, *, logprobs: int | None) -> Wanted:
    """Read the fields that chat and completions share.

    Args:
        defaults: what applies where a field is left out.
        logprobs: how many alternatives are told; None: nothing is.
    """
    limit = fields.whole("max_tokens", None, least=1)
    limit = fields.whole("max_completion_tokens", limit, least=1)
    sampling = replace(
        model.with_stop_tokens(defaults),
        max_new_tokens=limit or defaults.max_new_tokens,
        temperature=float(fields.number("temperature", defaults.temperature, least=0.0, most=100.0)),
        top_p=float(fields.number("top_p", defaults.top_p, least=0.0, most=1.0, above=True)),
        top_k=_top_k(fields, defaults),
        min_p=float(fields.number("min_p", 0.0, least=0.0, most=1.0)),
        repetition_penalty=float(
            fields.number("repetition_penalty", defaults.repetition_penalty, least=0.0, most=100.0, above=True)
        ),
        presence_penalty=float(fields.number("presence_penalty", 0.0, least=-2.0, most=2.0)),
        frequency_penalty=float(fields.number("frequency_penalty", 0.0, least=-2.0, most=2.0)),
        logit_bias=_biases(fields, model.decoder.config.vocab_size),
        seed=_seed(fields),
        logprobs=logprobs,
    )
    options = fields.take("stream_options", {})
    if not isinstance(options, dict):
        raise RefusedError("stream_options: expected an object", param="stream_options")
    own = Fields(options)
    tells_usage = own.flag("include_usage")
    own.take("include_obfuscation")  # padding of OpenAI's own streams
    own.end()
    return Wanted(
        sampling,
        fields.words("stop", most=MOST_STOP_WORDS),
        fields.whole("n", 1, least=1, most=1024),
        fields.flag("stream"),
        tells_usage,
    )


def _top_k(fields: Fields, defaults: Sampling) -> int:
    value = fields.whole("top_k", defaults.top_k, least=-1)
    return max(0, value)  # vLLM's -1 means none, too


def _seed(fields: Fields) -> int:
    """Return the seed of a request; without one its draws are new."""
    seed = fields.whole("seed", None, least=-LARGEST_SEED, most=LARGEST_SEED)
    return secrets.randbits(62) if seed is None else seed % (LARGEST_SEED + 1)


def _biases(fields: Fields, size: int) -> tuple[tuple[int, float], ...]:
    value = fields.take("logit_bias", {})
    expected = f"logit_bias: expected an object of token ids below {size:,} and numbers from -100 to 100"
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise RefusedError(expected, param="logit_bias")
    biases = []
    for token, bias in value.items():
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100 <= bias <= 100
        if not token.isdecimal() or not int(token) < size or not is_number:
            raise RefusedError(expected, param="logit_bias")
        biases.append((int(token), float(bias)))
    return tuple(biases)


def check_length(text: str, model: ChatModel, defaults: Sampling) -> None:
    """Raise RefusedError for a text that is too long whatever its tokens are, before any time is spent on it."""
    limit = length_limit(model.decoder, defaults.max_length)
    if len(text) > CHARACTERS_A_TOKEN * limit:
        raise RefusedError(
            f"the prompt has {len(text):,} characters, and the model reads {limit:,} tokens; shorten it",
            code=PROMPT_TOO_LONG,
        )


def questions(
    model: ChatModel,
    prompts: Sequence[EncodedPrompt],
    wanted: Wanted,
    *,
    adapters: str,
    constraint: Callable[[], Constraint] | None = None,
    keeps_control_tokens: bool = False,
) -> list[Question]:
    """Return a question for each answer: those to the first prompt, to the second one, and so on.

    The recordings of the prompts are read here.

    Raises:
        RefusedError: a prompt is empty, or too long.
        RecordingError: a recording cannot be read.
    """
    found = []
    for prompt in prompts:
        inputs = _read_inputs(model, prompt)
        for number in range(wanted.count):
            try:
                request = make_request(model.decoder, prompt.ids, wanted.sampling, number, inputs)
            except UserError as error:
                limit = length_limit(model.decoder, wanted.sampling.max_length)
                if len(prompt.ids) < limit:
                    raise RefusedError(str(error), code=None if prompt.ids else "empty_prompt") from None
                raise RefusedError(
                    f"the prompt has {len(prompt.ids):,} tokens, and this model takes {limit:,} of prompt and answer "
                    "together; shorten it",
                    code=PROMPT_TOO_LONG,
                ) from None
            own = constraint() if constraint is not None else None
            request = replace(request, adapters=adapters, constraint=own)
            found.append(Question(request, wanted.stop_words, keeps_control_tokens))
    return found


def _read_inputs(model: ChatModel, prompt: EncodedPrompt) -> Inputs | None:
    """Read the recordings of a prompt now, where what is wrong with them concerns one request alone."""
    read = prompt_inputs(prompt, model.audio)
    if read is None:
        return None
    arrays = read()
    return lambda: arrays
