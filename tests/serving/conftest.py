"""Shared by the tests of the server: one tiny model with random weights, which answer more variedly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from erniekit.inference.engine import ChatModel
from erniekit.serving.served import Served
from tests.serving.asking import serving

TINY_ERNIE = Path(__file__).parents[2] / "examples/models/tiny-ernie"


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving(
        lambda: ChatModel.load(TINY_ERNIE, random_weights=True), max_num_seqs=4, max_waiting_requests=4
    ) as own:
        yield own
