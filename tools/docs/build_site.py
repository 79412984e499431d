"""Build the documentation site: English in output/site, Chinese in output/site/zh. Open index.html, no server needed.

    python tools/docs/build_site.py [--output FOLDER]    needs the extra `docs`; `make site` installs it

Pages are written once, for GitHub. They are copied to a folder of their language, with links that fit the site, and
mkdocs builds that with the look of mkdocs.yml. The navigation of a language is the tables below "## Pages" in its
README.md of docs/: a heading is a section, a link is a page. A link that leads nowhere, a page that no table names, and
anything that a page would load from another host end the build.
"""

from __future__ import annotations

import argparse
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).parents[2]

LANGUAGES = {"en": "English", "zh": "中文"}
# pages that lie elsewhere than below docs/, and where the site has them
MOVED = {
    "README.md": "index.md",
    "docs/README.md": "overview.md",
    "README.zh.md": "zh/index.md",
    "docs/zh/README.md": "zh/overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/configs": "examples.md",  # a folder: a page that lists its files
}
FIRST = {"en": [("Home", "README.md"), ("Commands and pages", "docs/README.md")],
         "zh": [("首页", "README.zh.md"), ("命令与文档", "docs/zh/README.md")]}  # fmt: skip
CODE = r"^ *(?P<fence>`{3,}).*?^ *(?P=fence)\s*$|`[^`\n]*`"
LINK = re.compile(rf"(?P<code>{CODE})|(?P<text>!?\[[^\]\n]*\])\((?P<target>[^)\s]+)\)", re.MULTILINE | re.DOTALL)
ROW, CODE_SPAN = re.compile(r"^\|.*\|$", re.MULTILINE), re.compile(r"`[^`\n]*`")


def place(path: str) -> str:
    """Return where the site has a file of the repository; the Chinese pages lie below zh/."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith("examples/configs/") and not Path(path).suffix:
        return "examples.md"
    return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))


def language_of(place_in_site: str) -> str:
    return "zh" if place_in_site.startswith("zh/") else "en"


def sources(language: str) -> list[str]:
    """Return the pages, pictures and sounds of a language, as paths in the repository."""
    kinds = {".md", ".ipynb", ".svg", ".png", ".flac"}
    found = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*")) if path.suffix in kinds]
    found += [path for path in MOVED if path.endswith(".md") and not path.startswith("docs/")]
    return [path for path in found if language_of(place(path)) == language]


def staged(text: str, source: str) -> str:
    """Return a page with the links of the repository turned into those of the site.

    A page of the other language is HTML of another site, so the link to it is HTML, too. Code in tables needs no
    backslash before its bars, as it does on GitHub.
    """
    here = place(source)

    def replaced(match: re.Match[str]) -> str:
        if match["code"] or re.match(r"[a-z]+:|#", match["target"]):
            return match[0]
        name, mark, anchor = match["target"].partition("#")
        there = place(posixpath.normpath(posixpath.join(posixpath.dirname(source), name)))
        link = posixpath.relpath(there, posixpath.dirname(here) or ".") + mark + anchor
        if language_of(there) == language_of(here):
            return f"{match['text']}({link})"
        return f'<a href="{re.sub(r"[.]md(?=#|$)", ".html", link)}">{match["text"][1:-1]}</a>'

    return LINK.sub(
        replaced, ROW.sub(lambda row: CODE_SPAN.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), text)
    )


def navigation(language: str) -> list[dict[str, Any]]:
    """Return the `nav` of mkdocs for a language: a list of {title: page or list}."""
    index = "docs/README.md" if language == "en" else "docs/zh/README.md"
    _, _, tables = (ROOT / index).read_text(encoding="utf-8").partition(PAGES_HEADING[language])
    entries: list[dict[str, Any]] = [{title: _of_language(path)} for title, path in FIRST[language]]
    for part in re.split(r"^### ", tables, flags=re.MULTILINE)[1:]:
        title, _, rows = part.partition("\n")
        below = list(_linked_pages(rows, index, language))
        if below:
            entries.append({title.strip(): below})
    return entries


PAGES_HEADING = {"en": "## Pages\n", "zh": "## 文档\n"}


def _linked_pages(rows: str, index: str, language: str) -> Iterator[dict[str, Any]]:
    """Yield {title: page} for each link of `rows` to a page of this language; below an index come its pages."""
    for match in LINK.finditer(rows):
        if match["code"] or re.match(r"[a-z]+:|#", match["target"]):
            continue
        path = posixpath.normpath(posixpath.join(posixpath.dirname(index), match["target"].partition("#")[0]))
        title = match["text"][1:-1].strip("`")
        title = title[:1].upper() + title[1:]
        if language_of(place(path)) != language or not place(path).endswith(".md"):
            continue
        if Path(path).name == "index.md":
            table = "".join(re.findall(r"^\| \[\d.*\n", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE))
            yield {title: [{"All": _of_language(path)}, *_linked_pages(table, path, language)]}
        else:
            yield {title: _of_language(path)}


def _of_language(path: str) -> str:
    return place(path).removeprefix("zh/")


def examples_page() -> str:
    """Return a page that lists the configurations of examples/configs with the first sentence of each."""
    lines = ["# Examples", "", "Every file runs as it is: its head says with which command, and on how many GPUs."]
    for folder in sorted((ROOT / "examples/configs").iterdir()):
        lines += ["", f"## {folder.name}", "", "| file | what it is |", "|---|---|"]
        for path in sorted(folder.glob("*.yaml")):
            head = " ".join(
                line.lstrip("# ").strip()
                for line in path.read_text(encoding="utf-8").splitlines()
                if line.startswith("#") and "yaml-language-server" not in line
            )
            lines.append(f"| [{path.name}]({path.relative_to(ROOT)}) | {re.split(r'[.;:] ', head.strip())[0]} |")
    return "\n".join(lines) + "\n"


def notebook_page(path: Path) -> str:
    """Return the cells of a notebook and what they printed."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join(_text(output) for output in cell["outputs"]).rstrip("\n")
        if printed:
            parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts) + "\n"


def _text(output: dict) -> str:
    """Return the text of an output of a cell; pictures and HTML have none."""
    lines = output["text"] if output["output_type"] == "stream" else output.get("data", {}).get("text/plain", [])
    return "".join(lines)


def stage(language: str, folder: Path) -> None:
    """Write the pages of a language, and the files that they link to, into an empty folder."""
    for source in sources(language):
        path = folder / _of_language(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".ipynb"):
            path.write_text(staged(notebook_page(ROOT / source), source), encoding="utf-8")
        elif source.endswith(".md"):
            path.write_text(staged((ROOT / source).read_text(encoding="utf-8"), source), encoding="utf-8")
        else:
            shutil.copyfile(ROOT / source, path)
    (folder / "assets").mkdir()
    for name in ("iframe-worker.js", "site.css"):
        shutil.copyfile(ROOT / "tools/docs" / name, folder / "assets" / name)
    if language == "en":
        (folder / "examples.md").write_text(examples_page(), encoding="utf-8")
        shutil.copytree(ROOT / "examples/configs", folder / "examples/configs")


def build(language: str, output: Path) -> None:
    """Build the site of a language.

    Raises:
        subprocess.CalledProcessError: mkdocs has warned of something.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stage(language, folder / "docs")
        up = "" if language == "en" else "../"
        homes = {"en": f"{up}index.html", "zh": f"{'zh/' if language == 'en' else ''}index.html"}
        configuration = {
            "INHERIT": str(ROOT / "mkdocs.yml"),
            "docs_dir": str(folder / "docs"),
            "site_dir": str(output if language == "en" else output / "zh"),
            "nav": navigation(language),
            "theme": {"language": language},
            "extra": {"alternate": [{"name": LANGUAGES[key], "link": homes[key], "lang": key} for key in LANGUAGES]},
        }
        (folder / "mkdocs.yml").write_text(json.dumps(configuration), encoding="utf-8")  # JSON is YAML
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file"]
        # the notice is about a version of mkdocs that the theme does not let in
        environment = {**os.environ, "NO_MKDOCS_2_WARNING": "true"}
        subprocess.run([*command, str(folder / "mkdocs.yml")], check=True, env=environment)


class _Page(HTMLParser):
    """What an HTML page links to, what it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "alternate", "prev", "next"):
            self.loaded.add(values.get("href", ""))
        elif "src" in values:
            self.loaded.add(values["src"])


def problems(site: Path) -> Iterator[str]:
    """Yield a line for each link of the built site that leads nowhere, and for each file of another host."""
    pages = {path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        where = path.relative_to(site.resolve())
        for target in sorted(page.links | page.loaded):
            if re.match(r"[a-z]+:|//", target):
                if target in page.loaded and not target.startswith("data:"):
                    yield f"{where}: {target} would be loaded from another host"
                continue
            name, _, anchor = unquote(target).partition("#")
            there = (path.parent / name).resolve() if name else path
            if not there.is_file():
                yield f"{where}: {target}: no such file"
            elif there in pages and anchor not in pages[there].anchors and not anchor.startswith("__"):
                yield f"{where}: {target}: no such heading"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "output/site")
    output = parser.parse_args().output
    try:
        for language in LANGUAGES:  # the first one empties the folder
            build(language, output)
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    found = list(problems(output))
    print("\n".join(found) or f"{output}/index.html: {len(list(output.rglob('*.html')))} pages, no broken link")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
