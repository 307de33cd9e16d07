"""Reports of the software device on its peers and on refused peers."""

import asyncio
import dataclasses
import errno
import itertools
import logging
import os
import queue
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import IPv6Address
from pathlib import Path

import pytest

from aioverbs import ConcurrentAccessError, Device, VerbsError, open_device
from aioverbs._providers import peer_log
from tests.listening import own_address
from tests.pace import patience
from tests.soft_context import soft_context
from tests.waiting import until

PATIENCE_S = patience(20)
_ports = itertools.count(7480)  # counts are kept for each address in the process, so each test uses another port
WRONG = 128 * b"this is no handshake"


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the test a directory of its own for the sockets of devices, which must be empty at the end."""
    path = tmp_path_factory.mktemp("p", numbered=True)
    for name in ("ADDRESS", "USERS", "SECRET", "DIRECT", "SPIN"):
        monkeypatch.delenv(f"AIOVERBS_SOFT_{name}", raising=False)
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(path))
    yield path
    assert not list(path.iterdir()), "devices left files in the directory"


@pytest.fixture
def port() -> int:
    """Return a TCP port that no other test uses."""
    return next(_ports)


@pytest.fixture
async def discoverable(directory: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Device]:
    """Provide a device with an address; refusals are logged by `refusals()` only, not periodically by the loop."""
    monkeypatch.setattr(peer_log, "INTERVAL_S", 3600.0)
    async with open_device(f"soft0@{own_address()}:{port}") as device:
        yield device


def names(directory: Path) -> set[str]:
    return {each.name for each in directory.iterdir()}


def connect(address: str | tuple[str, int]) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    peer.settimeout(PATIENCE_S)
    peer.connect(address)
    return peer


def is_closed(peer: socket.socket) -> bool:
    try:
        return peer.recv(4096) == b""
    except ConnectionResetError:
        return True


async def until_closed(peer: socket.socket) -> None:
    assert await asyncio.to_thread(is_closed, peer)


async def test_a_device_is_found_by_address(discoverable: Device, directory: Path, port: int) -> None:
    fabric = soft_context(discoverable).fabric()
    assert fabric.listening
    assert fabric.address == f"{own_address()}:{port}"
    assert fabric.problem == ""
    assert names(directory) == {discoverable.handle.query_gid(1, index).hex() for index in range(2)}
    assert fabric.path in (f"{directory}/{name}" for name in names(directory))
    assert discoverable.peers() == ()
    assert discoverable.refusals() == ()


async def test_a_peer_with_another_protocol_is_refused(
    discoverable: Device, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    began = datetime.now(UTC) - timedelta(milliseconds=1)
    for address in ((own_address(), port), soft_context(discoverable).fabric().path):
        with connect(address) as peer:
            peer.sendall(WRONG)
            await until_closed(peer)
    first, second = discoverable.refusals()
    assert began <= first.time <= second.time <= datetime.now(UTC)
    assert first.gid is None
    assert first.reason
    fabric = soft_context(discoverable).fabric()
    assert (fabric.accepted, fabric.refused_peers, fabric.refused_frames) == (0, 2, 0)
    assert fabric.refusals == (first, second)
    logged = [(each.name, each.levelno, each.getMessage()) for each in caplog.records]
    assert logged == [
        ("aioverbs.fabric", logging.WARNING, f"{discoverable.name} rejected a peer: {each.reason}")
        for each in (first, second)
    ]
    discoverable.refusals()
    assert len(caplog.records) == 2, "each refusal is logged once"


async def test_number_of_recorded_refusals_is_limited(
    discoverable: Device, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        with connect((own_address(), port)) as peer:
            peer.sendall(WRONG)
            await until_closed(peer)
    assert len(discoverable.refusals()) == 16
    assert caplog.records[0].getMessage() == f"{discoverable.name} rejected 4 more peers before these"
    assert len(caplog.records) == 17


async def test_the_loop_logs_refusals(
    monkeypatch: pytest.MonkeyPatch, directory: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_log, "INTERVAL_S", 0.01)
    async with (
        open_device(f"soft0@{own_address()}:{port}"),
        open_device(f"soft0@{own_address()}:{port}"),
    ):
        with connect((own_address(), port)) as peer:
            peer.sendall(WRONG)
            await until_closed(peer)
        await until(lambda: caplog.records)
        await asyncio.sleep(0.05)
    assert len(caplog.records) == 1, "logged once, however many contexts there are"


async def test_closing_logs_remaining_refusals(directory: Path, port: int, caplog: pytest.LogCaptureFixture) -> None:
    async with open_device(f"soft0@{own_address()}:{port}"):
        with connect((own_address(), port)) as peer:
            peer.sendall(WRONG)
            await until_closed(peer)
    assert len(caplog.records) == 1


async def test_another_loop_takes_over_logging(directory: Path, port: int) -> None:
    device = open_device(f"soft0@{own_address()}:{port}")
    thread = threading.Thread(target=lambda: asyncio.run(open_device_only(device)))
    thread.start()
    await asyncio.to_thread(thread.join)
    try:
        before = peer_log._logging_loops[device.handle]
        assert before.is_closed()
        peer_log.log_periodically(device.handle)
        assert peer_log._logging_loops[device.handle] is asyncio.get_running_loop()
    finally:
        await device.aclose()


async def open_device_only(device: Device) -> None:
    await device.open()


async def test_refusals_from_a_signal_handler(device: Device) -> None:
    """A signal handler can run in a thread that holds the lock already."""
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()

    def ask() -> None:
        with peer_log._lock:
            answers.put(device.refusals())

    threading.Thread(target=ask, daemon=True).start()  # would deadlock if the lock were not reentrant
    assert await asyncio.to_thread(answers.get, timeout=patience(10)) == device.refusals()


async def test_a_silent_peer(discoverable: Device, port: int) -> None:
    with connect((own_address(), port)), connect(soft_context(discoverable).fabric().path):
        await until(lambda: len(discoverable.peers()) == 2)
        over_tcp, over_unix = sorted(discoverable.peers(), key=lambda peer: peer.transport or "")
        assert (over_tcp.transport, over_unix.transport) == ("tcp", "unix")
        assert (over_unix.process_id, over_unix.user_id) == (os.getpid(), os.geteuid())
        assert (over_tcp.process_id, over_tcp.user_id) == (None, None)
        for peer in (over_tcp, over_unix):
            assert not peer.connected_by_us
            assert not peer.connected
            assert not peer.direct
            assert peer.gids == ()
            assert (peer.frames_in, peer.frames_out, peer.connections, peer.waiting_queue_pairs) == (0, 0, 0, 0)
    await until(lambda: not discoverable.peers())


async def test_an_address_in_use(directory: Path, port: int) -> None:
    pattern = rf"ibv_open_device failed: EADDRINUSE .*{port}.*Address already in use"
    with socket.create_server((own_address(), port)), pytest.raises(VerbsError, match=pattern):
        await open_device(f"soft0@{own_address()}:{port}").open()
    async with open_device(f"soft0@{own_address()}:{port}"):
        pass


async def test_a_directory_writable_by_others(directory: Path, port: int) -> None:
    os.chmod(directory, 0o777)
    with pytest.raises(VerbsError, match=r"is writable by other users: chmod 0700 it"):
        await open_device(f"soft0@{own_address()}:{port}").open()
    os.chmod(directory, 0o700)


async def test_connecting_reports_why_the_device_cannot_listen(directory: Path) -> None:
    """A device without an address listens when a queue pair is connected to another device."""
    os.chmod(directory, 0o777)
    why = "is writable by other users"
    async with (
        open_device("soft0") as device,
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as qp,
    ):
        elsewhere = dataclasses.replace(qp.local_endpoint(), gid=IPv6Address("::ffff:192.0.2.1").packed)
        qp.to_init()
        with pytest.raises(VerbsError, match=rf"ibv_modify_qp failed: EACCES.*{why}"):
            qp.to_rtr(elsewhere)
        # These errors have other causes.
        device.faults.fail("modify_qp", errno.EINVAL)
        with pytest.raises(VerbsError, match="ibv_modify_qp failed: EINVAL") as invalid:
            qp.to_rtr(elsewhere)
        assert why not in str(invalid.value)
        device.faults.fail("modify_qp", errno.EBUSY)
        with pytest.raises(ConcurrentAccessError):
            qp.to_rtr(elsewhere)
    os.chmod(directory, 0o700)


async def test_other_devices_have_no_refusals(device: Device) -> None:
    began = datetime.now(UTC)
    assert device.peers() == ()
    assert not [each for each in device.refusals() if each.time >= began]  # earlier refusals of the process stay listed


async def test_a_device_of_one_process_has_no_fabric(directory: Path) -> None:
    async with open_device("soft0") as device:
        assert not soft_context(device).has_fabric
        fabric = soft_context(device).fabric()
        assert (fabric.listening, fabric.path, fabric.address, fabric.problem) == (False, "", "", "")
