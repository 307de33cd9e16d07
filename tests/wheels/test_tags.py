"""Platform tags, as auditwheel determines them, that the wheels may have."""

import pytest

from tests.wheels.build import is_compatible


@pytest.mark.parametrize(
    ("tag", "compatible"),
    [
        ("manylinux_2_17_x86_64", True),
        ("manylinux_2_28_x86_64", True),
        ("manylinux_2_34_x86_64", False),
        ("manylinux_2_17_aarch64", False),
        ("linux_x86_64", False),  # needs a library that manylinux does not allow
    ],
)
def test_platform_tag(tag: str, compatible: bool) -> None:
    assert is_compatible(tag, "x86_64") == compatible
