"""The troubleshooting page has every line that an engine with LifeboatCache can log."""

import re
from pathlib import Path

import pytest
from messages import engine_messages, matches

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
MESSAGES = engine_messages()


def patterns() -> list[str]:
    return re.findall(r"`([^`\n]+)`", PAGE.read_text())


def test_the_source_has_messages() -> None:
    assert len(MESSAGES) > 80
    for known in ("prefix caching is off", "LifeboatCache is on", "corrupt block", "no such dir"):
        assert any(known in message for message in MESSAGES), known


@pytest.mark.parametrize("message", [m for m in MESSAGES if len(m) > 12], ids=lambda m: m[:60])
def test_message_is_in_the_page(message: str) -> None:
    shown = [pattern for pattern in patterns() if matches(pattern, message)]
    assert shown, f"{MESSAGES[message]}: add a row to {PAGE.name} for: {message}"


def test_no_row_shows_a_message_that_nobody_says() -> None:
    page = PAGE.read_text()
    begin = page.index("### vLLM: LifeboatCache stands down")
    for row in page[begin:].splitlines():
        if row.startswith("| `"):
            for pattern in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
                assert any(matches(pattern, message) for message in MESSAGES), pattern


def test_what_stands_for_anything_is_not_a_match_by_itself() -> None:
    assert not matches("...", "LifeboatCache is on")
    assert not matches("... is on", "LifeboatCache is on")
    assert matches("LifeboatCache ... on", "LifeboatCache is on")
    assert not matches("LifeboatCache ... off", "LifeboatCache is on")
