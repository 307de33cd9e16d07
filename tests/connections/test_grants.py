"""Grants: access to the peer's memory, and revoking during that access."""

import asyncio
import contextlib
from typing import Any

import anyio
import pytest

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    ClosedResourceError,
    Connection,
    Device,
    GrantRevokedError,
    RemoteGrant,
    RemoteRegion,
    ThreadModel,
    WcStatus,
    WorkCompletionError,
    connect,
    listen,
)
from aioverbs._connection.connection import end_of
from aioverbs._connection.wire import FrameKind
from tests.capabilities import Capability, needs
from tests.connections.ends import HOST, SMALL, Cancel, deeper, every_way_to_cancel, pair, use_up, works
from tests.holding import hold, unhold
from tests.manager.held_verbs import StayingAllocator, thread_inside
from tests.pace import fewer, patience
from tests.waiting import until

READ, WRITE, ATOMIC = AccessFlags.REMOTE_READ, AccessFlags.REMOTE_WRITE, AccessFlags.REMOTE_ATOMIC
ALL = READ | WRITE | ATOMIC
LOCAL = AccessFlags.LOCAL_WRITE

# A region that windows can be bound to, and one that is registered once more.
REGIONS = pytest.mark.parametrize("region", [LOCAL | ALL | AccessFlags.MW_BIND, LOCAL], ids=["window", "registration"])
QUICK = deeper(SMALL, keep_alive_s=0.5)


@REGIONS
async def test_read_write_and_atomics(device: Device, region: AccessFlags) -> None:
    async with pair(device) as ends, ends.domain.register(4096, region) as memory, ends.domain.register(64) as local:
        memory.buffer[:5] = b"hello"
        grant = await ends.near.grant(memory[:1024], ALL)
        granted = await ends.far.receive_grant()
        assert (len(granted), granted.access, granted.remote) == (1024, ALL, grant.remote)
        await ends.far.read(local[:5], granted[:5])
        assert bytes(local.buffer[:5]) == b"hello"
        local.buffer[:3] = b"abc"
        await ends.far.write(local[:3], granted[8:11])
        assert bytes(memory.buffer[8:11]) == b"abc"
        memory.buffer[16:24] = (40).to_bytes(8, "little")
        assert await ends.far.fetch_and_add(granted[16:24], 2) == 40
        assert await ends.far.compare_and_swap(granted[16:24], 42, 7) == 42
        assert int.from_bytes(memory.buffer[16:24], "little") == 7
        local.buffer[:1] = b"!"
        writing = asyncio.create_task(ends.far.write_with_immediate(local[:1], granted[30:31], 99))
        assert await ends.near.receive_with_immediate() == (b"", 99)
        assert bytes(memory.buffer[30:31]) == b"!", "who is told has the bytes"
        await writing
        assert (grant.revoked, granted.revoked) == (False, False)
        await grant.revoke()
        assert (grant.revoked, granted.revoked) == (True, True)
        await grant.revoke()


async def test_immediate_data_that_does_not_fit(device: Device) -> None:
    async with pair(device) as ends, ends.domain.register(64, LOCAL | ALL) as memory:
        await ends.near.grant(memory, ALL)
        granted = await ends.far.receive_grant()
        posted = ends.far.qp.statistics().sends.posted
        for wrong, error in ((-1, ValueError), (1 << 32, ValueError), (1.5, TypeError)):
            with pytest.raises(error):
                await ends.far.write_with_immediate(memory[:8], granted[8:16], wrong)  # type: ignore[arg-type]
            with pytest.raises(error):
                await ends.far.send(b"", immediate=wrong)  # type: ignore[arg-type]
        assert ends.far.qp.statistics().sends.posted == posted, "nor was anything written"


async def test_write_with_immediate_checks_before_writing(device: Device) -> None:
    async with pair(device) as ends, ends.domain.register(64, LOCAL | ALL) as memory:
        await ends.near.grant(memory, ALL)
        granted = await ends.far.receive_grant()
        await ends.far.send_eof()
        posted = ends.far.qp.statistics().sends.posted
        with pytest.raises(ClosedResourceError, match="send_eof"):
            await ends.far.write_with_immediate(memory[:8], granted[8:16], 7)
        assert ends.far.qp.statistics().sends.posted == posted


async def test_a_remote_region_sent_in_a_message(device: Device) -> None:
    """A region named in a user's message can be used without `receive_grant`."""
    async with pair(device) as ends, ends.domain.register(64, LOCAL) as memory, ends.domain.register(64) as local:
        async with await ends.near.grant(memory, READ) as grant:
            await ends.near.send(bytes(grant.remote))
            remote = RemoteRegion.from_bytes(await ends.far.receive())
            memory.buffer[:2] = b"ok"
            await ends.far.read(local, remote)
            assert bytes(local.buffer[:2]) == b"ok"
        with pytest.raises(GrantRevokedError):
            await ends.far.read(local, remote)


@REGIONS
@pytest.mark.parametrize("what", ["write to what is to be read", "beyond the end", "after a revocation, all the same"])
async def test_the_device_refuses_access_beyond_the_grant(device: Device, region: AccessFlags, what: str) -> None:
    """This connection breaks, other connections of the domain do not, and the memory is unchanged."""
    async with (
        pair(device, QUICK) as ends,
        pair(device, QUICK) as others,
        ends.domain.register(4096, region) as memory,
        ends.domain.register(128) as local,
    ):
        grant = await ends.near.grant(memory[:64], READ)
        remote = (await ends.far.receive_grant()).remote
        await ends.far.read(local[:64], remote)
        local.buffer[:] = b"x" * 128
        if what.startswith("write"):
            late = ends.far.write(local[:64], remote)
        elif what.startswith("beyond"):
            late = ends.far.read(local[:128], RemoteRegion(remote.address, 128, remote.rkey))
        else:
            await grant.revoke()
            late = ends.far.qp.read(local[:64], remote)
        with pytest.raises(WorkCompletionError) as caught:
            await late
        assert caught.value.status is WcStatus.REM_ACCESS_ERR
        assert bytes(memory.buffer) == bytes(4096)
        with pytest.raises(BrokenResourceError) as broken:
            await ends.far.receive()
        assert "REM_ACCESS_ERR" in str(broken.value)
        with contextlib.suppress(BrokenResourceError):
            await grant.revoke()
        assert grant.revoked
        await others.near.send(b"fine")
        assert await others.far.receive() == b"fine"


async def _reads(connection: Connection, local: Any, granted: RemoteGrant) -> int:
    done = 0
    while True:
        window = []
        try:
            window = [connection.read(local, granted[:1024]) for _ in range(4)]
        except GrantRevokedError:
            return done
        finally:
            for operation in window:  # what was asked for before is done
                await operation
                done += 1


@pytest.mark.every_way
@REGIONS
async def test_revoking_under_load(device: Device, region: AccessFlags) -> None:
    """The late access is refused, and nothing else: neither requests in flight, nor messages, nor other grants."""
    async with (
        pair(device, deeper(SMALL, receive_depth=8)) as ends,
        ends.domain.register(4096, region) as memory,
        ends.domain.register(4096) as local,
    ):
        stays = await ends.near.grant(memory[2048:], READ)
        other = await ends.far.receive_grant()
        stop = False

        async def talk() -> int:
            count = 0
            while not stop:
                await ends.far.send(b"message")
                assert await ends.near.receive() == b"message"
                count += 1
                await asyncio.sleep(0)
            return count

        async def read_other() -> int:
            count = 0
            while not stop:
                await ends.far.read(local[3072:], other[:1024])
                count += 1
                await asyncio.sleep(0)
            return count

        talking, reading = asyncio.create_task(talk()), asyncio.create_task(read_other())
        for _ in range(fewer(10)):
            grant = await ends.near.grant(memory[:1024], READ)
            granted = await ends.far.receive_grant()
            loads = [asyncio.create_task(_reads(ends.far, local[at : at + 1024], granted)) for at in (0, 1024)]
            await asyncio.sleep(0.01)
            await grant.revoke()
            assert all([await load for load in loads])
        stop = True
        assert await talking
        assert await reading
        assert not stays.revoked
        await stays.revoke()
        assert ends.far.qp.statistics().sends.failed == ()


async def test_an_unacknowledged_revocation_invalidates_the_key(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer never answers: the key is invalid after the timeout."""
    async with (
        pair(device, QUICK) as ends,
        ends.domain.register(64, LOCAL | READ | AccessFlags.MW_BIND) as memory,
        ends.domain.register(64) as local,
    ):
        grant = await ends.near.grant(memory, READ)
        granted = await ends.far.receive_grant()
        monkeypatch.setattr(end_of(ends.far).channel.sender, "send_control", lambda *_, **__: None)
        await grant.revoke(timeout_s=0.1)
        assert grant.revoked
        with pytest.raises(WorkCompletionError) as caught:
            await ends.far.qp.read(local, granted.remote)
        assert caught.value.status is WcStatus.REM_ACCESS_ERR


@REGIONS
@every_way_to_cancel
async def test_a_cancelled_revoke_still_invalidates_the_key(
    device: Device, monkeypatch: pytest.MonkeyPatch, region: AccessFlags, cancel: Cancel
) -> None:
    """The number of the grant is free again when the peer has answered."""
    monkeypatch.setattr("aioverbs._connection.grants._NUMBER_COUNT", 4)
    async with pair(device) as ends, ends.domain.register(64, region) as memory:
        answer = end_of(ends.far).channel.sender.send_control
        for _ in range(5):
            grant = await ends.near.grant(memory, READ)
            granted = await ends.far.receive_grant()
            answers: list[tuple[Any, Any]] = []
            monkeypatch.setattr(
                end_of(ends.far).channel.sender, "send_control", lambda *args, to=answers, **kw: to.append((args, kw))
            )
            await cancel(grant.revoke(timeout_s=30), lambda granted=granted: granted.revoked)  # type: ignore[misc]
            assert grant.revoked
            await grant.revoke()
            ((args, kw),) = answers
            monkeypatch.setattr(end_of(ends.far).channel.sender, "send_control", answer)
            answer(*args, **kw)
            await until(lambda: not end_of(ends.near).grants._local_grants)
        await ends.near.send(b"it works")
        assert await ends.far.receive() == b"it works"


@REGIONS
@needs(Capability.PARENT_DOMAINS)
async def test_revoking_during_a_verb_of_another_thread(device: Device, region: AccessFlags) -> None:
    """The key belongs to the protection domain, whose verbs any thread may call."""
    staying = StayingAllocator()
    async with (
        device.resource_domain(thread_model=ThreadModel.UNSAFE, allocator=staying) as domain,
        listen(HOST, domain=domain, settings=SMALL) as listener,
        connect(HOST, listener.port, domain=domain, settings=SMALL) as near,
        await listener.accept() as far,
        domain.register(64, region) as memory,
    ):
        grant = await near.grant(memory, READ)
        granted = await far.receive_grant()
        async with thread_inside(domain, staying):
            await grant.revoke(timeout_s=0)
            assert grant.revoked
        await until(lambda: granted.revoked)
        await works(near, far)
        await near.aclose()


async def test_revoke_without_a_credit_is_sent_later(device: Device) -> None:
    """The peer does not read: it receives the message after the key is invalid."""
    async with pair(device) as ends, ends.domain.register(64, LOCAL) as memory:
        grant = await ends.near.grant(memory, READ)
        granted = await ends.far.receive_grant()
        count = await use_up(ends.near)
        await grant.revoke(timeout_s=0.01)
        assert grant.revoked
        assert not granted.revoked
        for _ in range(count):
            await ends.far.receive()
        await until(lambda: granted.revoked)
        await until(lambda: not end_of(ends.near).grants._local_grants)


async def test_concurrent_revokes_close_the_key_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller with the shortest timeout closes the key. Closing it twice would break the queue pair."""
    async with pair(device) as ends, ends.domain.register(64, LOCAL | READ | AccessFlags.MW_BIND) as memory:
        grant = await ends.near.grant(memory, READ)
        await ends.far.receive_grant()
        with monkeypatch.context() as silent:
            silent.setattr(end_of(ends.far).channel.sender, "send_control", lambda *_, **__: None)
            await asyncio.gather(grant.revoke(timeout_s=0.02), grant.revoke(timeout_s=0.02), grant.revoke(timeout_s=0))
        assert grant.revoked
        await ends.near.send(b"it works")
        assert await ends.far.receive() == b"it works"


@REGIONS
@every_way_to_cancel
@needs(Capability.OBJECT_COUNTS)
async def test_a_cancelled_grant_leaves_no_key(device: Device, region: AccessFlags, cancel: Cancel) -> None:
    async with pair(device) as ends, ends.domain.register(64, region) as memory:
        await use_up(ends.near)
        before, waits = device.statistics().objects, ends.near.traffic().waits

        def waits_for_a_credit() -> bool:
            if ends.near.traffic().waits == waits:
                return False
            hold(device, ends.near.qp)  # to take a key back is a request, which is not done at once
            asyncio.get_running_loop().call_later(0.01, unhold, device, ends.near.qp)
            return True

        await cancel(ends.near.grant(memory, READ), waits_for_a_credit)
        assert device.statistics().objects == before
        await ends.far.receive()
        await ends.far.receive()
        async with await ends.near.grant(memory, READ):
            assert len(await ends.far.receive_grant()) == 64


@every_way_to_cancel
@needs(Capability.OBJECT_COUNTS)
@needs(Capability.FAULT_PLAN)
async def test_a_cancelled_grant_does_not_wait_for_the_device(device: Device, cancel: Cancel) -> None:
    """The bind of a window ends behind requests that the peer's device does not acknowledge. Closing the region waits
    for that.
    """
    async with pair(device) as ends:
        region = await ends.domain.register(64, LOCAL | READ | AccessFlags.MW_BIND).open()
        before = device.statistics().objects
        hold(device, ends.near.qp)
        async with asyncio.timeout(patience(10)):
            await cancel(ends.near.grant(region, READ), lambda: len(region.pins) > 1)
        closing = asyncio.create_task(region.aclose())
        await asyncio.sleep(0.02)
        assert not closing.done()
        unhold(device, ends.near.qp)
        await closing
        assert not ends.near.broken
        async with ends.domain.register(64, LOCAL | READ | AccessFlags.MW_BIND) as region:
            assert device.statistics().objects == before
            async with await ends.near.grant(region, READ):
                assert len(await ends.far.receive_grant()) == 64


async def test_grants_end_with_the_connection(device: Device) -> None:
    async with pair(device) as ends, ends.domain.register(64, LOCAL) as memory:
        grant = await ends.near.grant(memory, READ)
        granted = await ends.far.receive_grant()
        waiting = asyncio.create_task(ends.far.receive_grant())
        await asyncio.sleep(0)
        await ends.near.aclose()
        assert grant.revoked
        assert not granted.revoked
        with pytest.raises((anyio.EndOfStream, BrokenResourceError)):
            await waiting


async def test_a_connection_that_ends_before_its_first_use_of_grants(device: Device) -> None:
    async with pair(device) as ends, ends.domain.register(64, LOCAL) as memory:
        await ends.near.send_eof()
        with pytest.raises(anyio.EndOfStream):
            await ends.far.receive_grant()
        ends.near.abort()
        await ends.far.wait_lost()
        with pytest.raises(BrokenResourceError):
            await ends.far.receive_grant()
        with pytest.raises(BrokenResourceError):
            await ends.far.grant(memory, READ)


async def test_revoke_while_the_peer_goes_away(device: Device) -> None:
    async with pair(device, QUICK) as ends, ends.domain.register(64, LOCAL) as memory:
        grant = await ends.near.grant(memory, READ)
        await ends.far.receive_grant()
        end_of(ends.far).channel.sender.send_control = lambda *_, **__: None  # type: ignore[method-assign]
        revoking = asyncio.create_task(grant.revoke(timeout_s=30))
        await asyncio.sleep(0.01)
        ends.far.abort()
        with pytest.raises(BrokenResourceError):
            await revoking
        assert grant.revoked


@pytest.mark.parametrize("access", [AccessFlags(0), LOCAL, LOCAL | READ, AccessFlags.MW_BIND])
async def test_invalid_grants_are_refused(device: Device, access: AccessFlags) -> None:
    async with pair(device) as ends, ends.domain.register(64, LOCAL) as memory:
        with pytest.raises(ValueError, match="`access` must be"):
            await ends.near.grant(memory, access)
        with pytest.raises(ValueError, match="at least 1 byte"):
            await ends.near.grant(memory[:0], READ)


@pytest.mark.parametrize("access", [WRITE, READ | ATOMIC])
async def test_granting_writes_to_a_window_needs_local_write(device: Device, access: AccessFlags) -> None:
    """The connection stays open."""
    async with pair(device) as ends, ends.domain.register(64, READ | AccessFlags.MW_BIND) as memory:
        with pytest.raises(ValueError, match="was registered without LOCAL_WRITE"):
            await ends.near.grant(memory, access)
        async with await ends.near.grant(memory, READ) as grant:
            assert (await ends.far.receive_grant()).remote == grant.remote
        await works(ends.near, ends.far)


async def test_no_grants_after_send_eof(device: Device) -> None:
    """Earlier grants can still be used and revoked."""
    async with pair(device) as ends, ends.domain.register(64, LOCAL) as memory:
        grant = await ends.near.grant(memory, READ)
        await ends.near.send_eof()
        with pytest.raises(ClosedResourceError, match=r"send_eof\(\) was called"):
            await ends.near.grant(memory, READ)
        granted = await ends.far.receive_grant()
        with pytest.raises(anyio.EndOfStream):
            await ends.far.receive_grant()
        await ends.far.read(memory[:8], granted[8:16])
        await grant.revoke()
        assert granted.revoked


@REGIONS
async def test_a_grant_that_waits_behind_send_eof_leaves_no_key(device: Device, region: AccessFlags) -> None:
    async with pair(device) as ends, ends.domain.register(64, region) as memory:
        await use_up(ends.near)
        before, waits = ends.near.statistics(), ends.near.traffic().waits
        ending = asyncio.create_task(ends.near.send_eof())
        await until(lambda: ends.near.traffic().waits > waits)
        granting = asyncio.create_task(ends.near.grant(memory, READ))
        await until(lambda: ends.near.statistics() != before)
        for _ in range(SMALL.receive_depth - 1):
            await ends.far.receive()
        await ending
        with pytest.raises(ClosedResourceError, match=r"send_eof\(\) was called"):
            await granting
        assert ends.near.statistics() == before


async def test_more_grants_than_the_peer_accepts_break_the_connection(device: Device) -> None:
    async with pair(device, SMALL, deeper(SMALL, max_grants=2)) as ends, ends.domain.register(64, LOCAL) as memory:
        first, _ = [await ends.near.grant(memory, READ) for _ in range(2)]
        await ends.far.receive_grant()
        await first.revoke()
        await ends.near.grant(memory, READ)
        await ends.near.grant(memory, READ)
        with pytest.raises(BrokenResourceError, match="protocol violation"):
            await ends.far.receive()


@pytest.mark.parametrize(
    ("kind", "number", "data"),
    [
        (FrameKind.REVOKE, 5, b""),
        (FrameKind.REVOKED, 5, b""),
        (FrameKind.GRANT, 5, b"short"),
        (FrameKind.GRANT, 5, bytes(24)),
        (FrameKind.REVOKE, 0, b"bytes"),
    ],
)
async def test_invalid_grant_frames_break_the_connection(
    device: Device, kind: FrameKind, number: int, data: bytes
) -> None:
    async with pair(device) as ends:
        await end_of(ends.near).channel.sender.send_frame(kind, number, data)
        with pytest.raises(BrokenResourceError, match="protocol violation"):
            await ends.far.receive()
        await until(lambda: ends.near.broken is not None)
