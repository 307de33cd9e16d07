"""Handshakes whose verb exceeds the timeout: the caller gets the error in time, resources are closed later."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from aioverbs import Device, ResourceDomain, open_device
from aioverbs._core.handles import handles
from aioverbs._server.server import Server
from aioverbs._verbs import neighbour_lookup
from tests.connections.serving import asked, served
from tests.manager.held_verbs import Helpers
from tests.pace import patience
from tests.waiting import until


@contextlib.asynccontextmanager
async def delayed_handshake(
    device: Device, monkeypatch: pytest.MonkeyPatch, end: str, handshake_timeout_s: float = 20.0
) -> AsyncIterator[tuple[Server, ResourceDomain]]:
    """Provide a server and the domain of a client; the verb blocks at one end.

    :param end: "client" or "server", the end whose verb blocks.
    """
    async with (
        open_device(device.name) as another,
        device.resource_domain() as domain,
        another.resource_domain() as near,
        served(domain, transport="tcp", handshake_timeout_s=handshake_timeout_s) as server,
    ):
        slow = (another if end == "client" else device).handle

        def may_block(context: handles.Context) -> bool:
            return context is slow

        monkeypatch.setattr(neighbour_lookup, "may_block", may_block)
        yield server, near


def parts(domain: ResourceDomain) -> set[str]:
    """Return the kinds of open resources of connections on a domain."""
    return {lifecycle.kind for lifecycle in domain._lifecycle.subtree()} & {"Connection", "QueuePair"}


async def test_connect_times_out_and_names_the_step(
    device: Device, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with delayed_handshake(device, monkeypatch, "client") as (server, near):
        with pytest.raises(TimeoutError, match="s: the device did not resolve the peer's link-layer address"):
            await asked(server, near, transport="tcp", timeout_s=patience(0.5))
        assert len(helpers.waiting) == 1
        assert parts(near) == {"Connection", "QueuePair"}
        helpers.release()
        await until(lambda: not parts(near))


async def test_cancellation_does_not_wait_for_the_verb(
    device: Device, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing the domain right after the cancellation waits for the verb, without a warning."""
    async with delayed_handshake(device, monkeypatch, "client") as (server, near):
        asking = asyncio.create_task(_ask(server, near))
        await until(lambda: helpers.waiting)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        closing = asyncio.create_task(near.aclose())
        await asyncio.sleep(0)
        assert not closing.done()
        helpers.release()
        await closing


async def _ask(server: Server, domain: ResourceDomain) -> None:
    await asked(server, domain, transport="tcp")


async def test_a_timed_out_handshake_frees_its_place_in_the_server(
    device: Device, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with delayed_handshake(device, monkeypatch, "server", handshake_timeout_s=patience(0.2)) as (server, near):
        asking = asyncio.create_task(_ask(server, near))
        await until(lambda: server.statistics().refused)
        assert len(helpers.waiting) == 1
        assert server.statistics().refused == (("TimeoutError", 1),)
        assert server.statistics().handshakes == 0
        await server.drain()
        await asyncio.wait([asking])
        assert asking.exception() is not None
        helpers.release()
