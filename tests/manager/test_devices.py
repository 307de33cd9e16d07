"""Choice of the device to open, and messages if it is not the wanted one."""

import errno
import logging
import os
import socket
import subprocess
import sys
import threading
import types
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

import pytest

from aioverbs import DeviceNotFoundError, Endpoint, LibraryNotFoundError, ResourceState, VerbsError
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from aioverbs._providers import hardware, software_hosts, sysfs
from aioverbs._verbs.device import default_name, devices, open_device
from aioverbs.rdma_cm import Channel
from tests.listening import own_address


@pytest.fixture
def no_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "names", list)
    monkeypatch.delenv("AIOVERBS_DEVICE", raising=False)
    monkeypatch.delenv("AIOVERBS_SOFT_ADDRESS", raising=False)


def test_the_software_device_is_listed(no_hardware: None) -> None:
    (found,) = devices()
    assert (found.name, found.provider, found.problem, found.active) == ("soft0", "software", None, True)
    assert found.native == {"thread domains", "parent domains", "XRC domains"}
    (port,) = found.ports
    assert port.number == 1
    assert dict(port.gids)[1].startswith("::ffff:")


async def test_an_address_makes_a_device(no_hardware: None, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"soft0@{own_address()}:7471"
    async with open_device("soft0") as plain, open_device(name) as named:
        assert (plain.name, named.name, named.software) == ("soft0", name, True)
        assert repr(named).startswith(f"<Device {name} ")
        assert name in str(named.resources())
        assert [each.name for each in devices()] == ["soft0"]
        monkeypatch.setenv("AIOVERBS_SOFT_ADDRESS", name.removeprefix("soft0@"))
        assert [each.name for each in devices()] == [name]
        async with open_device("soft0") as again, named.protection_domain() as pd, pd.share(7) as shared:
            assert again.name == name
            async with again.shared_protection_domain(shared.id, 7):
                pass
            with pytest.raises(VerbsError, match=r"EXDEV .* and soft0 is another one"):
                await plain.shared_protection_domain(shared.id, 7).open()


async def test_a_host_name_is_resolved_in_a_thread(no_hardware: None, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def getaddrinfo(*_: object, **__: object) -> list[tuple[object, ...]]:
        threads.append(threading.current_thread())
        return [(None, None, None, "", (own_address(), 0))]

    monkeypatch.setattr(software_hosts, "_resolved", {})
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with open_device("soft0@storage-1:0") as device:
        assert device.name.startswith(f"soft0@{own_address()}:")
        assert not device.name.endswith(":0")
        assert len(threads) == 1
        assert threads[0] is not threading.current_thread()
        monkeypatch.setenv("AIOVERBS_SOFT_ADDRESS", "storage-1:0")
        async with open_device("soft0") as again:
            assert again.name == device.name


async def test_a_device_is_chosen_once_while_a_host_name_is_resolved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> list[str]:
        raise LibraryNotFoundError("libibverbs.so.1", "no such file")

    monkeypatch.delenv("AIOVERBS_DEVICE", raising=False)
    monkeypatch.setenv("AIOVERBS_SOFT_ADDRESS", "storage-1:0")
    monkeypatch.setattr(hardware, "names", missing)
    monkeypatch.setattr("aioverbs._verbs.device.kernel_devices", lambda: ["mlx5_0"])
    monkeypatch.setattr(software_hosts, "_resolved", {})
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(None, None, None, "", (own_address(), 0))])
    async with open_device() as device:
        assert device.name.startswith(f"soft0@{own_address()}:")
    assert [message for message in caplog.messages if message.startswith("opening")] == [
        f"opening the software device soft0: {LibraryNotFoundError('libibverbs.so.1', 'no such file')}"
    ]


async def test_queue_pairs_connect_by_the_devices_address(no_hardware: None) -> None:
    for port, in_gid in (
        (7470, "1d2e"),
        (7471, "1d2f"),
        (0, None),
    ):  # addresses of the loopback network always have such a GID
        async with (
            open_device(f"soft0@{own_address()}:{port}") as device,
            device.resource_domain() as domain,
            domain.completion_queue(64) as cq,
            domain.queue_pair(cq) as near,
            domain.queue_pair(cq) as far,
        ):
            endpoint = Endpoint.from_bytes(bytes(near.local_endpoint()))
            in_gid = in_gid or f"{int(device.name.rpartition(':')[2]):x}"
            assert endpoint.gid == IPv6Address(f"::{in_gid}:ffff:{own_address()}").packed
            assert near.gid_index == 1
            far.connect(endpoint)
            assert far.path_to(endpoint).dgid == endpoint.gid


async def test_an_invalid_address(no_hardware: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"'soft0@no host' is not the name of a software device: 'no host' in .* write"
    ):
        await open_device("soft0@no host").open()
    monkeypatch.setenv("AIOVERBS_SOFT_ADDRESS", "::1")
    with pytest.raises(ValueError, match=r"AIOVERBS_SOFT_ADDRESS: an IPv6 address must be in brackets"):
        await open_device("soft0").open()
    (found,) = devices()
    assert found.problem is not None
    assert found.problem.startswith("AIOVERBS_SOFT_ADDRESS: ")


def test_a_device_that_cannot_be_opened_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise PermissionError(13, "no", name)

    monkeypatch.setattr(hardware, "names", lambda: ["mlx5_7"])
    monkeypatch.setattr(hardware, "open_context", refuse)
    first, second = devices()
    assert (first.name, first.provider, first.ports, first.active) == ("mlx5_7", "hardware", (), False)
    assert first.problem is not None
    assert "no" in first.problem
    assert second.name == "soft0"


async def test_a_device_that_cannot_be_queried_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def open_context(name: str) -> software.Context:
        context = software.Context.open()
        if name == "mlx5_7":
            context.faults.fail("query_port", errno.EIO)
        return context

    monkeypatch.setattr(hardware, "names", lambda: ["mlx5_7", "mlx5_8"])
    monkeypatch.setattr(hardware, "open_context", open_context)
    monkeypatch.delenv("AIOVERBS_DEVICE", raising=False)
    before = handles.open_handles()
    first, second, _ = devices()
    assert (first.name, first.ports, second.active) == ("mlx5_7", (), True)
    assert first.problem is not None
    assert first.problem.startswith("ibv_query_port failed: EIO")
    assert default_name() == "mlx5_8"
    assert handles.open_handles() == before


def test_choosing_the_default_device_creates_nothing_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("ports are queried without protection domains")

    monkeypatch.setattr(hardware, "names", lambda: ["mlx5_7"])
    monkeypatch.setattr(hardware, "open_context", lambda name: software.Context.open())
    monkeypatch.setattr(handles, "ProtectionDomain", fail)
    monkeypatch.delenv("AIOVERBS_DEVICE", raising=False)
    assert default_name() == "mlx5_7"


async def test_falling_back_without_a_device_is_informational(
    no_hardware: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "aioverbs"):
        async with open_device() as device:
            assert (device.name, device.software) == ("soft0", True)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("aioverbs", logging.INFO)
    assert record.getMessage() == "opening the software device soft0: there is no RDMA device"


async def test_a_missing_library_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: str) -> list[str]:
        raise LibraryNotFoundError("libibverbs.so.1", "no such file")

    monkeypatch.setattr(hardware, "names", missing)
    monkeypatch.setattr(hardware, "open_context", missing)
    monkeypatch.delenv("AIOVERBS_DEVICE", raising=False)
    monkeypatch.setattr("aioverbs._verbs.device.kernel_devices", lambda: ["mlx5_0"])
    async with open_device():
        pass
    assert "install libibverbs1" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    caplog.clear()
    monkeypatch.setattr("aioverbs._verbs.device.kernel_devices", list)
    with caplog.at_level(logging.INFO, "aioverbs"):
        async with open_device():
            pass
    assert caplog.messages == ["opening the software device soft0: there is no RDMA device"]
    with pytest.raises(LibraryNotFoundError, match="install libibverbs1"):
        await open_device("mlx5_0").open()


async def test_asking_for_the_software_device_does_not_warn(
    no_hardware: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_device("soft0"):
        pass
    assert not caplog.records


async def test_the_environment_chooses(
    no_hardware: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AIOVERBS_DEVICE", "soft0")
    async with open_device() as device:
        assert device.name == "soft0"
    assert not caplog.records
    monkeypatch.setenv("AIOVERBS_DEVICE", "mlx5_9")
    async with open_device("soft0") as device:
        assert device.name == "soft0", "an argument has precedence over the environment"


async def test_an_unknown_name_lists_the_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str) -> None:
        raise DeviceNotFoundError(name, ["mlx5_0"])

    monkeypatch.setattr(hardware, "open_context", refuse)
    with pytest.raises(DeviceNotFoundError, match="no device 'mlx5_9'; available: mlx5_0, soft0"):
        await open_device("mlx5_9").open()


@pytest.mark.parametrize("given", [{"execution": "thread"}, {"execution": "thread", "delay_ns": 5}, {"delay_ns": 5}])
async def test_hardware_refuses_execution_and_delay(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    opened: list[str] = []
    monkeypatch.setattr(hardware, "open_context", opened.append)
    device = open_device("mlx5_0", **given)
    with pytest.raises(ValueError, match="are for the software device: leave them out for mlx5_0, or open soft0"):
        await device.open()
    assert (opened, device.state) == ([], ResourceState.NEW)


async def test_a_device_removed_while_listing_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise DeviceNotFoundError(name)

    monkeypatch.setattr(hardware, "names", lambda: ["mlx5_7"])
    monkeypatch.setattr(hardware, "open_context", gone)
    assert [(each.name, each.problem) for each in devices()] == [
        ("mlx5_7", "there is no device 'mlx5_7'; available: soft0"),
        ("soft0", None),
    ]


async def test_attributes_and_statistics() -> None:
    async with open_device("soft0", max_native_thread_domains=1) as device:
        assert device.attributes().phys_port_cnt == 1
        assert device.port().active_mtu == 5
        before = device.statistics()
        async with device.thread_domain(), device.thread_domain():
            after = device.statistics()
        assert (before.native_thread_domains, after.native_thread_domains) == (0, 1)
        assert dict(after.objects)["thread_domains"] == 1
        assert device.statistics() == before
        assert hash(before) == hash(device.statistics())


def test_thread_domain_budget_is_a_count() -> None:
    with pytest.raises(ValueError, match="`max_native_thread_domains` must be 0 or more"):
        open_device(max_native_thread_domains=-1)


@pytest.fixture
def unopened(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Provide a libibverbs with one device that fails to open with the errno `number`."""

    def refuse(name: str) -> None:
        raise VerbsError("ibv_open_device", fake.number)

    fake = types.SimpleNamespace(
        device_names=lambda: ["mlx5_7"], Context=types.SimpleNamespace(open_device=refuse), number=errno.EACCES
    )
    monkeypatch.setattr(hardware, "handles", fake)
    monkeypatch.setattr(sysfs, "kernel_devices", list)
    monkeypatch.delenv("AIOVERBS_DEVICE", raising=False)
    return fake


def test_missing_permission_is_listed_as_the_reason(unopened: types.SimpleNamespace) -> None:
    (found, _) = devices()
    assert found.name == "mlx5_7"
    assert found.problem is not None
    assert "ibv_open_device failed: EACCES" in found.problem


def test_a_list_that_fails(unopened: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    unopened.device_names = lambda: unopened.Context.open_device("any")
    monkeypatch.setattr("aioverbs._verbs.device.kernel_devices", list)
    assert [each.name for each in devices()] == ["soft0"]
    with pytest.raises(VerbsError, match="EACCES"):
        hardware.names()
    monkeypatch.setattr("aioverbs._verbs.device.kernel_devices", lambda: ["mlx5_7"])
    first, _ = devices()
    assert first.name == "mlx5_7"
    assert first.problem is not None
    assert "EACCES" in first.problem


@pytest.mark.parametrize(
    ("nodes", "todo"),
    [
        ({"mlx5_7": Path("/dev/null")}, r"its provider is missing .*: install ibverbs-providers \(Debian, Ubuntu\)"),
        ({"mlx5_7": Path("/dev/no/uverbs7")}, "its device file /dev/no/uverbs7 is missing, which a container must be"),
        ({}, "load the kernel module ib_uverbs"),
    ],
    ids=["no provider", "no device file", "no ib_uverbs"],
)
async def test_a_device_of_the_kernel_that_libibverbs_does_not_list(
    unopened: types.SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    nodes: dict[str, Path],
    todo: str,
) -> None:
    def absent(name: str) -> None:
        raise DeviceNotFoundError(name)

    unopened.device_names = list
    unopened.Context.open_device = absent
    monkeypatch.setattr(sysfs, "kernel_devices", lambda: ["mlx5_7"])
    monkeypatch.setattr(sysfs, "device_nodes", lambda: nodes)
    with pytest.raises(VerbsError, match=f"the kernel has mlx5_7, but libibverbs does not list it: {todo}") as caught:
        await open_device("mlx5_7").open()
    assert caught.value.errno == errno.ENODEV
    assert "; run `aioverbs doctor`" in str(caught.value)
    with pytest.raises(DeviceNotFoundError):
        await open_device("mlx5_8").open()
    first, _ = devices()
    assert (first.name, first.problem, first.ports) == ("mlx5_7", str(caught.value), ())
    async with open_device() as device:
        assert device.software
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"opening the software device soft0: mlx5_7 cannot be used: {caught.value}"


async def test_without_the_kernels_modules_there_is_no_device(
    unopened: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unopened.device_names = lambda: unopened.Context.open_device("any")
    unopened.number = errno.ENOSYS
    monkeypatch.setattr(sysfs, "_VERBS_FOLDER", tmp_path / "infiniband_verbs")
    assert hardware.names() == []
    with pytest.raises(DeviceNotFoundError, match="there is no device 'mlx5_7'; available: soft0"):
        await open_device("mlx5_7").open()


def test_libibverbs_that_does_not_fit_the_kernel(
    unopened: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unopened.device_names = lambda: unopened.Context.open_device("any")
    unopened.number = errno.ENOSYS
    monkeypatch.setattr(sysfs, "_VERBS_FOLDER", tmp_path)
    for number, text in ((errno.ENOENT, "load the kernel module ib_uverbs"), (errno.ENOSYS, "use a newer one")):
        for call in (hardware.listed, lambda: hardware.open_context("mlx5_7")):
            with pytest.raises(VerbsError, match=text) as caught:
                call()
            assert caught.value.errno == number
        (tmp_path / "abi_version").write_text("6\n")


def test_a_process_without_descriptors_is_not_a_machine_without_devices(tmp_path: Path) -> None:
    """libibverbs itself then reports ENOSYS, as it does without the kernel's modules."""
    (tmp_path / "class/infiniband_verbs/uverbs0").mkdir(parents=True)
    (tmp_path / "class/infiniband_verbs/abi_version").write_text("6\n")
    (tmp_path / "class/infiniband").mkdir()
    code = """
import os, resource, sys
from pathlib import Path
from aioverbs import LibraryNotFoundError, VerbsError, devices
from aioverbs._providers import hardware, sysfs
from aioverbs._verbs.device import default_name
sysfs._FOLDER = Path(sys.argv[1], "class/infiniband")
sysfs._VERBS_FOLDER = Path(sys.argv[1], "class/infiniband_verbs")
try:
    assert hardware.listed() == []
except LibraryNotFoundError:
    sys.exit(77)
devices()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
found = []
for call in (hardware.listed, lambda: hardware.open_context("mlx5_0"), devices, default_name):
    try:
        found.append(str(call()))
    except VerbsError as error:
        found.append(str(error))
for each in taken:
    os.close(each)
print("\\n".join(found))
"""
    environment = {name: value for name, value in os.environ.items() if name != "AIOVERBS_DEVICE"}
    environment |= {"SYSFS_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("there is no libibverbs")
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr, len(lines)) == (0, "", 4)
    for line in lines:
        assert line.startswith("ibv_get_device_list failed: EMFILE ")
        assert line.endswith("raise `ulimit -n`")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
async def test_the_error_is_that_of_opening_the_device_file(
    unopened: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """libibverbs leaves the error number of a later attempt, which hides the reason."""
    unopened.number = errno.ENOENT
    node = Path("/dev/infiniband/uverbs7")
    monkeypatch.setattr(sysfs, "device_nodes", lambda: {"mlx5_7": node})
    monkeypatch.setattr(sysfs, "try_open", lambda path: number if path == node else 0)
    with pytest.raises(VerbsError, match=f"ibv_open_device failed: .*{node}") as caught:
        await open_device("mlx5_7").open()
    assert caught.value.errno == number
    async with open_device() as device:
        assert device.software
    (message,) = caplog.messages
    assert message == f"opening the software device soft0: mlx5_7 cannot be used: {caught.value}"


@pytest.mark.parametrize(
    ("number", "text"), [(errno.EMFILE, "raise `ulimit -n`"), (errno.EIO, "the device is gone or broken")]
)
def test_a_device_file_that_fails_for_a_reason_other_than_permissions(
    unopened: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, number: int, text: str
) -> None:
    monkeypatch.setattr(sysfs, "device_nodes", lambda: {"mlx5_7": Path("/dev/infiniband/uverbs7")})
    monkeypatch.setattr(sysfs, "try_open", lambda path: number)
    with pytest.raises(VerbsError, match=text) as caught:
        hardware.open_context("mlx5_7")
    assert caught.value.errno == number
    assert "permissions" not in str(caught.value)


def test_device_files_that_cannot_be_listed(
    unopened: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On every Python it is a VerbsError: `Path.glob` of some raises OSError, that of others finds nothing."""

    def fail(folder: Path) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    (tmp_path / "sys/class/infiniband_verbs").mkdir(parents=True)
    monkeypatch.setattr(os, "listdir", fail)
    monkeypatch.setattr(os, "scandir", fail)
    for call in (lambda: hardware.open_context("mlx5_7"), lambda: sysfs.device_nodes(tmp_path), sysfs.device_numbers):
        with pytest.raises(VerbsError, match=r"ibv_get_device_list failed: EMFILE .*raise `ulimit -n`"):
            call()


@pytest.mark.parametrize("number", [0, errno.ENOENT])
async def test_the_error_of_the_verb_stays_when_the_device_file_opens_or_is_missing(
    unopened: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    unopened.number = errno.ENOENT
    monkeypatch.setattr(sysfs, "device_nodes", lambda: {"mlx5_7": Path("/dev/infiniband/uverbs7")})
    monkeypatch.setattr(sysfs, "try_open", lambda path: number)
    with pytest.raises(VerbsError, match=r"failed: ENOENT .*: its device file is not in /dev/infiniband") as caught:
        await open_device("mlx5_7").open()
    assert caught.value.errno == errno.ENOENT


def test_device_files_by_names_that_are_not_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/infiniband_verbs/uverbs7"
    folder.mkdir(parents=True)
    (folder / "ibdev").write_bytes(b"r\xff\n")
    assert sysfs.device_nodes(tmp_path) == {os.fsdecode(b"r\xff"): tmp_path / "dev/infiniband/uverbs7"}


async def test_the_error_is_that_of_opening_the_connection_manager_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(affinity: object) -> None:
        raise VerbsError("rdma_create_event_channel", errno.ENOENT)

    monkeypatch.setattr("aioverbs._core.handles.rdma_cm.EventChannel", refuse)
    monkeypatch.setattr(sysfs, "try_open", lambda path: errno.EACCES)
    with pytest.raises(VerbsError, match=r"EACCES .*/dev/infiniband/rdma_cm"):
        await Channel().open()


async def test_the_warning_names_the_reason_of_each_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str) -> None:
        raise VerbsError("ibv_open_device", errno.EACCES)

    monkeypatch.delenv("AIOVERBS_DEVICE", raising=False)
    monkeypatch.setattr(hardware, "names", lambda: ["mlx5_0", "mlx5_1"])
    monkeypatch.setattr(hardware, "open_context", refuse)
    async with open_device():
        pass
    (message,) = caplog.messages
    assert message.count("cannot be used: ibv_open_device failed: EACCES") == 2
    assert "mlx5_0 cannot" in message
    assert "; mlx5_1 cannot" in message


async def test_no_host_name_is_resolved_if_an_rdma_device_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOVERBS_DEVICE", raising=False)
    monkeypatch.setenv("AIOVERBS_SOFT_ADDRESS", "no-such-host.invalid:0")
    monkeypatch.setattr("aioverbs._verbs.device.default_name", lambda: "mlx5_7")
    monkeypatch.setattr(hardware, "names", list)
    with pytest.raises((DeviceNotFoundError, LibraryNotFoundError)):
        await open_device().open()
