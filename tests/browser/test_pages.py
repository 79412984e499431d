"""Every page in a real browser: sizes, colours, the keyboard alone, and what one does there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.ui.conftest import CONFIGURATION

Open = Callable[..., Any]
PAGES = ("configure", "data", "layout", "runs", "chat", "parameters")
# Text against what is behind it, by the formula of WCAG 2; 4.5 is asked for.
CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, index) => sum + c * [.2126, .7152, .0722][index], 0);
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const colour = parse(getComputedStyle(element).backgroundColor);
      if (colour[3] !== 0) return colour;
    }
    return parse(getComputedStyle(document.documentElement).backgroundColor);
  };
  const low = [];
  for (const element of document.querySelectorAll("main *, header *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest(":disabled, svg")) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) low.push(element.outerHTML.slice(0, 90));
  }
  return low;
}"""
NAMELESS = """() => [...document.querySelectorAll("input, select, textarea, button")].filter((element) =>
  !(element.labels?.length || element.getAttribute("aria-label") || element.textContent.trim()))
  .map((element) => element.outerHTML)"""


@pytest.mark.parametrize("place", PAGES)
def test_every_page_fits_reads_well_and_names_its_controls(
    open_page: Open, size: tuple[int, int, str], place: str
) -> None:
    page = open_page(size, place)
    expect(page.locator("h1")).to_have_count(1)
    page.wait_for_load_state("networkidle")
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(NAMELESS) == []
    assert page.locator("nav a[aria-current=page]").count() == 1


def test_the_token_leaves_the_address_and_survives_a_reload(open_page: Open) -> None:
    page = open_page()
    assert "token" not in page.url
    page.reload()
    expect(page.locator("#folder")).to_contain_text("work")


def test_without_the_token_the_page_asks_for_it(open_page: Open, address: str) -> None:
    page = open_page()
    page.evaluate("localStorage.clear()")
    page.reload()
    page.get_by_label("Address or token").fill(address)
    page.keyboard.press("Enter")
    expect(page.locator("#yaml")).to_be_visible()


def test_form_and_text_follow_each_other(open_page: Open) -> None:
    page = open_page()
    page.get_by_label("Configuration file").select_option("sft.yaml")
    text, field = page.locator("#yaml"), page.locator("#field-max_steps")
    expect(text).to_have_value(CONFIGURATION)
    expect(field).to_have_value("4")
    field.fill("many")
    expect(text).to_have_value(CONFIGURATION.replace("max_steps: 4", "max_steps: many"))
    expect(page.locator("#field-max_steps-problem")).to_have_text(
        "sft.yaml:9: `max_steps`: expected an integer, got many"
    )
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_role("button", name="Start run")).to_be_disabled()
    text.fill(CONFIGURATION.replace("max_steps: 4", "max_steps: 7"))
    expect(field).to_have_value("7")
    expect(page.locator("#verdict")).to_have_text("Valid: this run can begin.")
    field.fill("")
    expect(text).to_have_value(CONFIGURATION.replace("max_steps: 4\n", ""))


def test_the_search_finds_parameters_by_meaning(open_page: Open) -> None:
    page = open_page()
    page.locator("#search").fill("label smoothing")
    page.locator("#search").fill("warmup")
    expect(page.locator(".field label").first).to_contain_text("warmup")


def test_by_keyboard_alone_a_run_is_configured(open_page: Open) -> None:
    page = open_page()
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    press_until(page, "file")
    press_until(page, "search")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    page.keyboard.type("packing")
    expect(page.locator("form h2[role=status]")).to_be_visible()
    press_until(page, "field-packing")
    page.keyboard.press("t")  # the option `true`
    expect(page.locator("#yaml")).to_have_value("packing: true\n")
    assert page.evaluate(outline) == "solid"


def press_until(page: Any, control: str, most: int = 30) -> None:
    """Press Tab until a control has the focus."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == control:
            return
    pytest.fail(f"{control} is not reached with {most} Tabs")


@pytest.mark.slow
def test_data_are_shown_with_borders_and_trained_text(open_page: Open) -> None:
    page = open_page(place="data")
    page.get_by_label("Configuration file").select_option("sft.yaml")
    page.get_by_role("button", name="Show the data").click()
    page.wait_for_selector(".document mark", timeout=60_000)
    assert page.locator(".document").count() >= 1 and page.locator(".pack span").count() >= 1


def test_layout_is_drawn(open_page: Open) -> None:
    page = open_page(place="layout")
    page.get_by_label("Configuration file").select_option("sft.yaml")
    page.get_by_label("Ranks (GPUs, or processes on a CPU)").fill("4")
    expect(page.locator(".rank")).to_have_count(4)
    assert page.locator(".bar span").count() >= 4
    widths = page.evaluate("[...document.querySelectorAll('.bar span')].map((e) => e.getBoundingClientRect().width)")
    assert sum(widths) == pytest.approx(page.locator(".bar").bounding_box()["width"], rel=0.02)


def test_runs_are_shown_and_compared(open_page: Open) -> None:
    page = open_page(place="runs")
    page.get_by_role("link", name="out/first").click()
    expect(page.locator("figure svg").first).to_be_visible()
    expect(page.locator(".sample")).to_contain_text("2 + 2")
    page.locator("figure svg").first.focus()
    page.keyboard.press("Home")
    expect(page.locator("figure output").first).to_contain_text("step 1:")
    page.get_by_label("compare out/first").check()
    page.get_by_label("compare out/second").check()
    expect(page.locator("h3", has_text="Parameters that differ: 1")).to_be_visible()
    expect(page.locator("figure").first.locator(".legend li")).to_have_count(2)


@pytest.mark.slow
def test_a_run_is_started_watched_and_ended(open_page: Open, work: Path) -> None:
    text = CONFIGURATION.replace("max_steps: 4", "max_steps: 100000\nlogging_steps: 1").replace("out/sft", "out/live")
    (work / "live.yaml").write_text(text)
    page = open_page()
    page.get_by_label("Configuration file").select_option("live.yaml")
    page.get_by_role("button", name="Start run").click()
    expect(page.locator(".card > .talk .badge")).to_have_text("running", timeout=60_000)
    expect(page.locator("figure svg").first).to_be_visible(timeout=30_000)
    before = page.locator("figure svg").first.get_attribute("aria-label")
    page.get_by_label("New learning rate").fill("5e-4")
    page.keyboard.press("Enter")
    expect(page.locator("#told")).to_contain_text("`lr 0.0005` will be read")
    expect(page.locator("figure svg").first).not_to_have_attribute("aria-label", before)
    page.get_by_role("button", name="Quit (saves)").click()
    expect(page.locator(".card > .talk .badge")).to_have_text("ended", timeout=60_000)
    expect(page.get_by_role("button", name="Quit (saves)")).to_be_hidden()
    records = (work / "out/live/training_log.jsonl").read_text()
    assert '"learning_rate": 0.0005' in records


def test_a_model_is_talked_with(open_page: Open) -> None:
    page = open_page(place="chat")
    page.get_by_label("Model").select_option("model")
    page.get_by_role("button", name="Load", exact=True).click()
    page.locator("#message").fill("good morning")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant")).to_contain_text("You said good morning")


def test_a_recording_is_made_sent_and_played(open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    abilities = {"chats": True, "hears": True, "speaks": False}
    monkeypatch.setattr("erniekit.ui.talk.abilities", lambda workspace, folder: abilities)
    page = open_page(place="chat")
    page.get_by_role("button", name="Load", exact=True).click()
    page.get_by_role("button", name="Record").click()
    page.wait_for_timeout(700)
    page.get_by_role("button", name="Stop recording").click()
    sound = page.locator("form audio")
    expect(sound).to_be_visible()
    loaded = """(audio) => new Promise((done) => audio.duration ? done() : (audio.onloadedmetadata = done))
      .then(() => audio.duration)"""
    assert sound.evaluate(loaded) > 0.3
    page.get_by_role("button", name="Send").click()
    answer = page.locator(".turn.assistant > div")
    expect(answer).to_contain_text("1 recording")
    assert int(answer.inner_text().split()[0]) > 20_000  # bytes that were sent
    assert page.locator(".turn.user audio").count() == 1


def test_the_reference_is_searched(open_page: Open) -> None:
    page = open_page(place="parameters")
    page.get_by_label("Search").fill("lora_rank")
    expect(page.locator("article").first).to_contain_text("lora_rank")
