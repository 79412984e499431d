"""What a server begins with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.config.sections.serving import ServingParameters
from erniekit.serving import open as opening
from erniekit.web.listen import bind


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_requests_are_guarded_by_who_may_ask(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guards: list[dict[str, Any]] = []
    monkeypatch.setattr(opening, "application", lambda served: None)
    monkeypatch.setattr(opening, "guarded", lambda app, **named: guards.append(named))
    monkeypatch.setattr(opening, "serve", lambda *given, **named: None)
    engine = SimpleNamespace(stop=lambda: None, join=lambda seconds: None)
    served: Any = SimpleNamespace(engine=engine, stopping=False, name="tiny")
    with bind("127.0.0.1", 0) as listening:
        opening.run(served, listening, ServingParameters(host=host, max_body_mb=3), "a-key")
    assert guards == [{"host": host, "api_key": "a-key", "max_body_bytes": 3 << 20}]
