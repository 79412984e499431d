"""The model that the page talks with: started, asked through the page, ended with it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from erniekit.ui import talk

STUB = Path(__file__).with_name("stub_server.py")


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(talk, "server_command", lambda model, port: [sys.executable, str(STUB), str(port), str(folder)])


def wait(client: TestClient, state: str) -> dict[str, object]:
    end = time.monotonic() + 20
    while (now := client.get("/api/talk").json())["state"] != state:
        assert time.monotonic() < end, now
        time.sleep(0.05)
    return dict(now)


def test_models_of_the_folder_are_listed(client: TestClient, folder: Path) -> None:
    assert client.get("/api/models").json() == []  # the folder `model` has no weights
    (folder / "model" / "model.safetensors").write_bytes(b"")
    (folder / "adapters").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / "adapters" / name).write_bytes(b"{}")
    assert {model["folder"] for model in client.get("/api/models").json()} == {"model", "adapters"}


def test_a_dialogue_is_passed_on_as_it_comes(client: TestClient) -> None:
    assert client.get("/api/talk").json()["state"] == "none"
    started = client.post("/api/talk/start", json={"folder": "model"}).json()
    assert started["model"] == "model" and started["chats"] and not started["hears"] and not started["speaks"]
    wait(client, "ready")
    asked = {"messages": [{"role": "user", "content": "good morning"}], "stream": True}
    with client.stream("POST", "/api/talk/v1/chat/completions", json=asked) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = "".join(answer.iter_text())
    assert '"You "' in text and '"morning "' in text and text.rstrip().endswith("[DONE]")
    answer = client.post("/api/talk/v1/audio/transcriptions", files={"file": ("a.wav", b"RIFF", "audio/wav")})
    assert "1 recording" in answer.json()["text"]
    assert client.post("/api/talk/v1/audio/speech", json={"input": "x"}).content.startswith(b"RIFF")
    assert client.post("/api/talk/stop", json={}).json()["state"] == "none"


@pytest.mark.parametrize("path", ["metrics", "v1/../health", "v1/files", "v1%2Fmodels/x"])
def test_only_the_endpoints_of_a_chat_are_passed_on(client: TestClient, path: str) -> None:
    assert client.post(f"/api/talk/{path}", json={}).status_code in (404, 405, 422)


def test_nobody_answers_before_a_model_is_loaded(client: TestClient) -> None:
    answer = client.post("/api/talk/v1/chat/completions", json={"messages": []})
    assert answer.status_code == 422 and "no model is loaded" in answer.json()["error"]


@pytest.mark.parametrize(("folder_", "code"), [("../x", 403), ("data", 422), ("none", 422)])
def test_folders_without_a_model_are_refused(client: TestClient, folder_: str, code: int) -> None:
    assert client.post("/api/talk/start", json={"folder": folder_}).status_code == code


def test_adapters_of_a_model_elsewhere_are_refused(client: TestClient, folder: Path, tiny_model: Path) -> None:
    (folder / "adapters").mkdir()
    (folder / "adapters" / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{tiny_model}"}}')
    answer = client.post("/api/talk/start", json={"folder": "adapters"})
    assert answer.status_code == 422


def test_what_a_process_that_fails_has_said_is_shown_without_secrets(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import os; print('cannot load', os.environ['ERNIEKIT_API_KEY'], os.environ['OTHER_KEY']); raise SystemExit(2)"
    )
    monkeypatch.setattr(talk, "server_command", lambda folder, port: [sys.executable, "-c", program])
    monkeypatch.setenv("OTHER_KEY", "sk-abcdefghijk")
    client.post("/api/talk/start", json={"folder": "model"})
    now = wait(client, "failed")
    assert now["said"] == "cannot load *** ***\n"


def test_the_process_ends_with_the_page(client: TestClient, folder: Path) -> None:
    client.post("/api/talk/start", json={"folder": "model"})
    wait(client, "ready")
    client.__exit__(None, None, None)  # the server of the page ends
    running = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(folder).encode() in _read(path)]
    assert not running
    client.__enter__()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
