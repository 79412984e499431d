"""Who may use the page: this machine's browser, with the token, from the page itself."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from erniekit.ui.app import HEADERS
from tests.ui.conftest import ADDRESS


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8600", "127.0.0.1.evil.example", "", "192.168.0.7:8600"]
)
@pytest.mark.parametrize("path", ["/", "/static/main.js", "/api/session"])
def test_other_hosts_are_refused(client: TestClient, host: str, path: str) -> None:
    assert client.get(path, headers={"Host": host}).status_code in (400, 403, 421)


@pytest.mark.parametrize("host", ["127.0.0.1:8600", "localhost:8600", "localhost:9000"])
def test_names_of_this_machine_are_served(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:9999", "null"])
def test_other_origins_are_refused(client: TestClient, origin: str) -> None:
    assert client.post("/api/check", json={"text": ""}, headers={"Origin": origin}).status_code == 403
    assert client.get("/api/session", headers={"Origin": origin}).status_code == 403


def test_the_page_itself_is_served(client: TestClient) -> None:
    assert client.post("/api/check", json={"text": ""}, headers={"Origin": ADDRESS}).status_code == 200


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer wrong", "Basic token-of-the-tests", "Bearer token-of-the-tests2"]
)
@pytest.mark.parametrize("path", ["/api/session", "/api/runs", "/api/talk/v1/models", "/api/none"])
def test_endpoints_want_the_token(client: TestClient, value: str, path: str) -> None:
    assert client.get(path, headers={"Authorization": value}).status_code == 401


def test_no_cookie_and_no_token_in_what_is_served(client: TestClient) -> None:
    for path in ("/", "/static/api.js", "/api/session"):
        answer = client.get(path)
        assert (
            answer.status_code == 200 and "set-cookie" not in answer.headers and "token-of-the-tests" not in answer.text
        )


def test_every_answer_has_the_headers_of_safety(client: TestClient) -> None:
    for path in ("/", "/static/main.js", "/static/none.js", "/api/session", "/api/file?path=../x.yaml"):
        answer = client.get(path)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


def test_static_files_stay_in_their_folder(client: TestClient) -> None:
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd"):
        assert client.get(path).status_code == 404


def test_large_and_broken_bodies_are_refused(client: TestClient) -> None:
    assert client.post("/api/check", content=b"{" * 10).status_code == 422
    assert client.post("/api/check", content=b"[1]").status_code == 422
    assert client.post("/api/check", content=b"x", headers={"Content-Length": "100000000"}).status_code == 413
