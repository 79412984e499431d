"""Shared by all tests: the CPU set-up must be in force before anything imports Paddle."""

from collections.abc import Iterator

import pytest

from erniekit.environment import apply_cpu_settings
from erniekit.native import library
from erniekit.native.library import processor_paths
from tests.log_capture import captured_log

apply_cpu_settings(threads=2)

pytest_plugins = ["tests.tiny_runs"]
FIXTURES_THAT_TRAIN = {"train", "prefer", "train_adapters", "train_on_ranks"}


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The lines that ERNIEKit logs during the test, as the command line shows them."""
    with captured_log() as lines:
        yield lines


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what trains through a fixture of `tests/tiny_runs.py` as slow: a third of the time of all tests."""
    for item in items:
        if FIXTURES_THAT_TRAIN & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")


@pytest.fixture(params=processor_paths() or ["none"])
def native_path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every path of the native kernels that this processor has, in turn; skipped where none can be had."""
    library.use("auto")
    if library.kernels().path == library.PADDLE:
        pytest.skip(library.kernels().reason)
    library.use(request.param)
    yield request.param
    library.use("auto")
