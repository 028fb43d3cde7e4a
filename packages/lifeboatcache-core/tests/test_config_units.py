from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifeboat_cache.config.units import format_duration, format_size, parse_duration, parse_size

DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("200G", 200_000_000_000),
        ("1Gi", 1_073_741_824),
        ("1.5T", 1_500_000_000_000),
        ("500 MB", 500_000_000),
        ("512MiB", 536_870_912),
        ("64 kb", 64_000),
        ("0", 0),
        (" 7B ", 7),
        (".5k", 500),
        ("3.", 3),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 5.0), ("5s", 5.0), ("250ms", 0.25), ("2m", 120.0), ("1.5 h", 5400.0), ("7d", 604_800.0)],
)
def test_durations_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


def test_a_plain_number_counts_in_the_unit_asked_for() -> None:
    assert parse_size("1.5", plain=10**9) == 1_500_000_000
    assert parse_size("1.5k", plain=10**9) == 1500
    assert parse_duration("2", plain=60) == 120.0


@pytest.mark.parametrize(
    "text",
    ["", "G", "-1", "+1", "1e9", "1,5G", "1_000", "nan", "inf", "1 2", "0x10", "²", "1" * 70],
)
def test_what_is_not_a_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


def test_an_unknown_unit_is_named() -> None:
    with pytest.raises(ValueError, match="no unit 'O'"):
        parse_size("20O")
    with pytest.raises(ValueError, match="no unit 'w'"):
        parse_duration("2w")
    # A bare "i" or "ib" is no unit, nor is a doubled one.
    for text in ("1i", "1iB", "1GG", "1BB"):
        with pytest.raises(ValueError, match="no unit"):
            parse_size(text)


@given(
    st.decimals(min_value=0, max_value=10**6, places=3),
    st.sampled_from(sorted((DECIMAL | BINARY).items())),
    st.sampled_from(["", "B", "b"]),
    st.sampled_from(["", " ", "  "]),
    st.booleans(),
)
def test_a_size_is_its_number_times_its_unit(
    number: Decimal, unit: tuple[str, int], suffix: str, gap: str, upper: bool
) -> None:
    name, factor = unit
    spelled = name.upper() if upper else name
    assert parse_size(f"{number:f}{gap}{spelled}{suffix}") == round(number * factor)


@given(st.integers(min_value=0, max_value=2**50))
def test_a_size_in_gigabytes_keeps_every_byte(size: int) -> None:
    # The configuration keeps sizes in the unit of the key and computes the bytes from it.
    assert round(size / 1e9 * 1e9) == size


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        size = parse_size(text)
    except ValueError:
        return
    assert isinstance(size, int)
    assert size >= 0


@given(st.integers(min_value=0, max_value=10**15))
def test_a_shown_size_reads_back_close_to_itself(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.06)


def test_shown_sizes_and_durations() -> None:
    assert [format_size(n) for n in (0, 999, 1000, 999_960, 1_500_000_000, 2 * 10**15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.0 MB",
        "1.5 GB",
        "2000.0 TB",
    ]
    assert [format_duration(s) for s in (0.25, 5, 90, 7200, 200_000)] == [
        "250 ms",
        "5.0 s",
        "1.5 m",
        "2.0 h",
        "2.3 d",
    ]
