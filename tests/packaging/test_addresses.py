"""Notation of socket addresses as text."""

import pytest

from aioverbs.addresses import Address, format_address


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (("10.0.0.1", 7471), "10.0.0.1:7471"),
        (("fd00::1", 7471, 0, 0), "[fd00::1]:7471"),
        (("fe80::1%eth0", 7471, 0, 2), "[fe80::1%eth0]:7471"),
        (None, "nowhere"),
    ],
)
def test_format_address(address: Address | None, text: str) -> None:
    assert format_address(address) == text
