"""Check that every relative link of the documentation points at a file, and every anchor at a heading.

usage: python tools/check_links.py [FILE.md ...]      without files: all Markdown files that git tracks
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)|!\[[^\]\n]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
CODE = re.compile(r"^(`{3,}).*?^\1\s*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    found: set[str] = set()
    for heading in HEADING.findall(re.sub(r"^(`{3,}).*?^\1\s*$", "", text, flags=re.MULTILINE | re.DOTALL)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = sum(1 for other in found if other == anchor or re.fullmatch(rf"{re.escape(anchor)}-\d+", other))
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


def broken_links(page: Path) -> Iterator[str]:
    """Yield one line for each relative link of `page` that leads nowhere."""
    text = page.read_text(encoding="utf-8")
    for match in LINK.finditer(CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)):
        target = match[1] or match[2]
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        line = text.count("\n", 0, match.start()) + 1
        if not path.exists():
            yield f"{page}:{line}: {target}: no such file"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text(encoding="utf-8")):
            yield f"{page}:{line}: {target}: {path.name} has no such heading"


def main() -> int:
    tracked = subprocess.run(["git", "ls-files", "*.md"], capture_output=True, text=True, check=True).stdout.split()
    pages = [Path(name) for name in sys.argv[1:] or tracked]
    problems = [problem for page in pages for problem in broken_links(page)]
    print("\n".join(problems) or f"{len(pages)} pages, no broken link")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
