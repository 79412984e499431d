"""/v1/chat/completions and /v1/completions: answers, streams, what is asked for beside them, and what is refused."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from erniekit.config.sections.serving import ServingParameters
from erniekit.data.conversation import USER, Conversation, Turn
from erniekit.inference.engine import ChatModel
from erniekit.inference.sampling import Sampling
from erniekit.serving import answers
from erniekit.serving import open as opening
from erniekit.serving.served import Served
from erniekit.web.listen import bind
from tests.serving.asking import GREEDY, app_of, ask, ask_app, events_of, serving
from tests.serving.conftest import TINY_ERNIE

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = "What is 1 + 1?"
CALL = 'Well.<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def chat(served: Served, text: str = QUESTION, **more: Any) -> Any:
    return ask(served, CHAT, {"model": "tiny", "messages": [{"role": "user", "content": text}], **more})


def answer_of(response: Any) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_answers_at_temperature_0_are_those_of_generate(served: Served) -> None:
    expected = served.chat.answer([QUESTION, "Hello"], GREEDY)
    assert [answer_of(chat(served, text)) for text in (QUESTION, "Hello")] == expected
    body = chat(served, QUESTION).json()
    assert body["object"] == "chat.completion" and body["model"] == "tiny"
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 12
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 12


def test_a_stream_is_the_same_answer_in_pieces(served: Served) -> None:
    whole = answer_of(chat(served))
    response = chat(served, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage = events_of(response)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant" and len(deltas) > 3
    assert "".join(delta.get("content", "") for delta in deltas) == whole
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 12


def test_a_completion_continues_a_text_without_the_template(served: Served) -> None:
    (expected,) = served.chat.answer([QUESTION], GREEDY, raw=True)
    body = ask(served, COMPLETIONS, {"prompt": QUESTION}).json()
    assert body["choices"][0]["text"] == expected and body["object"] == "text_completion"
    ids = served.chat.encode_text(QUESTION).ids
    both = ask(served, COMPLETIONS, {"prompt": [ids, ids[:4]], "n": 2}).json()
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["choices"][0]["text"] == both["choices"][1]["text"] == expected != both["choices"][2]["text"]
    assert both["usage"]["prompt_tokens"] == len(ids) + 4


def test_a_seed_decides_and_without_one_draws_are_new(served: Served) -> None:
    hot = {"temperature": 1.5, "max_tokens": 12}
    first, again = (answer_of(chat(served, seed=7, **hot)) for _ in range(2))
    (expected,) = served.chat.answer([QUESTION], Sampling(12, temperature=1.5, seed=7))
    assert first == again == expected
    assert len({answer_of(chat(served, **hot)) for _ in range(4)}) > 1
    several = chat(served, seed=7, n=3, **hot).json()["choices"]
    assert several[0]["message"]["content"] == first
    assert len({choice["message"]["content"] for choice in several}) > 1


def test_an_answer_ends_before_a_stop_word(served: Served) -> None:
    whole = answer_of(chat(served))
    word = whole[len(whole) // 2 :][:3]
    expected = whole[: whole.index(word)]
    body = chat(served, stop=[word, "never"]).json()["choices"][0]
    assert body["message"]["content"] == expected and body["finish_reason"] == "stop"
    chunks = events_of(chat(served, stop=word, stream=True))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected
    assert served.places.taken == 0


def test_logprobs_are_those_of_the_tokens(served: Served) -> None:
    choice = chat(served, logprobs=True, top_logprobs=3).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 12 and all(len(each["top_logprobs"]) == 3 for each in content)
    for each in content:  # greedy takes the likeliest
        assert each["logprob"] == pytest.approx(each["top_logprobs"][0]["logprob"])
        assert sum(math.exp(top["logprob"]) for top in each["top_logprobs"]) <= 1
    text = ask(served, COMPLETIONS, {"prompt": QUESTION, "logprobs": 2}).json()["choices"][0]["logprobs"]
    assert len(text["tokens"]) == len(text["token_logprobs"]) == 12 and text["text_offset"][0] == 0
    streamed = events_of(chat(served, logprobs=True, stream=True))
    told = [each for chunk in streamed for each in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [each["logprob"] for each in told] == pytest.approx([each["logprob"] for each in content])


def test_penalties_and_biases_change_answers(served: Served) -> None:
    plain = answer_of(chat(served))
    (ids,) = served.chat.answer_batch([served.chat.encode(Conversation((Turn(USER, QUESTION),)))], GREEDY)
    assert answer_of(chat(served, logit_bias={str(ids[0]): -100})) != plain
    assert answer_of(chat(served, frequency_penalty=2.0, presence_penalty=2.0, max_tokens=60)) != answer_of(
        chat(served, max_tokens=60)
    )


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"messages": []}, "messages", "expected a list of messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "expected"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "the last one"),
        ({"temperature": "hot"}, "temperature", "expected a number"),
        ({"temperature": -1}, "temperature", "from 0 to"),
        ({"n": 0}, "n", "from 1"),
        ({"n": True}, "n", "whole number"),
        ({"stop": [""]}, "stop", "not empty"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "token ids below"),
        ({"functions": []}, "functions", "does not know"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"tool_choice": "required", "tools": [{"name": "f"}]}, "tool_choice", "none or auto"),
        ({"messages": [{"role": "user", "content": [{"type": "audio", "audio": "/etc/passwd"}]}]}, None, "input_audio"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None, "image_url"),
    ],
)
def test_what_is_wrong_is_told_with_its_field(served: Served, body: dict, param: str | None, told: str) -> None:
    response = ask(served, CHAT, {"messages": [{"role": "user", "content": "x"}], **body})
    error = response.json()["error"]
    assert response.status_code == 400 and told in error["message"] and error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param


def test_other_refusals(served: Served) -> None:
    assert ask(served, CHAT, b"{").json()["error"]["code"] == "invalid_json"
    assert ask(served, CHAT, b"[1]").status_code == 400
    missing = ask(served, CHAT, {"model": "other", "messages": []})
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    long = chat(served, "one two " * 2000)
    assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"
    body = {"messages": [{"role": "user", "content": "x" * 10_000_000}]}
    huge = ask(served, CHAT, body, max_body_bytes=1 << 24)  # told before it is encoded
    assert "characters" in huge.json()["error"]["message"] and huge.json()["error"]["code"] == "context_length_exceeded"
    assert ask(served, "/v1/nowhere").status_code == 404 and ask(served, CHAT).status_code == 405
    assert ask(served, "/v1/audio/speech", {"input": "x", "voice": "alloy"}).json()["error"]["code"] == "wrong_model"
    tools = chat(served, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    assert tools.status_code == 400 and "no place" in tools.json()["error"]["message"]
    assert ask(served, CHAT, body).status_code == 413
    assert served.places.taken == 0


def test_models_health_and_figures(served: Served) -> None:
    listed = ask(served, "/v1/models").json()
    assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == ["tiny"]
    assert ask(served, "/v1/models/tiny").json()["object"] == "model"
    assert ask(served, "/v1/models/other").status_code == 404
    assert ask(served, "/health").json()["status"] == "ok"
    chat(served)
    page = ask(served, "/metrics").text
    assert 'erniekit_requests_total{endpoint="chat",status="200"}' in page
    assert "erniekit_answer_tokens_total" in page and "erniekit_step_seconds_bucket" in page


def test_places_are_limited_and_the_answer_says_for_how_long(served: Served) -> None:
    with served.places.take(6):
        response = chat(served, n=3)
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        assert response.json()["error"] == {
            **response.json()["error"],
            "type": "rate_limit_error",
            "code": "queue_full",
        }
        assert chat(served, n=2).status_code == 200
    assert chat(served, n=9).status_code == 400  # never has room


def test_the_end_of_the_server_is_told_within_a_stream() -> None:
    with serving(lambda: ChatModel.load(TINY_ERNIE, random_weights=True)) as own:
        steps = iter(range(100))
        own.engine._on_step = lambda *step: next(steps) == 20 and own.engine.stop()
        response = chat(own, stream=True, max_tokens=200)
        last = json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))
        assert response.status_code == 200 and last["error"]["code"] == "shutting_down"
        own.stopping = True
        later = chat(own)
        assert later.status_code == 503 and later.headers["retry-after"]
        assert ask(own, "/health").status_code == 503 and own.places.taken == 0


def told(loop: asyncio.AbstractEventLoop, begun: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop has been closed behind the client
        loop.call_soon_threadsafe(begun.set)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(served: Served, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 3000, "stream": stream}
    before = served.metrics.left._value.get()

    async def run() -> list[dict]:
        begun, sent = asyncio.Event(), []
        served.engine._on_step = lambda *step: told(loop, begun)
        messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> dict:
            if messages:
                return messages.pop()
            await begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            sent.append(message)

        loop = asyncio.get_running_loop()
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [(b"host", b"127.0.0.1")],
                 "query_string": b"", "root_path": "", "http_version": "1.1"}  # fmt: skip
        await app_of(served)(scope, receive, send)
        return sent

    try:
        sent = asyncio.run(run())
    finally:
        served.engine._on_step = served.metrics.step
    assert served.places.taken == 0 and served.metrics.left._value.get() == before + 1
    assert not any(message.get("more_body") is False for message in sent)
    assert chat(served).status_code == 200 and served.engine._scheduler.unfinished == 0


class Said:
    """Takes the place of `GrowingText`: the model calls a tool."""

    def __init__(self, decode: object) -> None:
        self.pieces = iter(CALL[start : start + 8] for start in range(0, len(CALL), 8))

    def add(self, token: int) -> str:
        return next(self.pieces, "")

    def rest(self) -> str:
        return "".join(self.pieces)


def test_tools_are_told_to_the_model_and_its_calls_come_back(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{%- if tools %}{{ tools | tojson }}{%- endif %}{%- for message in messages %}"
        "{{- '<|begin_of_sentence|>' + message['role'] + ': ' + (message['content'] or '') }}"
        "{%- for call in message['tool_calls'] or [] %}{{- '<tool_call>' + call.function.arguments.city }}{%- endfor %}"
        "{{- '<|end_of_sentence|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|begin_of_sentence|>assistant: ' }}{%- endif %}"
    )
    for path in TINY_ERNIE.iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    with serving(lambda: ChatModel.load(tmp_path, random_weights=True)) as own:
        plain, with_tools = chat(own), chat(own, tools=[tool])
        tokens = [response.json()["usage"]["prompt_tokens"] for response in (plain, with_tools)]
        assert tokens[1] > tokens[0] + 20
        assert chat(own, tools=[tool], tool_choice="none").json()["usage"]["prompt_tokens"] == tokens[0]
        monkeypatch.setattr(answers, "GrowingText", Said)
        message = chat(own, tools=[tool]).json()["choices"][0]["message"]
        chunks = events_of(chat(own, tools=[tool], stream=True))
        monkeypatch.undo()
        call = message["tool_calls"][0]
        assert message["content"] == "Well." and call["function"]["name"] == "weather"
        streamed = [each for chunk in chunks for each in chunk["choices"][0]["delta"].get("tool_calls", [])]
        assert [each["function"] for each in streamed] == [call["function"]]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        dialogue = [
            {"role": "user", "content": "Is it warm?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "30 degrees"},
        ]
        assert ask(own, CHAT, {"messages": dialogue, "tools": [tool]}).status_code == 200
        call["function"]["arguments"] = "{"
        assert "is not JSON" in ask(own, CHAT, {"messages": dialogue}).json()["error"]["message"]


@pytest.mark.proves("max_body_mb")
def test_the_parameter_says_how_large_a_body_may_be(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    apps = []
    monkeypatch.setattr(opening, "serve", lambda app, *rest, **more: apps.append(app))
    for megabytes in (1, 2):
        monkeypatch.setattr(served.engine, "stop", lambda: None)
        monkeypatch.setattr(served.engine, "join", lambda seconds: None)
        with bind("127.0.0.1", 0) as listening:
            opening.run(served, listening, ServingParameters(max_body_mb=megabytes), "")
    body = {"messages": [{"role": "user", "content": "x" * 1_500_000}]}
    assert [ask_app(app, CHAT, body).status_code for app in apps] == [413, 400]
