"""The Chinese pages say what the English ones say: commands, figures, names and structure are compared part by part."""

from __future__ import annotations

import posixpath
import re
from collections import Counter

import pytest

from tests.documentation.commands import FENCE, ROOT, blocks, commands

PAIRS = {
    "README.zh.md": "README.md",
    **{
        path.relative_to(ROOT).as_posix(): f"docs/{path.relative_to(ROOT / 'docs/zh').as_posix()}"
        for path in sorted((ROOT / "docs/zh").rglob("*.md"))
    },
}
CHINESE = {english: chinese for chinese, english in PAIRS.items()}
LINK = re.compile(r"\]\(([^)\s]+)\)")
EACH = pytest.mark.parametrize("chinese", PAIRS)


def prose(page: str) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))


def sections(page: str) -> list[str]:
    return re.split(r"^(?=#+ )", prose(page), flags=re.MULTILINE)


def without_comments(text: str) -> list[str]:
    return [line for line in (re.sub(r"(^|\s+)#.*", "", line).rstrip() for line in text.splitlines()) if line]


@EACH
def test_blocks_are_the_same_apart_from_comments(chinese: str) -> None:
    shown, expected = (
        [(block.language, without_comments(block.text)) for block in blocks(page)] for page in (chinese, PAIRS[chinese])
    )
    assert shown == expected


@EACH
def test_the_same_commands_are_marked_as_not_run(chinese: str) -> None:
    shown, expected = (
        [(command.words, command.marked) for command in commands(page)] for page in (chinese, PAIRS[chinese])
    )
    assert shown == expected


@EACH
def test_headings_and_tables_have_the_same_shape(chinese: str) -> None:
    def shape(page: str) -> list[str]:
        rows = re.findall(r"^(?:#+ |\|.*\|$)", prose(page), re.MULTILINE)
        return ["|" * len(re.findall(r"(?<!\\)\|", row)) if row.startswith("|") else row for row in rows]

    assert shape(chinese) == shape(PAIRS[chinese])


@EACH
def test_every_section_has_the_same_figures_and_the_same_code(chinese: str) -> None:
    for shown, expected in zip(sections(chinese), sections(PAIRS[chinese]), strict=True):
        for pattern in (r"`[^`\n]+`", r"\d+(?:[.,]\d+)*"):
            texts = [LINK.sub("]", text) for text in (shown, expected)]
            if "`" not in pattern:
                texts = [re.sub(r"`[^`\n]+`", "", text) for text in texts]
            found, wanted = (Counter(re.findall(pattern, text)) for text in texts)
            assert found == wanted, f"{chinese}: below {shown.splitlines()[:1]}"


@EACH
def test_links_lead_to_the_translation_where_there_is_one(chinese: str) -> None:
    def targets(page: str, other: str) -> Counter[str]:
        found = []
        for link in LINK.findall(prose(page)):
            if re.match(r"[a-z]+:", link):
                found.append(link)
                continue
            name, _, anchor = link.partition("#")
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), name)) if name else page
            if path != other:  # the link to the same page in the other language
                found.append(
                    CHINESE.get(path, path) + (f"#{anchor}" if anchor and path not in (*PAIRS, *CHINESE) else "")
                )
        return Counter(found)

    assert targets(chinese, PAIRS[chinese]) == targets(PAIRS[chinese], chinese)


def test_both_languages_link_to_each_other() -> None:
    for chinese, english in PAIRS.items():
        for page, other in ((chinese, english), (english, chinese)):
            link = posixpath.relpath(other, posixpath.dirname(page) or ".")
            assert f"]({link})" in (ROOT / page).read_text(encoding="utf-8"), f"{page} does not link to {other}"


@EACH
def test_the_text_is_set_as_chinese_is(chinese: str) -> None:
    """Punctuation beside a Chinese character is full-width, code has spaces around it, and a paragraph is one line.

    A line break in a paragraph would be shown as a space.
    """
    text = prose(chinese)
    character, mark = "[\u4e00-\u9fff]", "[,;:?!]"
    for wrong in (f"{character}{mark}", f"{mark}{character}", f"{character}`", f"`{character}"):
        assert re.findall(f".*(?:{wrong}).*", text) == []
    assert re.findall(r"^[^#|\s-].*\n(?=[^#|\s-])", text, re.MULTILINE) == []
