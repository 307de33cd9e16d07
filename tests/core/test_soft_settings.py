"""What the environment says of the software device's peers, and what is said of it where it is wrong."""

import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from aioverbs._core.software import software
from aioverbs._providers.software_names import SoftAddress
from aioverbs._providers.software_settings import SoftSettings

P = "AIOVERBS_SOFT_"


def test_nothing_is_said() -> None:
    assert SoftSettings.read({}, 1000) == SoftSettings(b"/tmp/aioverbs-1000")
    empty = {f"{P}{name}": "" for name in ("ADDRESS", "DIRECTORY", "USERS", "SECRET", "DIRECT", "SPIN")}
    assert SoftSettings.read(empty, 1000) == SoftSettings(b"/tmp/aioverbs-1000")
    assert SoftSettings.read({"XDG_RUNTIME_DIR": "/run/user/7/"}, 7) == SoftSettings(b"/run/user/7/aioverbs")


def test_all_is_said() -> None:
    said = {
        f"{P}ADDRESS": "[fd00::1]:7471",
        f"{P}DIRECTORY": "/run/peers",
        f"{P}USERS": "0, 1000,4294967294",
        f"{P}SECRET": "open sesame",
        f"{P}DIRECT": "0",
        f"{P}SPIN": "1000000",
        "XDG_RUNTIME_DIR": "/run/user/7",
    }
    assert SoftSettings.read(said, 7) == SoftSettings(
        b"/run/peers", SoftAddress.parse("[fd00::1]:7471"), (0, 1000, 4294967294), b"open sesame", False, 1_000_000
    )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("ADDRESS", "localhost", "AIOVERBS_SOFT_ADDRESS: 'localhost' .* is no IP address"),
        ("DIRECTORY", "peers", "AIOVERBS_SOFT_DIRECTORY: a path that begins with / is needed, not 'peers'"),
        ("DIRECTORY", "/" + 74 * "p", "AIOVERBS_SOFT_DIRECTORY: a path has 74 bytes at most, .* not 75"),
        ("DIRECTORY", "/" + 37 * "ö", "AIOVERBS_SOFT_DIRECTORY: a path has 74 bytes at most, .* not 75"),
        ("USERS", "root", "AIOVERBS_SOFT_USERS: 'root' is not the number of a user, from 0 to 4294967294"),
        ("USERS", "1,", "AIOVERBS_SOFT_USERS: '' is not the number of a user"),
        ("USERS", "4294967295", "AIOVERBS_SOFT_USERS: '4294967295' is not the number of a user"),
        ("USERS", 65 * "1," + "1", "AIOVERBS_SOFT_USERS: 64 users at most, not 66"),
        ("USERS", "1", "AIOVERBS_SOFT_USERS: .* name one that all of them can write in AIOVERBS_SOFT_DIRECTORY"),
        ("DIRECT", "no", "AIOVERBS_SOFT_DIRECT: write 1 for yes or 0 for no, not 'no'"),
        ("SPIN", "1000001", "AIOVERBS_SOFT_SPIN: '1000001' is not a number of microseconds, from 0 to 1000000"),
    ],
)
def test_what_is_wrong(name: str, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SoftSettings.read({P + name: text}, 7)


def test_a_runtime_directory_of_no_use() -> None:
    for path, said in (("run", "begins with /"), ("/" + 70 * "r", "74 bytes at most")):
        with pytest.raises(ValueError, match=f"XDG_RUNTIME_DIR: .*{said}.*: or name one by AIOVERBS_SOFT_DIRECTORY"):
            SoftSettings.read({"XDG_RUNTIME_DIR": path}, 7)


def test_what_the_device_has_no_room_for() -> None:
    wrongs: list[dict[str, Any]] = [{"directory": 108 * b"/"}, {"users": (1,) * 65}, {"secret": 257 * b"s"}]
    for wrong in wrongs:
        settings = replace(SoftSettings(b"/tmp/peers"), **wrong)
        with pytest.raises(ValueError, match="longer than the software device takes"):
            software.Context.open(settings=settings)


@given(secret=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=20, max_size=300))
def test_a_secret_is_not_shown(secret: str) -> None:
    said = {f"{P}SECRET": secret}
    if len(os.fsencode(secret)) <= 256:
        settings = SoftSettings.read(said, 7)
        assert settings.secret == os.fsencode(secret)
        assert secret not in repr(settings)
        return
    with pytest.raises(ValueError, match="AIOVERBS_SOFT_SECRET: a secret has 256 bytes at most, not") as caught:
        SoftSettings.read(said, 7)
    assert secret not in f"{caught.value!r} {caught.value.__cause__}"
