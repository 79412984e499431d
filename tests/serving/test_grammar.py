"""Answers that follow a JSON schema, whatever the model would rather write."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from erniekit.serving import grammar
from erniekit.serving.served import Served
from tests.serving.asking import ask

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}


def asked(served: Served, form: dict, **more: object) -> object:
    body = {"messages": [{"role": "user", "content": "Tell me."}], "max_tokens": 300, "response_format": form, **more}
    return ask(served, CHAT, body)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_answer_follows_its_schema(served: Served, temperature: float) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    response = asked(served, form, temperature=temperature, seed=3, n=3)
    assert response.status_code == 200, response.text
    for choice in response.json()["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_what_cannot_be_followed_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = asked(served, {"type": "json_schema", "json_schema": {"schema": {"type": "animal"}}})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "response_format"
    assert asked(served, {"type": "json_schema", "json_schema": {}}).status_code == 400
    long = {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 200_000]}}}
    assert "characters" in asked(served, long).json()["error"]["message"]
    grammars = grammar.Grammars(served.chat)
    monkeypatch.setattr(served.chat.tokenizer, "folder", tmp_path)
    with pytest.raises(grammar.RefusedError, match=r"tokenizer\.json"):
        grammars.of_schema(SCHEMA)
    monkeypatch.setattr(grammar.importlib, "import_module", missing)
    with pytest.raises(grammar.RefusedError, match="pip install"):
        grammar.Grammars(served.chat).of_schema(SCHEMA)


def missing(name: str) -> object:
    raise ImportError(name)
