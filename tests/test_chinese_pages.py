"""Chinese pages of docs/ have the headings of their English ones, and links to the same places."""

import re
from collections import Counter

import pytest

from tests.source_tree import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGES = sorted(path.stem.removesuffix("_zh") for path in DOCS.glob("*_zh.md"))


def headings(page: str) -> list[tuple[int, str]]:
    """Lists level and anchor of each heading."""
    text = (DOCS / f"{page}.md").read_text("utf-8")
    lines = re.findall(r"^(#+) (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return [(len(level), slug(words)) for level, words in lines]


def slug(words: str) -> str:
    """Makes the anchor of a heading, as GitHub and the site do."""
    return re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-")


def targets(page: str) -> Counter[tuple[str, int]]:
    """Counts the headings that a page links to: English name of their page, place in it."""
    text = (DOCS / f"{page}.md").read_text("utf-8")
    links = re.findall(r"\]\(([\w/]*)(?:\.md)?#([^)]+)\)", text)
    places = [
        (target or page, [name for _, name in headings(target or page)].index(anchor))
        for target, anchor in links
    ]
    return Counter((target.removesuffix("_zh"), place) for target, place in places)


@pytest.mark.parametrize("page", PAGES)
def test_chinese_page_has_the_headings_of_the_english_one(page: str) -> None:
    assert [level for level, _ in headings(f"{page}_zh")] == [level for level, _ in headings(page)]


@pytest.mark.parametrize("page", PAGES)
def test_chinese_page_has_the_links_of_the_english_one(page: str) -> None:
    assert targets(f"{page}_zh") >= targets(page)


def test_links_between_chinese_pages_reach_a_heading() -> None:
    for path in DOCS.glob("*_zh.md"):
        assert targets(path.stem) is not None  # ValueError: there is no such heading


def test_chinese_pages_link_to_chinese_pages() -> None:
    for path in [REPOSITORY / "README_zh.md", *DOCS.glob("*_zh.md")]:
        links = re.findall(r"\[([^]]+)\]\(([\w/]+)\.md[#)]", path.read_text("utf-8"))
        pages = {page for text, page in links if text != "English" and not page.endswith("_zh")}
        assert not [page for page in pages if (path.parent / f"{page}_zh.md").exists()], path
