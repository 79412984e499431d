"""What tools/docs/build_site.py makes of the pages before mkdocs reads them; `make site` builds the site itself."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.documentation.commands import FENCE, ROOT

_spec = importlib.util.spec_from_file_location("documentation_site", ROOT / "tools/docs/build_site.py")
assert _spec is not None and _spec.loader is not None
site = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(site)


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("docs/data.md", "[a](models.md#hubs)", "[a](models.md#hubs)"),
        ("docs/data.md", "[a](../README.md#try-it)", "[a](index.md#try-it)"),
        ("docs/parameters/lora.md", "[a](../../CONTRIBUTING.md)", "[a](../contributing.md)"),
        ("README.md", "[a](docs/README.md)", "[a](overview.md)"),
        ("README.md", "![a](docs/audio/wer.svg)", "![a](audio/wer.svg)"),
        ("docs/audio.md", "[a](../examples/configs/speech/)", "[a](examples.md)"),
        ("docs/audio.md", "[a](../examples/configs/quickstart/asr.yaml)", "[a](examples/configs/quickstart/asr.yaml)"),
        ("docs/README.md", "[a](tutorials/first-steps.ipynb)", "[a](tutorials/first-steps.md)"),
        ("docs/zh/README.md", "[a](getting-started.md)", "[a](getting-started.md)"),
        ("docs/zh/README.md", "[`a`](../data.md#x)", '<a href="../data.html#x">`a`</a>'),
        ("README.md", "[a](README.zh.md)", '<a href="zh/index.html">a</a>'),
        ("docs/data.md", *["`[a](b.md)` <https://c> [d](https://e) [f](#g)"] * 2),
        ("docs/data.md", "```\n[a](../README.md)\n```", "```\n[a](../README.md)\n```"),
    ],
)  # fmt: skip
def test_links_fit_the_site(source: str, link: str, expected: str) -> None:
    assert site.staged(link, source) == expected


def _pages(entries: list[dict[str, Any]]) -> list[str]:
    found = []
    for entry in entries:
        for page in entry.values():
            found += _pages(page) if isinstance(page, list) else [page]
    return found


def test_the_tables_name_every_page_once() -> None:
    """mkdocs warns of what is missing, too; here it costs nothing."""
    named = _pages(site.navigation("en"))
    assert len(named) == len(set(named))
    written = {site.place(source) for source in site.sources("en") if source.endswith((".md", ".ipynb"))}
    assert set(named) == written | {"examples.md"}


def test_the_parameters_are_a_section_of_their_own() -> None:
    reference = next(entry["Reference"] for entry in site.navigation("en") if "Reference" in entry)
    parameters = next(entry["Parameters"] for entry in reference if "Parameters" in entry)
    assert parameters[0] == {"All": "parameters/index.md"}
    assert {"2.2 LoRA": "parameters/lora.md"} in parameters


def test_the_chinese_navigation_has_the_chinese_pages() -> None:
    named = {f"zh/{page}" for page in _pages(site.navigation("zh"))}
    assert named == {site.place(source) for source in site.sources("zh")}


def test_the_list_of_examples_says_what_each_is() -> None:
    page = site.examples_page()
    title = "Low-rank adapters beside ERNIE-4.5-0.3B, on one device"
    assert f"| [lora.yaml](examples/configs/ernie-4.5-0.3b/lora.yaml) | {title} |" in page
    assert page.count("](examples/configs/") == len(list((ROOT / "examples/configs").glob("*/*.yaml")))


def test_a_broken_link_and_a_file_of_another_host_are_found(tmp_path: Path) -> None:
    (tmp_path / "zh").mkdir()
    (tmp_path / "index.html").write_text(
        '<link rel="stylesheet" href="https://fonts.example/a.css"><script src="a.js"></script>'
        '<a href="zh/b.html#there">x</a><a href="zh/b.html#gone">x</a><a href="gone.html">x</a>'
        '<a href="https://example.org">elsewhere</a><h1 id="here">y</h1><a href="#here">z</a>'
    )
    (tmp_path / "zh/b.html").write_text('<h1 id="there">x</h1><a href="../index.html">x</a>')
    (tmp_path / "a.js").write_text("")
    assert list(site.problems(tmp_path)) == [
        "index.html: gone.html: no such file",
        "index.html: https://fonts.example/a.css would be loaded from another host",
        "index.html: zh/b.html#gone: no such heading",
    ]


def test_a_notebook_becomes_a_page(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {
            "cell_type": "code",
            "source": ["print(1)"],
            "outputs": [
                {"output_type": "stream", "text": ["1\n"]},
                {"output_type": "execute_result", "data": {"text/plain": ["2"]}},
                {"output_type": "display_data", "data": {"image/png": "x"}},
            ],
        },
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    expected = "# Title\ntext\n\n```python\nprint(1)\n```\n\n```text\n1\n2\n```\n"
    assert site.notebook_page(tmp_path / "a.ipynb") == expected


def test_code_in_tables_keeps_its_bars() -> None:
    assert site.staged("| a | `x\\|y` | \\| |", "docs/data.md") == "| a | `x|y` | \\| |"


def test_parts_of_lists_are_indented_by_four() -> None:
    """GitHub is content with less, the site's Markdown is not."""
    for page in site.sources("en") + site.sources("zh"):
        if page.endswith(".md"):
            text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
            assert re.findall(r"\n\n {1,3}\S.*|\n {1,3}(?:[-*]|\d\.) .*", text) == [], page
