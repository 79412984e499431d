"""POST /v1/completions: continue texts without the chat template."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from erniekit.data.placeholders import EncodedPrompt
from erniekit.inference.engine import ChatModel
from erniekit.serving.answers import Question
from erniekit.serving.asked import Asked
from erniekit.serving.endpoint import Reply
from erniekit.serving.errors import RefusedError
from erniekit.serving.fields import Fields, body_of
from erniekit.serving.questions import MOST_LOGPROBS, check_length, questions, wanted
from erniekit.serving.served import Served
from erniekit.serving.shapes import CompletionShape

EXPECTED = "prompt: expected a text, a list of texts, a list of token ids, or a list of such lists"


async def completions(request: Request, served: Served) -> Reply:
    """Continue texts."""
    fields = body_of(await request.body())
    model = served.chat
    adapters = served.adapters_of(fields.text("model", ""))
    logprobs = fields.whole("logprobs", None, least=0, most=MOST_LOGPROBS)
    asked = wanted(fields, model, served.defaults, logprobs=logprobs)
    if fields.flag("echo"):
        raise RefusedError("echo: the prompt is not sent back; put it before the answer", param="echo")
    best = fields.whole("best_of", asked.count, least=1)
    if best != asked.count:
        raise RefusedError("best_of: answers are not compared; ask for n of them", param="best_of")
    prompts = _prompts(fields)
    fields.end()

    def make() -> list[Question]:
        encoded = [_encoded(prompt, model, served) for prompt in prompts]
        return questions(model, encoded, asked, adapters=adapters)

    shape, count = CompletionShape(model), asked.count * len(prompts)
    return await Asked(served, adapters or served.name, asked, shape, count, make, len(prompts)).reply(request)


def _prompts(fields: Fields) -> list[Any]:
    """Return texts and lists of token ids."""
    value = fields.take("prompt")
    prompts = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not prompts or not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in prompts):
        raise RefusedError(EXPECTED, param="prompt")
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int and each >= 0 for each in value)


def _encoded(prompt: Any, model: ChatModel, served: Served) -> EncodedPrompt:
    if not isinstance(prompt, str):
        return EncodedPrompt(prompt)
    check_length(prompt, model, served.defaults)
    return model.encode_text(prompt)
