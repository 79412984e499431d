"""Tables that commands write into a document, between marks: `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs/parallelism.md"


def with_table(name: str, table: str, document: Path = DOCUMENT) -> str:
    """The text of a document with another table between its marks."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = document.read_text(encoding="utf-8")
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{document} does not hold the marks {begin} and {end}")
    return f"{before}{begin}\n{table}\n{end}{after}"
