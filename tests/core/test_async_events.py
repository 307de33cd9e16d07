"""Asynchronous events: read without blocking, tied to a handle, and acknowledged once."""

import gc
import select
import threading
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
)
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from tests.core.children import in_child
from tests.core.contexts import opened
from tests.core.pairs import (
    PATIENCE_S,
    make_pair,
    next_event,
    succeed,
)
from tests.garbage import collect_garbage
from tests.raw_verbs import post_send

WRITE, SEND, SIGNALED = SendOpcode.RDMA_WRITE, SendOpcode.SEND, SendFlags.SIGNALED


def readable(context: software.Context, timeout_s: float = 0) -> bool:
    return bool(select.select([context.async_fd], [], [], timeout_s)[0])


def raise_cq_err(context: software.Context) -> handles.CompletionQueue:
    cq = handles.CompletionQueue(context, 4)
    context.faults.break_completion_queue(cq)
    return cq


def raise_qp_fatal(context: software.Context) -> handles.QueuePair:
    near, _ = make_pair(context)
    context.faults.break_queue_pair(near.qp)
    return near.qp


def raise_srq_err(context: software.Context) -> handles.SharedReceiveQueue:
    srq = handles.SharedReceiveQueue(handles.ProtectionDomain(context), 4)
    context.faults.break_shared_receive_queue(srq)
    return srq


def raise_sq_drained(context: software.Context) -> handles.QueuePair:
    near, _ = make_pair(context)
    near.qp.modify(QpState.SQD, en_sqd_async_notify=True)
    assert readable(context, PATIENCE_S)
    return near.qp


RAISED: dict[EventType, Callable[[software.Context], handles.Handle]] = {
    EventType.QP_FATAL: raise_qp_fatal,
    EventType.SRQ_ERR: raise_srq_err,
    EventType.CQ_ERR: raise_cq_err,
    EventType.SQ_DRAINED: raise_sq_drained,
}


@pytest.mark.parametrize("event_type", RAISED, ids=lambda event_type: event_type.name)
def test_an_unacknowledged_event_keeps_its_object_open(context: software.Context, event_type: EventType) -> None:
    """Destroying an object with unacknowledged events is refused, since the verb would wait for the acknowledgement."""
    element = RAISED[event_type](context)
    event = next_event(context)
    assert event.event_type is event_type
    assert event.element is element
    assert event.port_num is None
    assert repr(event) == f"<AsyncEvent {event_type.name} of {element!r}>"
    for _ in range(2):
        with pytest.raises(BusyResourceError, match="1 of its asynchronous events were not acknowledged"):
            element.destroy()
        assert not element.closed
    acknowledged = [event.acknowledged]
    event.ack()
    assert [*acknowledged, event.acknowledged] == [False, True]
    element.destroy()
    assert event.element is element


def test_port_events_reach_every_context(context: software.Context) -> None:
    """The port belongs to the device, so every context gets the event."""
    with opened("inline") as other:
        for up, event_type, state in (
            (False, EventType.PORT_ERR, PortState.DOWN),
            (True, EventType.PORT_ACTIVE, PortState.ACTIVE),
        ):
            other.faults.set_port(up)
            for each in (context, other):
                assert each.query_port().state is state
                event = next_event(each)
                assert (event.event_type, event.element, event.port_num) == (event_type, None, 1)
                assert repr(event) == f"<AsyncEvent {event_type.name}>"
                with pytest.raises(BusyResourceError, match=r"open objects|1 of its asynchronous events"):
                    each.destroy()
                event.ack()
                assert each.get_async_event() is None


def test_an_unacknowledged_event_keeps_its_context_open(context: software.Context) -> None:
    context.faults.lose_device()
    event = next_event(context)
    with pytest.raises(BusyResourceError, match="1 of its asynchronous events were not acknowledged"):
        context.destroy()
    assert not context.closed
    event.ack()


@pytest.mark.every_way
def test_an_acknowledgement_from_another_thread(context: software.Context) -> None:
    qp = raise_sq_drained(context)
    event = next_event(context)
    thread = threading.Thread(target=event.ack)
    with pytest.raises(BusyResourceError):
        qp.destroy()
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    qp.destroy()


@pytest.mark.every_way
def test_the_descriptor_is_readable_while_an_event_waits(context: software.Context) -> None:
    for _ in range(3):
        assert context.get_async_event() is None
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


def test_several_events_of_one_object(context: software.Context) -> None:
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


def test_a_dropped_event_is_acknowledged_with_a_warning(context: software.Context) -> None:
    qp = raise_sq_drained(context)
    event = next_event(context)
    events = [event]
    del event
    with pytest.warns(ResourceWarning, match=r"SQ_DRAINED of <QueuePair .* was never acknowledged"):
        events.clear()
    qp.destroy()


def test_an_acknowledged_event_is_dropped_silently(context: software.Context) -> None:
    raise_sq_drained(context)
    next_event(context).ack()
    collect_garbage()
    assert not any(isinstance(each, handles.AsyncEvent) for each in gc.get_objects())


def test_a_child_of_a_fork_acknowledges_nothing(context: software.Context) -> None:
    qp = raise_sq_drained(context)
    event = next_event(context)
    events = [event]

    def child() -> None:
        with pytest.raises(ForkedProcessError):
            events[0].ack()
        events.clear()
        collect_garbage()
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


def test_an_event_is_read_while_its_object_is_destroyed() -> None:
    """Destroying waits for requests in execution; an event that is read meanwhile is acknowledged at once."""
    with opened("thread") as context:
        busy, target = make_pair(context, size=32 << 20)
        for _ in range(4):
            qp = raise_sq_drained(context)
            post_send(
                busy.qp, WRITE, [busy.sge()], flags=SIGNALED, remote_addr=target.region.address, rkey=target.region.rkey
            )
            refused: list[BusyResourceError] = []

            def destroy(qp: handles.QueuePair, refused: list[BusyResourceError]) -> None:
                try:
                    qp.destroy()
                except BusyResourceError as error:  # the event was read first
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
