"""Tests of a service that use `aioverbs.testing`; the service is the cache of key_value.py.

    pytest examples/test_key_value.py        (with pytest-asyncio)

Each test runs with both values of `execution` of the software device, and fails if the service leaves resources open.
"""

import asyncio

import pytest
from key_value import DONE, SLOT, cache, find_slot, pack, put, serving

import aioverbs
from aioverbs import AccessFlags, WcStatus

pytestmark = pytest.mark.asyncio


async def test_put_and_get(aioverbs_device: aioverbs.Device) -> None:
    async with (
        aioverbs_device as device,
        device.resource_domain() as domain,
        serving(domain) as port,
        cache(domain, "127.0.0.1", port) as values,
    ):
        await values.put(b"a", b"1")
        await values.put(b"a", b"2")
        assert await values.get(b"a") == b"2"
        assert await values.get(b"b") is None
        with pytest.raises(ValueError, match="at most"):
            await values.put(b"long", bytes(SLOT))


async def test_concurrent_gets_return_whole_values(aioverbs_device: aioverbs.Device) -> None:
    """A get that overlaps with puts returns either the old or the new value."""
    long = [bytes([at]) * 900 for at in range(2)]
    async with (
        aioverbs_device as device,
        device.resource_domain() as domain,
        serving(domain) as port,
        cache(domain, "127.0.0.1", port) as reader,
        cache(domain, "127.0.0.1", port) as writer,
    ):
        await writer.put(b"key", long[0])

        async def write() -> None:
            for at in range(200):
                await writer.put(b"key", long[at % 2])

        writing = asyncio.create_task(write())
        seen = set()
        while not writing.done():
            seen.add(await reader.get(b"key"))
        await writing
        assert seen <= set(long)


async def test_a_wrong_checksum_is_detected(aioverbs_device: aioverbs.Device) -> None:
    async with (
        aioverbs_device as device,
        device.resource_domain() as domain,
        domain.register(1 << 22, AccessFlags.LOCAL_WRITE) as region,
    ):
        assert put(region.buffer, pack(b"key", b"value")) == DONE
        slot = find_slot(region.buffer, b"key")
        assert slot is not None
        slot[10] ^= 1
        with pytest.raises(ValueError, match="being written"):
            put(region.buffer, pack(b"key", b"another"))
        slot.release()


async def test_a_failed_read_breaks_only_its_connection(aioverbs_device: aioverbs.Device) -> None:
    """A failed read raises an error that names the cause, and breaks the connection. A new connection works."""
    async with (
        aioverbs_device as device,
        device.resource_domain() as domain,
        serving(domain) as port,
    ):
        async with cache(domain, "127.0.0.1", port) as values:
            await values.put(b"a", b"1")
            device.faults.fail_request(WcStatus.REM_ACCESS_ERR, values.connection.qp.handle)
            with pytest.raises(aioverbs.WorkCompletionError, match="REM_ACCESS_ERR"):
                await values.get(b"a")
            with pytest.raises(aioverbs.BrokenResourceError):
                await values.put(b"a", b"2")
        async with cache(domain, "127.0.0.1", port) as values:
            assert await values.get(b"a") == b"1"
