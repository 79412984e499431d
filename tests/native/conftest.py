"""Kernels divide their work between two threads here, also on a machine with one core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from erniekit.native import openmp


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with openmp.threads(2):
        yield
