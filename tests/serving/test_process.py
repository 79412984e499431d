"""`erniekit server` as a process of its own, asked by the official client of OpenAI."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from erniekit.inference.engine import ChatModel
from erniekit.inference.sampling import Sampling
from erniekit.web.listen import allow_open_files
from tests.serving.conftest import TINY_ERNIE
from tests.tiny_runs import save_random_model

pytestmark = pytest.mark.slow
KEY = "a key of this test".replace(" ", "-")
QUESTION = [{"role": "user", "content": "What is 1 + 1?"}]
IDLE = 1000  # connections


class Server(NamedTuple):
    process: subprocess.Popen
    url: str
    folder: Path

    def client(self, **more: Any) -> Any:
        return openai.OpenAI(base_url=self.url, api_key=KEY, max_retries=0, **more)


def start(folder: Path, *words: str) -> Server:
    command = [sys.executable, "-m", "erniekit", "server", str(folder), "port=0", "device=cpu", *words]
    environment = {**os.environ, "ERNIEKIT_API_KEY": KEY, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"serving \S+ at (http://\S+)", line):
            return Server(process, found[1], folder)
    raise AssertionError("".join(lines))


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(TINY_ERNIE, tmp_path_factory.mktemp("served-model"), seed=3)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    own = start(folder, "max_num_seqs=8", "max_waiting_requests=8", "served_model_name=tiny", "max_body_mb=1")
    yield own
    own.process.kill()
    own.process.wait()


@pytest.mark.proves("port", "served_model_name")
def test_the_official_client_is_answered_as_generate_answers(server: Server) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert not server.url.endswith(":8188/v1")  # the default
    (expected,) = ChatModel.load(server.folder).answer(["What is 1 + 1?"], Sampling(20))
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == expected
    pieces, usage = [], None
    for chunk in client.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        temperature=0,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    ):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == expected and usage.completion_tokens == 20
    raw = client.completions.create(model="tiny", prompt="What is", temperature=0, max_tokens=5, logprobs=1)
    assert len(raw.choices[0].logprobs.tokens) == 5


def test_errors_are_those_of_the_official_client(server: Server) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError, match="there is no 'other'"):
        client.chat.completions.create(model="other", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model="tiny", messages=QUESTION, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="no place") as caught:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        client.chat.completions.create(model="tiny", messages=QUESTION, tools=[tool])
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url, api_key="other", max_retries=0).models.list()
    with pytest.raises(openai.APIStatusError) as caught:  # a prompt of 10 MB
        client.completions.create(model="tiny", prompt="x" * 10_000_000)
    assert caught.value.status_code == 413
    with pytest.raises(openai.RateLimitError) as caught:
        all_places = client.chat.completions.create(
            model="tiny", messages=QUESTION, n=16, max_tokens=3000, temperature=0, stream=True
        )
        next(iter(all_places))
        client.chat.completions.create(model="tiny", messages=QUESTION)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    all_places.close()


def in_flight(server: Server) -> int:
    return httpx.get(server.url.removesuffix("/v1") + "/health").json()["in_flight"]


def test_a_client_that_leaves_frees_its_place(server: Server) -> None:
    client = server.client()
    for _ in range(20):  # more than there are places
        stream = client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=3000, temperature=0, stream=True
        )
        next(iter(stream))
        stream.close()
    left = (in_flight(server) for _ in range(1000))
    assert next((0 for count in left if count == 0), 1) == 0


def test_idle_connections_keep_nobody_from_an_answer(server: Server) -> None:
    allow_open_files(2 * IDLE)
    host, port = re.fullmatch(r"http://(.*):(\d+)/v1", server.url).groups()
    with ExitStack() as stack:
        for _ in range(IDLE):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
        answer = server.client().chat.completions.create(model="tiny", messages=QUESTION, max_tokens=3)
        assert answer.usage.completion_tokens <= 3


def test_sigterm_lets_a_stream_end(server: Server) -> None:
    """The last test of this process."""
    stream = iter(
        server.client().chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=300, temperature=0, stream=True
        )
    )
    first = next(stream)
    server.process.send_signal(signal.SIGTERM)
    *_, last = [first, *stream]
    assert last.choices[0].finish_reason in ("length", "stop")
    output, _ = server.process.communicate(timeout=60)
    assert server.process.returncode == 128 + signal.SIGTERM, output
    assert "ending; answers under way: 1, which have 20 s" in output and "terminated" in output
    assert KEY not in output and "Traceback" not in output
