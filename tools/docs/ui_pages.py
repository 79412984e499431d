"""Take the pictures of docs/ui.md: each page of `erniekit ui`, wide and light, narrow and dark.

    python tools/docs/ui_pages.py [--only runs]

Two short runs of the quickstart are trained first, then the real page is opened in Chromium. It takes two minutes.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "images" / "ui"
SIZES = {"wide": (1280, 860, "light"), "narrow": (390, 844, "dark")}
PAGES = ("configure", "data", "layout", "runs", "compare", "chat", "parameters")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars")
COLOURS = 256  # of a picture's palette
STEPS = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PAGES, help="take the pictures of one page")
    parser.add_argument("--folder", type=Path, help="keep the working folder here, and use it again if it is there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "my-project"
        if not (folder / "output").is_dir():
            make_folder(folder)
        take_pictures(folder, (options.only,) if options.only else PAGES)


def make_folder(folder: Path) -> None:
    """Fill a working folder: data, a model, configurations, and two runs that differ in their learning rate."""
    for part in ("examples/data", "examples/models/tiny-ernie", "examples/configs/quickstart"):
        shutil.copytree(ROOT / part, folder / part)
    config = (folder / "examples/configs/quickstart/sft.yaml").read_text(encoding="utf-8")
    (folder / "sft.yaml").write_text(re.sub(r"\A(#.*\n)+\n*", "", config), encoding="utf-8")
    common = [f"max_steps={STEPS}", "logging_steps=4", "eval_steps=50", "report_to=none", "eval_answers=8"]
    for name, rate in (("sft-1e-3", "1e-3"), ("sft-3e-4", "3e-4")):
        words = ["train", "sft.yaml", f"output_dir=output/{name}", f"learning_rate={rate}", *common]
        subprocess.run([sys.executable, "-m", "erniekit", *words], cwd=folder, check=True)


def take_pictures(folder: Path, pages: tuple[str, ...]) -> None:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    command = [sys.executable, "-m", "erniekit", "ui", str(folder), "--port", "0"]
    home = {**os.environ, "HOME": str(folder.absolute().parent)}  # so that the pictures show ~/my-project
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=home)
    assert server.stdout is not None
    address = next(line.strip() for line in server.stdout if "#token=" in line)
    PICTURES.mkdir(parents=True, exist_ok=True)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
            for size, (width, height, scheme) in SIZES.items():
                context = browser.new_context(
                    viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=1
                )
                page = context.new_page()
                page.set_default_timeout(120_000)
                page.goto(address)
                page.get_by_label("Configuration file").select_option("sft.yaml")
                page.wait_for_selector("#verdict.good")
                for name in pages:
                    show(page, name)
                    save(page.screenshot(full_page=name != "configure"), PICTURES / f"{name}-{size}.png")
                    print(f"{name}-{size}.png", flush=True)
            browser.close()
    finally:
        server.terminate()
        server.wait()


def show(page: Any, name: str) -> None:
    """Bring a page into the state that its picture shows."""
    page.locator(f"nav a[href='#/{'runs' if name == 'compare' else name}']").click()
    page.wait_for_selector("main h1")
    if name == "configure":
        page.evaluate("scrollTo(0, 0)")
    elif name == "data":
        page.locator("#documents").fill("4")
        page.get_by_role("button", name="Show the data").click()
        page.wait_for_selector(".document mark")
    elif name == "layout":
        page.locator("nav a[href='#/configure']").click()
        text = page.locator("#yaml")
        text.fill(text.input_value() + "tensor_parallel_degree: 2\npipeline_parallel_degree: 2\n")
        page.locator("#field-max_steps").focus()
        page.wait_for_timeout(1000)
        page.locator("nav a[href='#/layout']").click()
        page.get_by_label("Ranks (GPUs, or processes on a CPU)").fill("8")
        page.locator(".rank").nth(7).wait_for()
    elif name == "runs":
        page.get_by_role("link", name="output/sft-1e-3").click()
        page.locator("figure svg").nth(2).wait_for()
    elif name == "compare":
        page.get_by_label("compare output/sft-1e-3").check()
        page.get_by_label("compare output/sft-3e-4").check()
        page.locator("h3", has_text="Parameters that differ").wait_for()
    elif name == "chat":
        page.get_by_label("Model").select_option("output/sft-1e-3")
        page.get_by_role("button", name="Load", exact=True).click()
        page.locator("#message").fill("Sort 3, 9, 1, 4 in ascending order.")
        page.keyboard.press("Enter")
        page.locator(".turn.assistant").wait_for()
        page.locator("button[type=submit]:not(:disabled)").wait_for()
    elif name == "parameters":
        page.locator("#search").fill("warmup")
        page.wait_for_timeout(400)


def save(picture: bytes, path: Path) -> None:
    """Write a picture with a palette, which takes a third of the room."""
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.crop((0, 0, image.width, min(image.height, 1800))).quantize(COLOURS).save(path, optimize=True)


if __name__ == "__main__":
    main()
