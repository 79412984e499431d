"""What `erniekit server` answers, without a model: python stub_server.py PORT."""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != f"Bearer {os.environ['ERNIEKIT_API_KEY']}":
            self._answer(401, b'{"error": {"message": "wrong key"}}')
        elif self.path == "/v1/chat/completions":
            self._stream(json.loads(body)["messages"][-1]["content"])
        elif self.path == "/v1/audio/transcriptions":
            self._answer(200, json.dumps({"text": f"{len(body)} bytes, {body.count(b'RIFF')} recording"}).encode())
        elif self.path == "/v1/audio/speech":
            self._answer(200, b"RIFF....WAVE", "audio/wav")
        else:
            self._answer(404, b"{}")

    def _stream(self, content: object) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        words = content if isinstance(content, str) else " and ".join(part["type"] for part in content)
        for word in f"You said {words}".split():
            event = {"choices": [{"delta": {"content": f"{word} "}}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
