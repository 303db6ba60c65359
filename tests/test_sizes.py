from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1048576", 2**20),
        ("512MiB", 512 * 2**20),
        ("4GiB", 4 * 2**30),
        ("4Gi", 4 * 2**30),
        ("4 gib", 4 * 2**30),
        ("1.5KiB", 1536),
        ("0.3KB", 300),
        ("500MB", 500_000_000),
        ("2TB", 2 * 10**12),
        ("17B", 17),
        (12345, 12345),
    ],
)
def test_a_size_is_read_in_bytes_or_with_a_unit(text: object, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "4G", "GiB", "-1", "1e9", "4GiBs", "1,5GiB", "٤GiB", True, None]
)
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="no size"):
        parse_size(text)


@given(st.integers(0, 2**45))
def test_a_formatted_size_reads_back_as_the_same_number(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == num_bytes


def test_a_formatted_size_uses_the_largest_unit_that_is_exact() -> None:
    assert [format_size(n) for n in (0, 1000, 1024, 3 * 2**29, 2**40)] == [
        "0",
        "1000",
        "1KiB",
        "1536MiB",
        "1TiB",
    ]
