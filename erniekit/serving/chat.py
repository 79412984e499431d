"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from starlette.requests import Request

from erniekit.inference.decoding.scheduler import Constraint
from erniekit.serving.answers import Question
from erniekit.serving.asked import Asked
from erniekit.serving.endpoint import Reply
from erniekit.serving.errors import RefusedError
from erniekit.serving.fields import Fields, body_of
from erniekit.serving.messages import conversation_of
from erniekit.serving.questions import MOST_LOGPROBS, check_length, questions, wanted
from erniekit.serving.served import Served
from erniekit.serving.shapes import ChatShape
from erniekit.serving.tool_calls import call_format


async def chat(request: Request, served: Served) -> Reply:
    """Answer a dialogue."""
    fields = body_of(await request.body())
    model, name = served.chat, fields.text("model", "")
    adapters = served.adapters_of(name)
    alternatives = fields.whole("top_logprobs", 0, least=0, most=MOST_LOGPROBS)
    tells = fields.flag("logprobs")
    if alternatives and not tells:
        raise RefusedError("top_logprobs: needs logprobs: true", param="top_logprobs")
    asked = wanted(fields, model, served.defaults, logprobs=alternatives if tells else None)
    uses_tools = _uses_tools(fields)
    constraint = _constraint(fields, served)
    if constraint is not None and uses_tools:
        raise RefusedError("response_format: a schema and tools do not go together here", param="response_format")
    templates = (model.tokenizer.chat_templates or {"": "[TOOL_CALLS]"}).values()
    calls = call_format(templates) if uses_tools else None

    def make() -> list[Question]:
        with TemporaryDirectory(prefix="erniekit-server-") as folder:
            conversation = conversation_of(fields, Path(folder), uses_tools=uses_tools)
            fields.end()
            for text in (conversation.system, *(turn.content for turn in conversation.turns)):
                check_length(text, model, served.defaults)
            prompt = model.encode(conversation)
            return questions(
                model,
                [prompt],
                asked,
                adapters=adapters,
                constraint=constraint,
                keeps_control_tokens=calls is not None,
            )

    shape = ChatShape(model, calls)
    return await Asked(served, adapters or served.name, asked, shape, asked.count, make).reply(request)


def _uses_tools(fields: Fields) -> bool:
    """Return whether the model is told of tools."""
    choice = fields.take("tool_choice", "auto")
    if choice not in ("none", "auto"):
        raise RefusedError(
            "tool_choice: expected none or auto; nothing here makes a model call a tool", param="tool_choice"
        )
    if not fields.flag("parallel_tool_calls", True):
        raise RefusedError(
            "parallel_tool_calls: false is not offered; take the first of the calls", param="parallel_tool_calls"
        )
    return bool(fields.take("tools")) and choice == "auto"


def _constraint(fields: Fields, served: Served) -> Callable[[], Constraint] | None:
    """Return what makes the constraint of each answer, which `response_format` asks for; None for any text."""
    form = fields.take("response_format", {"type": "text"})
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        own = form.get("json_schema")
        schema = own.get("schema") if isinstance(own, dict) else None
        if not isinstance(schema, dict):
            raise RefusedError("response_format.json_schema.schema: expected an object", param="response_format")
    elif kind != "json_object":
        raise RefusedError(
            "response_format: expected the type text, json_object or json_schema", param="response_format"
        )
    return lambda: served.grammars.of_schema(schema)
