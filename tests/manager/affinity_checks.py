"""Checks that each owned object still works after all wrong callers were refused."""

import anyio

from aioverbs import AccessFlags, Connection, EventType, Operation, QpState, ResourceState, connect
from tests.connections.ends import HOST
from tests.holding import unhold
from tests.manager.affinity_objects import LARGE, SETTINGS, OwnedObjects
from tests.manager.connection_manager import request

__all__ = ["check_all_work"]


async def check_all_work(owned: OwnedObjects) -> None:
    """Check that all waiting tasks of the owner get their results, and that every object works."""
    for name, task in owned.waiting.items():
        assert not task.done(), f"{name}: {task}"
    await _check_filled_queue(owned)
    if owned.connection_domain is owned.domain:
        await _check_operations(owned)
        await _check_events(owned)
        await _check_identifiers(owned)
        assert await owned.subjects["process pool"].run(abs, -7) == 7
    await _check_connections(owned)
    await _check_listeners(owned)


async def _check_filled_queue(owned: OwnedObjects) -> None:
    owned.region.buffer[72:80] = b"arrives."
    for _ in range(4):
        await owned.sender.send(owned.region[72:80])
        with await anext(owned.srq_messages) as message:
            assert bytes(message.data) == b"arrives."


async def _check_operations(owned: OwnedObjects) -> None:
    subjects, region = owned.subjects, owned.region
    assert subjects["held qp"].query().qp_state is owned.qp.query().qp_state is QpState.RTS
    unhold(owned.device)
    await owned.result("operation")
    fresh: Operation[None] = subjects["operation not awaited"]
    await fresh
    await subjects["operation of a batch"]
    region.buffer[:8] = b"written."
    await subjects["batch"].post()
    assert bytes(region.buffer[48:56]) == b"written."
    assert not len(region.pins)
    assert bytes(subjects["message"].data) == bytes((await anext(subjects["inbox"])).data) == b"messages"
    subjects["message"].release()
    await subjects["empty reader"].send(region[:8])
    assert bytes((await owned.result("message")).data) == b"written."
    assert subjects["filled srq"].query().max_wr >= 4
    owned.cq.resize(600)


async def _check_events(owned: OwnedObjects) -> None:
    owned.drained.to_sqd(en_sqd_async_notify=True)
    for event in (await anext(owned.subjects["events"]), await owned.result("an event")):
        assert event.event_type is EventType.SQ_DRAINED
        assert event.resource is owned.drained


async def _check_identifiers(owned: OwnedObjects) -> None:
    subjects = owned.subjects
    async with subjects["identifier of a listener"] as identifier:
        await identifier.reject()
    await subjects["opened identifier of a listener"].aclose()
    await (await anext(subjects["rdma_cm listener with a request"])).aclose()
    request(subjects["rdma_cm listener"])
    await (await owned.result("a peer")).aclose()
    await subjects["identifier in state connected"].disconnect()
    await owned.result("a disconnection")
    assert subjects["qp connected by rdma_cm"].qp_state is QpState.ERR
    for name in ("new identifier", "new rdma_cm listener"):
        async with subjects[name]:
            pass


async def _check_connections(owned: OwnedObjects) -> None:
    subjects, region = owned.subjects, owned.region
    region.buffer[:8] = b"written."
    near, far, stream = subjects["near"], subjects["far"], subjects["byte stream"]
    assert await stream.receive() == b"cdef"
    assert await far.receive() == b"unread"
    assert await far.receive() == LARGE
    await owned.result("sending")
    await far.send(b"to near")
    assert await owned.result("receiving") == b"to near"
    second = await far.receive_grant()
    local = region[128:136]
    for granted in (subjects["granted"], second):
        await far.read(local, granted[:8])
        assert bytes(local.buffer) == b"written."
    back = await far.grant(region, AccessFlags.REMOTE_READ)
    assert (await owned.result("a grant")).remote == back.remote
    for grant in (subjects["grant"], subjects["second grant"], back):
        await grant.revoke()
    await _exchange(subjects["connection"], subjects["its peer"])
    await _exchange(near, far)
    await subjects["connection"].send_eof()
    try:
        await subjects["its peer"].receive()
        raise AssertionError("no end of stream")
    except anyio.EndOfStream:
        pass


async def _exchange(one: Connection, other: Connection) -> None:
    await one.send(b"here")
    assert await other.receive() == b"here"
    await other.send(b"there")
    assert await one.receive() == b"there"


async def _check_listeners(owned: OwnedObjects) -> None:
    subjects = owned.subjects
    async with await subjects["listener with a connection"].accept() as far:
        await _exchange(subjects["connection not accepted yet"], far)
    new = connect(HOST, subjects["listener"].port, domain=owned.connection_domain, settings=SETTINGS)
    async with subjects.get("connecting", new) as near, await owned.result("accepting") as far:
        await _exchange(near, far)
    await subjects["served"].send(b"still served")
    assert await subjects["served"].receive() == b"still served"
    await subjects["served"].aclose()
    again, first = subjects["reconnecting with a connection"], subjects["reconnected connection"]
    await first.send(b"once")
    assert await first.receive() == b"once"
    second = await anext(again)
    assert first.state is ResourceState.CLOSED
    await second.send(b"again")
    assert await second.receive() == b"again"
    await again.aclose()
    assert second.state is ResourceState.CLOSED
    await subjects["server"].drain()
    await owned.result("serving")
