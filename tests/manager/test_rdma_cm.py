"""rdma_cm without a kernel module: errors, and checks before the library is called."""

import asyncio
import errno
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, assert_type

import pytest

from aioverbs import AffinityError, ClosedResourceError, LibraryNotFoundError, VerbsError
from aioverbs._core.handles import rdma_cm as core
from aioverbs._lifecycle.affinity import Affinity
from aioverbs.rdma_cm import Channel, Identifier, Listener
from aioverbs.rdma_cm.cm_id import look_up
from tests.manager.connection_manager import connection_manager, request

DEVICE = Path("/dev/infiniband/rdma_cm")


def is_installed() -> bool:
    try:
        core.load_librdmacm()
    except LibraryNotFoundError:
        return False
    return True


def test_missing_library() -> None:
    with pytest.raises(LibraryNotFoundError, match=r"cannot be loaded.*No such file") as caught:
        core.load_librdmacm("librdmacm.so.99")
    assert caught.value.library == "librdmacm.so.99"


def test_incompatible_library() -> None:
    with pytest.raises(LibraryNotFoundError, match=r"libc.so.6 is too old: .*rdma_create_event_channel"):
        core.load_librdmacm("libc.so.6")


def test_the_library_is_loaded_with_the_first_channel() -> None:
    code = """
import aioverbs.rdma_cm
aioverbs.rdma_cm.Channel()
print("librdmacm" in open("/proc/self/maps").read())
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == "False"


@pytest.mark.skipif(DEVICE.exists(), reason="there is a connection manager: tests/rdma")
async def test_missing_kernel_module() -> None:
    channel = Channel()
    if not is_installed():
        with pytest.raises(LibraryNotFoundError, match="librdmacm1"):
            await channel.open()
        return
    with pytest.raises(VerbsError, match=r"rdma_create_event_channel failed: .*modprobe rdma_ucm") as caught:
        await channel.open()
    assert caught.value.errno in (errno.ENODEV, errno.ENOENT)
    assert "run `modprobe rdma_ucm`" in str(caught.value)
    assert ("libibverbs lists no RDMA device" in str(caught.value)) == (caught.value.errno == errno.ENODEV)
    with pytest.raises(ClosedResourceError):
        await channel.identifier().open()
    with pytest.raises(ClosedResourceError):
        await channel.listener("10.77.0.1", 1).open()


def test_a_channel_belongs_to_one_loop() -> None:
    opening = Channel().open()
    with pytest.raises(RuntimeError, match=r"asyncio event loop"):
        opening.send(None)


async def test_address_lookup() -> None:
    assert await look_up("10.77.0.1", 7174) == ("10.77.0.1", 7174)
    assert (await look_up("::1", 0))[:2] == ("::1", 0)
    assert (await look_up("localhost", 1))[1] == 1


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
async def test_impossible_host_names_are_refused_with_the_name(host: str) -> None:
    with pytest.raises(
        ValueError, match=rf"'{host}' cannot be a host name: a part of it is empty or too long"
    ) as caught:
        await look_up(host, 7174)
    assert not isinstance(caught.value, UnicodeError)


@pytest.mark.parametrize("address", [("::1", 1, 2), ("10.77.0.1",), ("::1", 1, 2, 3, 4), ()])
def test_addresses_of_other_lengths_are_refused(address: tuple[str | int, ...]) -> None:
    """The address is checked first, so no identifier of a connection manager is needed."""
    identifier: Any = core.Identifier.__new__(core.Identifier)
    with pytest.raises(ValueError, match=r"an address is \(host, port\), or .* got \("):
        identifier.bind_addr(address)
    with pytest.raises(ValueError, match=r"an address is \(host, port\), or .* got \("):
        identifier.resolve_addr(address, 1000)


def test_static_types() -> None:
    channel = Channel()
    assert_type(channel.identifier(), Identifier)
    assert_type(channel.listener("10.77.0.1", 7174), Listener)
    assert_type(channel.identifier().connected, bool)


def test_invalid_backlog() -> None:
    with pytest.raises(ValueError, match="`backlog` must be 1 or more, got 0"):
        Channel().listener(backlog=0)


@pytest.mark.parametrize("port", [-1, 65536])
async def test_ports_out_of_range_are_refused(port: int) -> None:
    """Nothing is changed: the identifier can still be resolved."""
    with connection_manager():
        async with Channel() as channel, channel.identifier() as identifier:
            for host in (None, "10.77.0.1"):
                with pytest.raises(ValueError, match=f"`port` must be from 0 to 65535, got {port}"):
                    channel.listener(host, port)
            for _ in range(2):
                with pytest.raises(ValueError, match=f"`port` must be from 0 to 65535, got {port}"):
                    await identifier.resolve("10.77.0.1", port)


async def test_iterating_a_listener_refuses_other_loops() -> None:
    """Only while the listener is open. After closing, iteration ends on any loop."""
    listener: Any = Channel().listener(None, 0)

    async def next_one() -> str:
        if listener._requests.closed:
            raise StopAsyncIteration
        return "a peer"

    async def use() -> None:
        with pytest.raises(AffinityError, match="__anext__ on <Listener"):
            await anext(listener)

    async def end() -> None:
        with pytest.raises(StopAsyncIteration):
            await anext(listener)

    listener._requests = SimpleNamespace(closed=False, next_identifier=next_one)  # stands in for librdmacm
    listener._lifecycle.owner = Affinity.of_running_loop()
    await asyncio.to_thread(asyncio.run, use())
    assert await anext(listener) == "a peer"
    listener._requests.closed = True
    await asyncio.to_thread(asyncio.run, end())


async def test_opening_a_pending_identifier_refuses_other_loops() -> None:
    async def use(identifier: Identifier) -> None:
        with pytest.raises(AffinityError, match="open on <Identifier"):
            await identifier.open()

    with connection_manager():
        async with Channel() as channel, channel.listener() as listener:
            request(listener)
            identifier = await anext(listener)
            await asyncio.to_thread(asyncio.run, use(identifier))
            async with identifier:
                await identifier.reject()
            assert identifier.closed
