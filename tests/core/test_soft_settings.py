"""Environment variables for the software device's peers, and the errors for invalid values."""

import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from aioverbs._core.software import software
from aioverbs._providers.software_names import parse_address
from aioverbs._providers.software_settings import SoftSettings

P = "AIOVERBS_SOFT_"


def test_default_settings() -> None:
    assert SoftSettings.read({}, 1000) == SoftSettings(b"/tmp/aioverbs-1000")
    empty = {f"{P}{name}": "" for name in ("ADDRESS", "DIRECTORY", "USERS", "SECRET", "DIRECT", "SPIN")}
    assert SoftSettings.read(empty, 1000) == SoftSettings(b"/tmp/aioverbs-1000")
    assert SoftSettings.read({"XDG_RUNTIME_DIR": "/run/user/7/"}, 7) == SoftSettings(b"/run/user/7/aioverbs")


def test_all_settings() -> None:
    environment = {
        f"{P}ADDRESS": "[fd00::1]:7471",
        f"{P}DIRECTORY": "/run/peers",
        f"{P}USERS": "0, 1000,4294967294",
        f"{P}SECRET": "open sesame",
        f"{P}DIRECT": "0",
        f"{P}RINGS": "0",
        f"{P}SPIN": "1000000",
        "XDG_RUNTIME_DIR": "/run/user/7",
    }
    assert SoftSettings.read(environment, 7) == SoftSettings(
        b"/run/peers",
        parse_address("[fd00::1]:7471"),
        (0, 1000, 4294967294),
        b"open sesame",
        False,
        False,
        1_000_000,
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ADDRESS", "no host", "AIOVERBS_SOFT_ADDRESS: 'no host' .* is neither an IP address nor a host name"),
        ("DIRECTORY", "peers", "AIOVERBS_SOFT_DIRECTORY: a path must begin with /, got 'peers'"),
        ("DIRECTORY", "/" + 74 * "p", "AIOVERBS_SOFT_DIRECTORY: a path must have at most 74 bytes, .* got 75"),
        ("DIRECTORY", "/" + 37 * "ö", "AIOVERBS_SOFT_DIRECTORY: a path must have at most 74 bytes, .* got 75"),
        ("USERS", "root", "AIOVERBS_SOFT_USERS: a user ID must be 0 to 4294967294, got 'root'"),
        ("USERS", "1,", "AIOVERBS_SOFT_USERS: a user ID must be 0 to 4294967294, got ''"),
        ("USERS", "4294967295", "AIOVERBS_SOFT_USERS: a user ID must be 0 to 4294967294, got '4294967295'"),
        ("USERS", 65 * "1," + "1", "AIOVERBS_SOFT_USERS: at most 64 users are allowed, got 66"),
        ("USERS", "1", "AIOVERBS_SOFT_USERS: .* set AIOVERBS_SOFT_DIRECTORY to one that all"),
        ("DIRECT", "no", "AIOVERBS_SOFT_DIRECT: write 1 for yes or 0 for no, got 'no'"),
        ("RINGS", "yes", "AIOVERBS_SOFT_RINGS: write 1 for yes or 0 for no, got 'yes'"),
        ("SPIN", "1000001", "AIOVERBS_SOFT_SPIN: a time in microseconds must be 0 to 1000000, got '1000001'"),
    ],
)
def test_invalid_settings_are_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SoftSettings.read({P + name: text}, 7)


def test_an_invalid_runtime_directory_is_refused() -> None:
    for path, message in (("run", "must begin with /"), ("/" + 70 * "r", "at most 74 bytes")):
        with pytest.raises(ValueError, match=f"XDG_RUNTIME_DIR: .*{message}.*; or set AIOVERBS_SOFT_DIRECTORY"):
            SoftSettings.read({"XDG_RUNTIME_DIR": path}, 7)


def test_settings_too_long_for_the_device() -> None:
    wrongs: list[dict[str, Any]] = [{"directory": 108 * b"/"}, {"users": (1,) * 65}, {"secret": 257 * b"s"}]
    for wrong in wrongs:
        settings = replace(SoftSettings(b"/tmp/peers"), **wrong)
        with pytest.raises(ValueError, match="exceed the limits of the software device"):
            software.Context.open(settings=settings)


@given(secret=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=20, max_size=300))
def test_a_secret_is_not_shown(secret: str) -> None:
    environment = {f"{P}SECRET": secret}
    if len(os.fsencode(secret)) <= 256:
        settings = SoftSettings.read(environment, 7)
        assert settings.secret == os.fsencode(secret)
        assert secret not in repr(settings)
        return
    with pytest.raises(ValueError, match="AIOVERBS_SOFT_SECRET: a secret must have at most 256 bytes, got") as caught:
        SoftSettings.read(environment, 7)
    assert secret not in f"{caught.value!r} {caught.value.__cause__}"
