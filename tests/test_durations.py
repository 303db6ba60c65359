"""How durations are written."""

import pytest

from prefixcache.durations import format_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (3.21, "3.2 s"),
        (60.0, "1 min 0 s"),
        (307.9, "5 min 7 s"),
        (3600.0, "1 h 0 min"),
        (86399.0, "23 h 59 min"),
        (86400.0, "1 d 0 h"),
        (3_564_000.0, "41 d 6 h"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
