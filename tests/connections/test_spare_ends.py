"""Listeners keep one end of a connection ready for the next peer, whatever the peers do."""

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator

import pytest

from aioverbs import Connection, Device, HandshakeError, QpCapabilities, ThreadModel, VerbsError, connect, listen
from aioverbs._connection.handshake import Handshake, Offer
from aioverbs._verbs.base_domain import Domain
from aioverbs._verbs.completion_queue import dispatcher_of
from tests.capabilities import Capability, needs
from tests.connections.ends import HOST, SMALL, deeper, works
from tests.connections.test_listening import heard, listening, stranger, talks
from tests.manager.held_verbs import StayingAllocator, thread_inside
from tests.waiting import until


def ends_of(domain: Domain) -> list[Connection]:
    """Return the ends of connections on a domain, those that are ready for a peer included."""
    users = [each.user() for each in domain._lifecycle.children.values()]
    return [user for user in users if isinstance(user, Connection)]


@contextlib.asynccontextmanager
async def stalled(port: int, device: Device) -> AsyncIterator[None]:
    """Be a peer that stops after the listener's answer, in which the listener has connected an end to it."""
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as qp,
    ):
        reader, writer = await asyncio.open_connection(HOST, port)
        handshake = Handshake(True, os.urandom(16))
        writer.write(handshake.hello() + handshake.offer(Offer(qp.local_endpoint(), 1024, 4, 1000)))
        await heard(reader)
        await heard(reader)
        try:
            yield
        finally:
            writer.transport.abort()


async def test_a_peer_gets_the_end_that_is_ready_and_another_one_is_made(device: Device) -> None:
    async with device.resource_domain() as there, listening(device) as (listener, domain):
        for _ in range(3):
            (spare,) = ends_of(domain)
            async with (
                connect(HOST, listener.port, domain=there, settings=SMALL) as near,
                await listener.accept() as far,
            ):
                assert far is spare
                await works(near, far)
                await until(lambda: len(ends_of(domain)) == 2)
            await until(lambda: len(ends_of(domain)) == 1)


async def test_stalled_peers_take_no_more_than_their_own_ends(device: Device) -> None:
    """Also while they stall, the next peer finds an end ready. When they are gone, so are their ends."""
    async with device.resource_domain() as there, listening(device) as (listener, domain):
        async with contextlib.AsyncExitStack() as stack:
            for number in range(1, 9):
                await stack.enter_async_context(stalled(listener.port, device))
                await until(lambda number=number: len(ends_of(domain)) == number + 1)  # type: ignore[misc]
            spare = ends_of(domain)[-1]
            async with (
                connect(HOST, listener.port, domain=there, settings=SMALL) as near,
                await listener.accept() as far,
            ):
                assert far is spare
                await works(near, far)
        await until(lambda: len(ends_of(domain)) == 1)


async def test_a_flood_of_stalled_peers_is_bounded_by_the_handshakes(device: Device) -> None:
    async with (
        listening(device, max_handshakes=4) as (listener, domain),
        device.resource_domain() as there,
        there.completion_queue(64) as cq,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(20):
            _, writer = await stack.enter_async_context(stranger(listener))
            qp = await stack.enter_async_context(there.queue_pair(cq, capabilities=QpCapabilities(1, 1)))
            handshake = Handshake(True, os.urandom(16))
            writer.write(handshake.hello() + handshake.offer(Offer(qp.local_endpoint(), 1024, 4, 1000)))
        await until(lambda: len(ends_of(domain)) == 5)
        for _ in range(200):
            await asyncio.sleep(0)
            assert len(ends_of(domain)) <= 5


async def test_a_peer_without_the_secret_takes_no_end(device: Device) -> None:
    async with listening(device, secret=b"secret") as (listener, domain):
        (spare,) = ends_of(domain)
        async with stranger(listener) as (reader, writer):
            writer.write(Handshake(True, os.urandom(16), b"another").hello())
            await heard(reader)
            assert ends_of(domain) == [spare]
        with pytest.raises(HandshakeError):
            await connect(HOST, listener.port, domain=domain, secret=b"another", settings=SMALL)
        await until(lambda: ends_of(domain) == [spare])
        await talks(listener, domain, secret=b"secret")


async def test_listeners_with_the_same_settings_share_an_end(device: Device) -> None:
    """The last of them closes it; one with other settings has its own."""
    async with device.resource_domain() as domain:
        first = await listen(HOST, domain=domain, settings=SMALL).open()
        second = await listen(HOST, domain=domain, settings=SMALL).open()
        assert len(ends_of(domain)) == 1
        third = await listen(HOST, domain=domain, settings=deeper(SMALL, receive_depth=5)).open()
        assert len(ends_of(domain)) == 2
        await first.aclose()
        await third.aclose()
        assert len(ends_of(domain)) == 1
        await talks(second, domain)
        await second.aclose()
        await until(lambda: not ends_of(domain))


async def test_closing_a_listener_at_once_closes_its_end(device: Device) -> None:
    async with device.resource_domain() as domain:
        listener = await listen(HOST, domain=domain, settings=SMALL).open()
        listener.close()
        await until(lambda: not ends_of(domain))
        await listener.aclose()


@needs(Capability.PARENT_DOMAINS)
async def test_closing_a_listener_while_another_thread_is_in_a_verb(device: Device) -> None:
    """Closing waits for that thread."""
    staying = StayingAllocator()
    async with device.resource_domain(thread_model=ThreadModel.UNSAFE, allocator=staying) as domain:
        listener = await listen(HOST, domain=domain, settings=SMALL).open()
        async with thread_inside(domain, staying):
            closing = asyncio.create_task(listener.aclose())
            await asyncio.sleep(0.02)
            assert not closing.done()
        await closing
        assert not ends_of(domain)


async def test_an_end_whose_completion_queue_failed_is_not_used(device: Device) -> None:
    async with device.resource_domain() as there, listening(device) as (listener, domain):
        (spare,) = ends_of(domain)
        dispatcher_of(spare._cq).broke(VerbsError("ibv_poll_cq", errno.EIO))
        async with (
            connect(HOST, listener.port, domain=there, settings=SMALL) as near,
            await listener.accept() as far,
        ):
            assert far is not spare
            await works(near, far)
        await until(lambda: spare.closed)


@needs(Capability.FAULT_PLAN)
async def test_peers_connect_although_no_end_could_be_made_ready(device: Device) -> None:
    async with device.resource_domain() as there, device.resource_domain() as domain:
        device.faults.fail("create_qp", errno.ENOMEM)
        async with listen(HOST, domain=domain, settings=SMALL) as listener:
            assert not ends_of(domain)
            async with (
                connect(HOST, listener.port, domain=there, settings=SMALL) as near,
                await listener.accept() as far,
            ):
                await works(near, far)
        await until(lambda: not ends_of(domain))
