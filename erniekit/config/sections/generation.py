"""3.1 Generation: how answers are sampled."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import parameter, section

ANSWERING_VERBS = ("chat", "generate", "speak", "server")


@dataclass(frozen=True)
class GenerationParameters:
    """How `erniekit chat`, `generate` and `server` sample answers, and `erniekit speak` the first level of codes."""

    max_new_tokens: int = parameter(
        1024,
        "The largest number of tokens in an answer. An answer also stops at the end token.",
        minimum=1,
        unit="tokens",
        example=256,
    )
    temperature: float = parameter(
        0.95,
        "Divide the logits by this before sampling. Values below 1 favour likely tokens, values above 1 unlikely ones. "
        "0 always takes the most likely token.",
        minimum=0.0,
        verbs=ANSWERING_VERBS,
        example=0.0,
    )
    top_p: float = parameter(
        0.7,
        "Sample from the smallest set of most likely tokens whose probabilities add up to at least this. 1 allows all.",
        above=0.0,
        maximum=1.0,
        verbs=ANSWERING_VERBS,
        example=0.9,
    )
    top_k: int = parameter(
        0,
        "Sample from this many of the most likely tokens at most. 0 sets no limit.",
        minimum=0,
        unit="tokens",
        verbs=ANSWERING_VERBS,
        example=50,
    )
    repetition_penalty: float = parameter(
        1.0,
        "Divide the positive logits of tokens that have already appeared by this, and multiply the negative ones. "
        "1 changes nothing; above 1 repetition becomes less likely.",
        above=0.0,
        verbs=ANSWERING_VERBS,
        example=1.1,
    )
    max_model_len: int | None = parameter(
        None,
        "The largest length of prompt and answer together. An answer stops there, a prompt that leaves no room for an "
        "answer is refused, and `erniekit chat` drops the oldest turns of a longer conversation. null uses the model's "
        "limit.",
        minimum=1,
        unit="tokens",
        verbs=("chat", "generate", "server"),
        example=16384,
    )


SECTION = section(GenerationParameters, key="generation", title="3.1 Generation", verbs=("chat", "generate", "server"))
