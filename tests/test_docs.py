"""The pages in docs/ hang together."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    return re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text())


def test_the_index_names_every_page_once() -> None:
    named = links(DOCS / "README.md")
    assert sorted(named) == sorted(page.name for page in PAGES if page.name != "README.md")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_and_commands_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"(?<![\w/])(?:tests|bench|packages)/[\w./-]+\.py", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"dev\.py bench (\w+)", text):
        assert (ROOT / "bench" / f"{name}.py").exists(), name
