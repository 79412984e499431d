"""`erniekit export --push`: the Hub's own client against a local server that answers as the Hub does."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from erniekit.errors import ConfigurationError
from erniekit.hub.upload import check_upload

ROOT = Path(__file__).parents[2]


class FakeHub(ThreadingHTTPServer):
    """Takes commits of small files, as the Hub's API documents them; with `refuses` it answers 403 to everything."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.created: list[str] = []
        self.tokens: set[str] = set()
        self.files: dict[str, bytes] = {}
        self.refuses = False


class _Answers(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        self._send(404, {"error": "not found"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub = self.server
        hub.tokens.add(self.headers.get("Authorization", ""))
        if hub.refuses:
            self._send(403, {"error": "You don't have the rights to create a model under the namespace me"})
        elif self.path == "/api/repos/create":
            values = json.loads(body)
            hub.created.append(f"{values.get('organization') or 'me'}/{values['name']}")
            self._send(200, {"url": f"{hub.address}/me/my-model"})
        elif self.path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._send(200, {"files": files})
        elif self.path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif "/commit/main" in self.path:
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    hub.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            self._send(200, {"commitUrl": f"{hub.address}/me/my-model/commit/abc", "commitOid": "abc", "success": True})
        else:
            self._send(404, {"error": f"{self.path}: not part of this fake"})

    def _send(self, status: int, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        if status >= 400:
            self.send_header("X-Error-Message", content["error"])
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def push(model: Path, target: Path, endpoint: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, for the client reads the Hub's address when it is imported."""
    words = ["export", str(model), "--output", str(target), "--push", "me/my-model"]
    own = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(target.parent / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "hf_secret",
    }
    return subprocess.run(
        [sys.executable, "-m", "erniekit", *words],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, **own, **environment},
    )  # fmt: skip


@pytest.mark.proves("hf_hub_id")
def test_the_folder_arrives_as_it_is_on_disk(train: Callable[..., Any], hub: FakeHub, tmp_path: Path) -> None:
    run, target = train().output, tmp_path / "exported"
    done = push(run, target, hub.address)
    assert done.returncode == 0, done.stderr
    assert hub.created == ["me/my-model"] and "Bearer hf_secret" in hub.tokens
    on_disk = {path.name: path.read_bytes() for path in target.iterdir()}
    assert hub.files == on_disk and "model.safetensors" in on_disk
    assert "uploaded to http" in done.stdout


def test_a_refusal_and_a_missing_network_leave_the_export(
    train: Callable[..., Any], hub: FakeHub, tmp_path: Path
) -> None:
    run, target = train().output, tmp_path / "exported"
    hub.refuses = True
    done = push(run, target, hub.address)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "the upload failed" in done.stderr and "403" in done.stderr
    assert (target / "manifest.json").is_file() and f"huggingface-cli upload me/my-model {target}" in done.stderr
    assert "hf_secret" not in done.stderr
    done = push(run, tmp_path / "again", "http://127.0.0.1:9")
    assert done.returncode == 2 and "the upload failed" in done.stderr and "Traceback" not in done.stderr
    done = push(run, tmp_path / "without", "http://127.0.0.1:9", HF_TOKEN="")
    assert done.returncode == 2 and "there is no token" in done.stderr and not (tmp_path / "without").exists()


@pytest.mark.parametrize("name", ["model", "a/b/c", "/model", "me/", "me/my model"])
def test_names_that_are_none_of_a_repository(name: str) -> None:
    with pytest.raises(ConfigurationError, match="expected OWNER/NAME"):
        check_upload(name)
