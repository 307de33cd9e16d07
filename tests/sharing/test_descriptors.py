"""Descriptors that a peer attaches are looked at without waiting for whoever is behind them."""

import os
from pathlib import Path

from aioverbs._sharing.exchange import _is_device
from tests.sharing.fuse import silent_file


def test_a_file_whose_server_is_silent(tmp_path: Path) -> None:
    with silent_file(tmp_path) as descriptor:
        assert not _is_device(descriptor)


def test_devices_and_others() -> None:
    with open("/dev/null", "rb") as device, open(__file__, "rb") as file:
        assert _is_device(device.fileno())
        assert not _is_device(file.fileno())
        path = os.open("/dev/null", os.O_PATH)
        try:
            assert not _is_device(path), "FUSE may have made it"
        finally:
            os.close(path)
        reading, writing = os.pipe()
        try:
            assert not _is_device(reading)
        finally:
            os.close(reading)
            os.close(writing)
