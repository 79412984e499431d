"""Shared by all tests: the CPU set-up must be in force before anything imports Paddle."""

import signal
from collections.abc import Iterator

import pytest

from erniekit.environment import apply_cpu_settings
from erniekit.native import library
from tests.log_capture import captured_log

apply_cpu_settings(threads=1)  # workers share the cores; tests of threads choose their number
# `nohup` ignores SIGHUP and a script's `&` SIGINT; runs that tests start and end would inherit that.
for _number, _default in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _default)

pytest_plugins = ["tests.tiny_runs", "tests.object_stores"]

FIXTURES_THAT_TRAIN = {"train", "prefer", "train_adapters", "train_on_ranks"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-kernels", default="auto", help="the kernels of tests that choose none, as `cpu_kernels`")


@pytest.fixture(autouse=True)
def kernels_of_this_session(request: pytest.FixtureRequest) -> None:
    """Let no test leave other kernels to the next one."""
    library.use(request.config.getoption("--cpu-kernels"))


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


@pytest.fixture
def native_kernels(kernels_of_this_session: None) -> None:
    """The fastest native kernels, also where tests that choose none have Paddle's; skipped where none can be had."""
    kernels = library.use("auto")
    if kernels.path == library.PADDLE:
        pytest.skip(kernels.reason)


@pytest.fixture(params=library.processor_paths() or ["none"])
def native_path(request: pytest.FixtureRequest, native_kernels: None) -> str:
    """Every path of the native kernels that this processor has, in turn; skipped where none can be had."""
    return library.use(request.param).path
