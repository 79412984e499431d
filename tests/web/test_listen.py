"""Ports are bound before anything is loaded, and what is wrong with them is told."""

from __future__ import annotations

import resource

import pytest

from erniekit.errors import UserError
from erniekit.web import packages
from erniekit.web.listen import address_of, allow_open_files, bind, url_of


def test_port_0_is_any_free_one() -> None:
    with bind("127.0.0.1", 0) as listening:
        host, port = address_of(listening)
        assert host == "127.0.0.1" and port > 0 and url_of(listening) == f"http://127.0.0.1:{port}"


def test_a_port_that_is_taken_is_told() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(UserError, match=r"another program listens there\n.*port=0"):
            bind("127.0.0.1", address_of(first)[1])
    with pytest.raises(UserError, match="no host name or address"):
        bind("no such host", 0)
    with pytest.raises(UserError, match="cannot be used"):
        bind("192.0.2.1", 0)  # of nobody (RFC 5737)


def test_open_files_are_allowed_up_to_the_hard_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        assert allow_open_files(300) == 300 and resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        assert allow_open_files(100) == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_missing_packages_are_told_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    packages.require_packages("server")
    monkeypatch.setattr(packages, "PACKAGES", ("starlette", "no_such_package"))
    with pytest.raises(UserError, match=r"`erniekit server` needs no_such_package: pip install 'erniekit\[server\]'"):
        packages.require_packages("server")
