"""Servers on the loopback interface that speak as much of the hubs' HTTP as their libraries need to fetch a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"


class FakeHub:
    """Repositories and what was asked of them.

    Attributes:
        repositories: "owner/name" -> revision -> file name -> content.
        gated: repositories that want their terms accepted.
        requests: method and path of every request.
        cut: file names that are sent with less than they announce.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.gated: set[str] = set()
        self.requests: list[str] = []
        self.cut: set[str] = set()
        self.url = ""

    def downloaded(self) -> list[str]:
        """The names of the files that were sent."""
        marks = ("/resolve/", "/media/", "FilePath=")
        sent = [path for path in self.requests if path.startswith("GET ") and any(mark in path for mark in marks)]
        return sorted(
            unquote(path.split("?ref=")[0].split("FilePath=")[-1].split("/")[-1].split("&")[0]) for path in sent
        )


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Run the hub on a free port while the body runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, *arguments: object) -> None:
            pass

        def _answer(self, with_body: bool) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            status, headers, body = respond(hub, self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                cut = any(name in self.path for name in hub.cut)
                self.wfile.write(body[: len(body) // 2] if cut else body)
                self.close_connection = self.close_connection or cut

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


Answer = tuple[int, dict[str, str], bytes]


def respond(hub: FakeHub, target: str) -> Answer:
    url = urlsplit(target)
    parts = [unquote(part) for part in url.path.strip("/").split("/")]
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    if parts[:2] == ["api", "models"] and parts[4:5] == ["tree"]:  # huggingface_hub 2 lists files through it
        return _hugging_face_tree(hub, "/".join(parts[2:4]), "/".join(parts[5:]))
    if parts[:2] == ["api", "models"]:
        return _hugging_face_info(hub, "/".join(parts[2:4]), "/".join(parts[5:]))
    if "resolve" in parts:
        return _hugging_face_file(hub, "/".join(parts[:2]), parts[3], "/".join(parts[4:]))
    if parts[:3] == ["api", "v1", "repos"]:
        files = hub.repositories.get("/".join(parts[3:5]), {}).get(query.get("ref", "master"), {})
        return _ai_studio(files, parts[5], "/".join(parts[6:]))
    if parts[:3] == ["api", "v1", "models"]:
        return _model_scope(hub, "/".join(parts[3:5]), parts[5:], query)
    if parts[0] == "modelcenter":
        return _json({"errorCode": 0})
    return _json({"message": "not found"}, 404)


def _hugging_face_info(hub: FakeHub, repo: str, revision: str) -> Answer:
    if repo in hub.gated:
        return _json({"error": "gated"}, 403, {"X-Error-Code": "GatedRepo"})
    if repo not in hub.repositories:
        return _json({"error": "not found"}, 404, {"X-Error-Code": "RepoNotFound"})
    files = hub.repositories[repo].get("main" if revision == COMMIT else revision)
    if files is None:
        return _json({"error": "not found"}, 404, {"X-Error-Code": "RevisionNotFound"})
    sha = revision if len(revision) == 40 else COMMIT
    return _json({"id": repo, "sha": sha, "siblings": [{"rfilename": name} for name in files]})


def _hugging_face_tree(hub: FakeHub, repo: str, revision: str) -> Answer:
    revisions = hub.repositories[repo]
    files = revisions.get(revision, revisions.get("main", {}))
    entries = [
        {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        for name, content in files.items()
    ]
    return _json(entries)


def _hugging_face_file(hub: FakeHub, repo: str, revision: str, name: str) -> Answer:
    revisions = hub.repositories[repo]
    content = revisions.get(revision, revisions.get("main", {}))[name]
    return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": revision}, content


def _ai_studio(files: dict[str, bytes], kind: str, name: str) -> Answer:
    if name not in files:
        return _json({"message": "not found"}, 404)
    sha = hashlib.sha1(files[name]).hexdigest()
    return (200, {}, files[name]) if kind == "media" else _json({"sha": sha, "last_commit_sha": COMMIT})


def _model_scope(hub: FakeHub, repo: str, rest: list[str], query: dict[str, str]) -> Answer:
    files = hub.repositories.get(repo, {}).get(query.get("Revision", "master"))
    if files is None:
        return _json({"Code": 10010205001, "Message": "not found", "Success": False}, 404)
    if rest == ["repo"]:
        return 200, {}, files[query["FilePath"]]
    entries = [
        {"Path": name, "Name": name, "Type": "blob", "Size": len(body), "Sha256": hashlib.sha256(body).hexdigest()}
        for name, body in files.items()
    ]
    return _json({"Code": 200, "Success": True, "Data": {"Files": entries, "TotalCount": len(entries)}})


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    return status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(value).encode()
