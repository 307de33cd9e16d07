"""Asynchronous events: taken without waiting, about a handle, acknowledged once."""

import asyncio
import errno
import gc
import select
import threading
import time
from collections.abc import Callable

import pytest

from aioverbs import (
    BusyResourceError,
    ClosedResourceError,
    EventType,
    ForkedProcessError,
    PortState,
    QpState,
    SendFlags,
    SendOpcode,
    VerbsError,
)
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from tests.core.children import in_child
from tests.core.contexts import opened
from tests.core.pairs import (
    CAPABILITIES,
    PATIENCE_S,
    connect,
    connect_to,
    make_domain,
    make_end,
    make_pair,
    next_event,
    succeed,
    to_init,
    to_rtr,
    to_rts,
    wait_for,
)
from tests.raw_verbs import poll, post_recv, post_send
from tests.waiting import wait_until

WRITE, SEND, SIGNALED = SendOpcode.RDMA_WRITE, SendOpcode.SEND, SendFlags.SIGNALED


def readable(context: software.Context, timeout_s: float = 0) -> bool:
    return bool(select.select([context.async_fd], [], [], timeout_s)[0])


def overrun(context: software.Context) -> tuple[handles.CompletionQueue, handles.QueuePair]:
    """A completion queue that overran, and whose completion found no room."""
    pd = handles.ProtectionDomain(context)
    cq = handles.CompletionQueue(context, 1)
    near, far = (handles.QueuePair(pd, cq, cq, CAPABILITIES) for _ in range(2))
    connect(near, far)
    for _ in range(3):
        post_send(near, WRITE, flags=SIGNALED)
    assert readable(context, PATIENCE_S)
    return cq, near


def raise_cq_err(context: software.Context) -> handles.CompletionQueue:
    return overrun(context)[0]


def raise_qp_fatal(context: software.Context) -> handles.QueuePair:
    near, _ = make_pair(context)
    context.faults.break_queue_pair(near.qp)
    return near.qp


def raise_last_wqe(context: software.Context) -> handles.QueuePair:
    domain = make_domain(context, "plain")
    far = make_end(domain, srq=handles.SharedReceiveQueue(domain, 4))
    to_init(far.qp)
    far.qp.modify(QpState.ERR)
    return far.qp


def raise_srq_err(context: software.Context) -> handles.SharedReceiveQueue:
    srq = handles.SharedReceiveQueue(handles.ProtectionDomain(context), 4)
    context.faults.break_shared_receive_queue(srq)
    return srq


def raise_sq_drained(context: software.Context) -> handles.QueuePair:
    near, _ = make_pair(context)
    near.qp.modify(QpState.SQD, en_sqd_async_notify=True)
    assert readable(context, PATIENCE_S)
    return near.qp


def raise_comm_est(context: software.Context) -> handles.QueuePair:
    """The first message came before the queue pair was told to send."""
    domain = make_domain(context, "plain")
    near, far = make_end(domain), make_end(domain)
    connect_to(near.qp, far.qp)
    to_init(far.qp)
    to_rtr(far.qp, near.qp.qp_num)
    post_send(near.qp, WRITE)
    assert readable(context, PATIENCE_S)
    return far.qp


def raise_access_err(context: software.Context) -> handles.QueuePair:
    near, far = make_pair(context)
    post_send(near.qp, WRITE, [near.sge(0, 8)], remote_addr=far.region.address, rkey=far.region.rkey ^ 0xFF00)
    wait_for(near.cq)
    return far.qp


def raise_req_err(context: software.Context) -> handles.QueuePair:
    """More reads than the responder was told to expect."""
    domain = make_domain(context, "plain")
    near, far = make_end(domain), make_end(domain)
    connect_to(near.qp, far.qp)
    to_init(far.qp)
    to_rtr(far.qp, near.qp.qp_num, max_dest_rd_atomic=0)
    to_rts(far.qp)
    post_send(near.qp, SendOpcode.RDMA_READ, [near.sge(0, 8)], remote_addr=far.region.address, rkey=far.region.rkey)
    wait_for(near.cq)
    return far.qp


def raise_srq_limit(context: software.Context) -> handles.SharedReceiveQueue:
    domain = make_domain(context, "plain")
    srq = handles.SharedReceiveQueue(domain, 4)
    near, far = make_end(domain), make_end(domain, srq=srq)
    connect(near.qp, far.qp)
    post_recv(srq, [far.sge(0, 8)])
    srq.modify(limit=1)
    post_send(near.qp, SEND, [near.sge(0, 1)])
    succeed(far.cq)
    return srq


RAISED: dict[EventType, Callable[[software.Context], handles.Handle]] = {
    EventType.QP_FATAL: raise_qp_fatal,
    EventType.QP_LAST_WQE_REACHED: raise_last_wqe,
    EventType.SRQ_ERR: raise_srq_err,
    EventType.CQ_ERR: raise_cq_err,
    EventType.SQ_DRAINED: raise_sq_drained,
    EventType.COMM_EST: raise_comm_est,
    EventType.QP_ACCESS_ERR: raise_access_err,
    EventType.QP_REQ_ERR: raise_req_err,
    EventType.SRQ_LIMIT_REACHED: raise_srq_limit,
}


def drain(context: software.Context) -> None:
    while event := context.get_async_event():
        event.ack()


@pytest.mark.parametrize("event_type", RAISED, ids=lambda event_type: event_type.name)
def test_an_event_and_its_element(context: software.Context, event_type: EventType) -> None:
    element = RAISED[event_type](context)
    event = next_event(context)
    assert event.event_type is event_type
    assert event.element is element
    assert event.port_num is None
    assert repr(event) == f"<AsyncEvent {event_type.name} of {element!r}>"
    acknowledged = [event.acknowledged]
    event.ack()
    assert [*acknowledged, event.acknowledged] == [False, True]
    drain(context)


@pytest.mark.parametrize("event_type", RAISED, ids=lambda event_type: event_type.name)
def test_an_event_that_was_taken_keeps_its_element(context: software.Context, event_type: EventType) -> None:
    """The verb would wait for the acknowledgement, for ever where nobody gives it: it is refused before."""
    element = RAISED[event_type](context)
    event = next_event(context)
    if isinstance(element, handles.CompletionQueue | handles.SharedReceiveQueue):
        for handle in handles.open_handles():
            if isinstance(handle, handles.QueuePair):
                handle.destroy()
    for _ in range(2):
        with pytest.raises(BusyResourceError, match="1 of its asynchronous events were not acknowledged"):
            element.destroy()
        assert not element.closed
    event.ack()
    drain(context)
    element.destroy()
    assert event.element is element


def test_a_queue_pair_whose_completion_found_no_room(context: software.Context) -> None:
    cq, qp = overrun(context)
    for event_type, element in ((EventType.CQ_ERR, cq), (EventType.QP_FATAL, qp)):
        event = next_event(context)
        assert (event.event_type, event.element) == (event_type, element)
        event.ack()
    assert qp.query().qp_state is QpState.ERR
    assert context.get_async_event() is None


def test_the_port_goes_down_and_up(context: software.Context) -> None:
    """It is the device's port, of which each context is told."""
    with opened("inline") as other:
        for up, event_type, state in (
            (False, EventType.PORT_ERR, PortState.DOWN),
            (True, EventType.PORT_ACTIVE, PortState.ACTIVE),
        ):
            other.faults.set_port(up)
            for told in (context, other):
                assert told.query_port().state is state
                event = next_event(told)
                assert (event.event_type, event.element, event.port_num) == (event_type, None, 1)
                assert repr(event) == f"<AsyncEvent {event_type.name}>"
                with pytest.raises(BusyResourceError, match=r"open objects|1 of its asynchronous events"):
                    told.destroy()
                event.ack()
                assert told.get_async_event() is None


def test_a_context_stays_for_its_event(context: software.Context) -> None:
    context.faults.lose_device()
    event = next_event(context)
    with pytest.raises(BusyResourceError, match="1 of its asynchronous events were not acknowledged"):
        context.destroy()
    assert not context.closed
    event.ack()


def test_the_device_is_lost(context: software.Context) -> None:
    near, _ = make_pair(context)
    context.faults.lose_device()
    event = next_event(context)
    assert (event.event_type, event.element, event.port_num) == (EventType.DEVICE_FATAL, None, None)
    event.ack()
    for call in (lambda: handles.ProtectionDomain(context), lambda: post_send(near.qp, WRITE), context.query_device):
        with pytest.raises(VerbsError) as caught:
            call()
        assert caught.value.errno == errno.EIO
    assert poll(near.cq) == []
    near.qp.destroy()
    context.faults.lose_device()  # for good, and told once
    assert context.get_async_event() is None


@pytest.mark.parametrize("event_type", RAISED, ids=lambda event_type: event_type.name)
def test_an_acknowledgement_from_another_thread(context: software.Context, event_type: EventType) -> None:
    element = RAISED[event_type](context)
    event = next_event(context)
    drain(context)
    for handle in handles.open_handles():
        if isinstance(handle, handles.QueuePair) and handle is not element:
            handle.destroy()
    thread = threading.Thread(target=event.ack)
    with pytest.raises(BusyResourceError):
        element.destroy()
    thread.start()

    def destroyed() -> bool:
        try:
            element.destroy()
        except BusyResourceError:
            return False
        return True

    wait_until(destroyed)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert element.closed


def test_a_loop_waits_for_the_descriptor(context: software.Context) -> None:
    """And goes on while somebody keeps an event for himself: nothing here waits for an acknowledgement."""

    async def take() -> handles.AsyncEvent:
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        assert context.get_async_event() is None
        loop.add_reader(context.async_fd, told.set)
        try:
            context.faults.break_queue_pair(near.qp)
            await asyncio.wait_for(told.wait(), PATIENCE_S)
        finally:
            loop.remove_reader(context.async_fd)
        event = context.get_async_event()
        assert event is not None
        with pytest.raises(BusyResourceError):
            near.qp.destroy()
        loop.call_later(0.01, event.ack)
        while not near.qp.closed:
            await asyncio.sleep(0.001)
            if event.acknowledged:
                near.qp.destroy()
        return event

    near, _ = make_pair(context)
    event = asyncio.run(take())
    assert (event.event_type, event.element) == (EventType.QP_FATAL, near.qp)


def test_nothing_waits(context: software.Context) -> None:
    for _ in range(3):
        assert context.get_async_event() is None
    assert not readable(context)


def test_the_descriptor_tells_of_an_event(context: software.Context) -> None:
    assert not readable(context)
    raise_sq_drained(context)
    assert readable(context)
    next_event(context).ack()
    assert not readable(context)


def test_an_acknowledgement_is_given_once(context: software.Context) -> None:
    qp = raise_sq_drained(context)
    event = next_event(context)
    event.ack()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"SQ_DRAINED of <QueuePair .*> was acknowledged before"):
            event.ack()
    qp.destroy()
    with pytest.raises(ValueError, match="was acknowledged before"):
        event.ack()


def test_several_of_one_object(context: software.Context) -> None:
    qp = raise_sq_drained(context)
    first = next_event(context)
    qp.modify(QpState.RTS)
    qp.modify(QpState.SQD, en_sqd_async_notify=True)
    second = next_event(context)
    with pytest.raises(BusyResourceError, match="2 of its asynchronous events"):
        qp.destroy()
    first.ack()
    with pytest.raises(BusyResourceError, match="1 of its asynchronous events"):
        qp.destroy()
    second.ack()
    qp.destroy()


def test_events_that_nobody_took_go_with_their_object(context: software.Context) -> None:
    qp = raise_sq_drained(context)
    qp.destroy()
    assert not readable(context)
    assert context.get_async_event() is None


def test_a_forgotten_event_acknowledges_itself_and_says_so(context: software.Context) -> None:
    qp = raise_sq_drained(context)
    event = next_event(context)
    events = [event]
    del event
    with pytest.warns(ResourceWarning, match=r"SQ_DRAINED of <QueuePair .* was never acknowledged"):
        events.clear()
    qp.destroy()


def test_one_that_was_acknowledged_is_forgotten_in_silence(context: software.Context) -> None:
    raise_sq_drained(context)
    next_event(context).ack()
    gc.collect()
    assert not any(isinstance(kept, handles.AsyncEvent) for kept in gc.get_objects())


def test_a_child_of_a_fork_acknowledges_nothing(context: software.Context) -> None:
    qp = raise_sq_drained(context)
    event = next_event(context)
    taken = [event]

    def child() -> None:
        with pytest.raises(ForkedProcessError):
            taken[0].ack()
        taken.clear()
        gc.collect()
        with pytest.raises(ForkedProcessError):
            context.get_async_event()

    in_child(child)
    with pytest.raises(BusyResourceError):
        qp.destroy()
    event.ack()


def test_events_come_from_a_context_only() -> None:
    with pytest.raises(TypeError, match=r"come from Context\.get_async_event"):
        handles.AsyncEvent()
    bare = handles.AsyncEvent.__new__(handles.AsyncEvent)
    with pytest.raises(ValueError, match="was acknowledged before"):
        bare.ack()
    with opened("inline") as context:
        pass
    with pytest.raises(ClosedResourceError):
        context.get_async_event()


def test_an_event_is_taken_while_its_object_is_destroyed() -> None:
    """Destroying waits for what is executed elsewhere, and is overtaken: it is acknowledged on the spot."""
    with opened("engine") as context:
        busy, target = make_pair(context, size=32 << 20)
        for _ in range(10):
            qp = raise_sq_drained(context)
            post_send(
                busy.qp, WRITE, [busy.sge()], flags=SIGNALED, remote_addr=target.region.address, rkey=target.region.rkey
            )
            refused: list[BusyResourceError] = []

            def destroy(qp: handles.QueuePair, refused: list[BusyResourceError]) -> None:
                try:
                    qp.destroy()
                except BusyResourceError as error:  # the event was taken before
                    refused.append(error)

            destroyer = threading.Thread(target=destroy, args=(qp, refused))
            destroyer.start()
            event = context.get_async_event()
            assert event is not None or not refused
            if event is not None:
                event.ack()
            destroyer.join(PATIENCE_S)
            assert not destroyer.is_alive()
            qp.destroy()
            succeed(busy.cq)


def test_draining_waits_for_what_was_begun(context: software.Context) -> None:
    """SQD with a request that is tried again and again: the event comes when that one has ended."""
    domain = make_domain(context, "plain")
    near, far = make_end(domain), make_end(domain)
    to_init(near.qp)
    to_rtr(near.qp, far.qp.qp_num)
    to_rts(near.qp, timeout=15, retry_cnt=7, rnr_retry=7)  # for a second in all
    post_send(near.qp, SEND, [near.sge(0, 4)], wr_id=1, flags=SIGNALED)
    time.sleep(0.05)  # for an engine to begin
    near.qp.modify(QpState.SQD, en_sqd_async_notify=True)
    post_send(near.qp, SEND, [near.sge(0, 5)], wr_id=2, flags=SIGNALED)
    told = near.qp.query()
    assert told.qp_state is QpState.SQD
    assert told.cur_qp_state is QpState.SQD
    draining = told.sq_draining  # or the engine was late: then nothing was begun
    to_init(far.qp)
    post_recv(far.qp, [far.sge()])
    post_recv(far.qp, [far.sge()])
    to_rtr(far.qp, near.qp.qp_num)
    event = next_event(context)
    while event.event_type is not EventType.SQ_DRAINED:
        event.ack()
        event = next_event(context)
    assert event.element is near.qp
    event.ack()
    assert not near.qp.query().sq_draining
    before = [completion.wr_id for completion in poll(near.cq)]
    assert before == ([1] if draining else [])
    near.qp.modify(QpState.RTS)
    assert before + [completion.wr_id for completion in wait_for(near.cq, 2 - len(before))] == [1, 2]
    drain(context)
