"""Shared by all tests: the CPU set-up must be in force before anything imports Paddle."""

from collections.abc import Iterator

import pytest

from erniekit.environment import apply_cpu_settings
from tests.log_capture import captured_log

apply_cpu_settings(threads=2)

pytest_plugins = ["tests.tiny_runs"]


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The lines that ERNIEKit logs during the test, as the command line shows them."""
    with captured_log() as lines:
        yield lines
