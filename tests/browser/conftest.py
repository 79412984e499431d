"""A real browser without a window, and the page's server in a thread: `make test-browser` runs these tests."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from erniekit.ui import talk
from erniekit.ui.app import make_app
from erniekit.ui.workspace import Workspace
from tests.ui.conftest import CONFIGURATION

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

STUB = Path(__file__).parents[1] / "ui" / "stub_server.py"
TOKEN = "token-of-the-tests"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream",
)  # fmt: skip
SIZES = {"wide light": (1280, 900, "light"), "narrow dark": (390, 844, "dark")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("browser")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.fail("these tests need Chromium: apt-get install -y chromium (`.ci/run` does it where it may)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, records: Path) -> Path:
    """A working folder with a configuration and two runs that are over."""
    root = tmp_path_factory.mktemp("browser") / "work"
    shutil.copytree(tiny_model, root / "model")
    (root / "model" / "model.safetensors").write_bytes(b"")
    (root / "data").mkdir()
    shutil.copy(records, root / "data" / "train.jsonl")
    (root / "sft.yaml").write_text(CONFIGURATION, encoding="utf-8")
    for name, scale in (("first", 1.0), ("second", 1.3)):
        folder = root / "out" / name
        folder.mkdir(parents=True)
        losses = [{"step": step, "loss": scale * 40 / (step + 10), "learning_rate": 1e-3} for step in range(1, 90)]
        text = "".join(json.dumps(each) + "\n" for each in [*losses, {"step": 89, "eval_loss": scale}])
        (folder / "training_log.jsonl").write_text(text)
        (folder / "training_config.yaml").write_text(f"seed: 42\nlearning_rate: {scale / 1000}\n")
        (folder / "eval_samples.jsonl").write_text(
            '{"messages": [{"content": "2 + 2"}], "expected": "4", "answer": "5"}\n'
        )
    return root


@pytest.fixture(scope="session")
def address(work: Path) -> Iterator[str]:
    """The address of the page, with its token; models are answered for by the stub."""
    import uvicorn

    patch = pytest.MonkeyPatch()
    patch.chdir(work)
    patch.setattr(talk, "server_command", lambda folder, port: [sys.executable, str(STUB), str(port)])
    server = uvicorn.Server(uvicorn.Config(make_app(Workspace.of(work), TOKEN), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/#token={TOKEN}"
    server.should_exit = True
    thread.join(10)
    patch.undo()


@pytest.fixture(params=list(SIZES))
def size(request: pytest.FixtureRequest) -> tuple[int, int, str]:
    return SIZES[request.param]


@pytest.fixture
def open_page(browser: Browser, address: str) -> Iterator[Callable[..., Page]]:
    """Open the page of a size; afterwards no script has failed and nothing was asked of another address."""
    contexts: list[Any] = []
    problems: list[str] = []

    def opened(size: tuple[int, int, str] = SIZES["wide light"], place: str = "configure") -> Page:
        width, height, scheme = size
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        own = address.partition("#")[0]

        def watch(request: Request) -> None:
            if not request.url.startswith((own, "blob:", "data:")):
                problems.append(f"asked for {request.url}")

        page.on("request", watch)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if _is_problem(said) else None)
        page.goto(address)
        page.wait_for_selector("nav a")
        if place != "configure":
            page.click(f"nav a[href='#/{place}']")
        page.wait_for_selector("main h1")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not problems


def _is_problem(said: Any) -> bool:
    """Whether a line of the console is an error; that a request was refused is told there, too, and is none."""
    return said.type == "error" and "Failed to load resource" not in said.text
