"""Checks of descriptors that a peer attaches do not wait for the process that serves the file."""

import os
from pathlib import Path

import pytest

from aioverbs._providers.sysfs import device_numbers
from aioverbs._sharing import exchange
from aioverbs._sharing.exchange import _is_device
from tests.sharing.fuse import silent_file


def test_a_fuse_file_whose_server_does_not_answer(tmp_path: Path) -> None:
    with silent_file(tmp_path) as descriptor:
        assert not _is_device(descriptor)


def test_device_files_are_told_from_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    number = os.stat("/dev/null").st_rdev
    monkeypatch.setattr(exchange, "device_numbers", lambda: {(os.major(number), os.minor(number))})
    with open("/dev/null", "rb") as device, open("/dev/zero", "rb") as other, open(__file__, "rb") as file:
        assert _is_device(device.fileno())
        assert not _is_device(other.fileno())
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


def test_device_numbers_of_rdma_devices(tmp_path: Path) -> None:
    assert not device_numbers(tmp_path)
    devices = tmp_path / "sys/class/infiniband_verbs"
    for name, number in (("uverbs0", "231:192\n"), ("uverbs33", "510:1\n")):
        (devices / name).mkdir(parents=True)
        (devices / name / "dev").write_text(number)
    (devices / "abi_version").write_text("6\n")
    (devices / "uverbs1/dev").mkdir(parents=True)  # a directory, so reading fails
    assert device_numbers(tmp_path) == {(231, 192), (510, 1)}
