"""Keep secrets out of logs, files and what trackers are told: keys, passwords and tokens become `***`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SHORTEST = 8  # characters of a variable's value that counts as a secret; "1" and "true" are none
_SECRET_VARIABLE = re.compile(
    r"(?<![A-Z0-9])(API|ACCESS|ACCOUNT|SAS|SECRET)?(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|PAT|CONNECTION_?STRING)S?"
    r"(?![A-Z0-9])"
)  # not TOKENIZERS_PARALLELISM
_SECRET_NAME = re.compile(
    r"(^|[_\-.])(api_?key|access_?key|secret(_?key)?|password|passwd|credentials?|(access|auth|api|hub|hf)_?token)"
    r"($|[_\-.])|^(token|key)$",
    re.IGNORECASE,
)
_PATTERNS = (
    # user:password@host; a user without a password may be a token, but az://container@account is a place
    (re.compile(r"(://)[^/\s:@?#]*:[^/\s?#]*@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(\bhttps?://)[^/\s@?#]+@", re.IGNORECASE), rf"\1{HIDDEN}@"),
    (
        re.compile(
            r"([?&;](?:[\w.%-]*(?:token|key|secret|password|signature|credential)(?:[_-]?id)?|sig|auth)=)[^&;\s#\"']+",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"\b(Bearer|Basic)\s+[\w.+/=-]{8,}"), rf"\1 {HIDDEN}"),
    (re.compile(r"\b(?:hf_|sk-|ghp_|glpat-)[\w-]{16,}"), HIDDEN),  # as hubs and services make them
)


def redacted(value: Any) -> Any:
    """Return a JSON value without secrets: of names such as `api_key` the value is hidden, and in texts whatever looks
    like one, or is the value of an environment variable such as `WANDB_API_KEY`."""
    return _redacted(value, _secrets_of_environment())


def _redacted(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        return _text(value, secrets)
    if isinstance(value, Mapping):
        return {
            _text(str(name), secrets): HIDDEN if _is_secret(str(name), inner) else _redacted(inner, secrets)
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_redacted(inner, secrets) for inner in value]
    return value


def _is_secret(name: str, value: Any) -> bool:
    return isinstance(value, str) and bool(value) and bool(_SECRET_NAME.search(name))


def _text(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def _secrets_of_environment() -> list[str]:
    """Return the values of variables whose names say that they are secret, the longest first."""
    found = {
        value for name, value in os.environ.items() if len(value) >= _SHORTEST and _SECRET_VARIABLE.search(name.upper())
    }
    return sorted(found, key=len, reverse=True)
