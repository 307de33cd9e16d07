"""Completion events: requested, raised once, read, acknowledged."""

import select
import threading

import pytest

from aioverbs import BusyResourceError, SendFlags, SendOpcode
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from tests.core.contexts import opened
from tests.core.pairs import PATIENCE_S, End, connect, make_domain, make_end, make_pair, succeed, wait_for
from tests.raw_verbs import poll, post_recv, post_send

WRITE, SEND = SendOpcode.RDMA_WRITE, SendOpcode.SEND
SIGNALED = SendFlags.SIGNALED


@pytest.fixture
def channel(context: software.Context) -> handles.CompletionChannel:
    return handles.CompletionChannel(context)


@pytest.fixture(params=["basic", "extended"])
def pair(
    request: pytest.FixtureRequest, context: software.Context, channel: handles.CompletionChannel
) -> tuple[End, End]:
    """Two connected ends, both with their queue on the channel."""
    domain, extended = make_domain(context, "plain"), request.param == "extended"
    near, far = (make_end(domain, channel=channel, extended=extended) for _ in range(2))
    connect(near.qp, far.qp)
    return near, far


def readable(channel: handles.CompletionChannel, timeout_s: float = 0) -> bool:
    return bool(select.select([channel], [], [], timeout_s)[0])


def next_event(channel: handles.CompletionChannel) -> handles.CompletionQueue:
    """Wait for an event, and read it."""
    assert readable(channel, PATIENCE_S)
    queue = channel.get_event()
    assert queue is not None
    return queue


def take_completions(end: End, count: int = 1) -> None:
    """Take `count` completions, and wait until their events have been raised, too."""
    wait_for(end.cq, count)
    end.qp.query()  # waits for the device to finish executing


@pytest.mark.every_way
def test_an_event_for_the_next_completion(channel: handles.CompletionChannel, pair: tuple[End, End]) -> None:
    near, _ = pair
    assert near.cq.channel is channel
    assert channel.get_event() is None
    near.cq.request_notify()
    post_send(near.qp, WRITE, flags=SIGNALED)
    post_send(near.qp, WRITE, flags=SIGNALED)
    assert next_event(channel) is near.cq
    near.cq.ack_events()
    take_completions(near, 2)
    assert channel.get_event() is None  # one event for any number of completions
    assert not readable(channel)


def test_solicited_only(channel: handles.CompletionChannel, pair: tuple[End, End]) -> None:
    near, far = pair
    for _ in range(3):
        post_recv(far.qp)
    far.cq.request_notify(solicited_only=True)
    post_send(near.qp, SEND)
    take_completions(far)
    assert channel.get_event() is None
    post_send(near.qp, SEND, flags=SendFlags.SOLICITED)
    assert next_event(channel) is far.cq
    # An error always raises an event.
    far.cq.request_notify(solicited_only=True)
    post_send(near.qp, SEND, [near.sge(0, 1)])
    assert next_event(channel) is far.cq
    far.cq.ack_events(2)


def test_a_channel_of_many_queues(context: software.Context, channel: handles.CompletionChannel) -> None:
    domain = make_domain(context, "plain")
    ends = [make_end(domain, channel=channel) for _ in range(6)]
    for near, far in zip(ends[::2], ends[1::2], strict=True):
        connect(near.qp, far.qp)
        post_recv(far.qp)
    for end in ends:
        end.cq.request_notify()
    for near in ends[::2]:
        post_send(near.qp, SEND, flags=SIGNALED)
    woken = {next_event(channel) for _ in ends}
    assert woken == {end.cq for end in ends}
    assert not readable(channel)
    for queue in woken:
        queue.ack_events()


def test_unacknowledged_events_keep_the_queue_open(channel: handles.CompletionChannel, pair: tuple[End, End]) -> None:
    """Destroying a queue with unacknowledged events is refused, since the verb would wait for the acknowledgement."""
    near, _ = pair
    near.qp.destroy()
    domain = near.pd
    other = make_end(domain)
    qp = handles.QueuePair(domain, near.cq, near.cq)
    connect(qp, other.qp)
    for _ in range(3):
        near.cq.request_notify()
        post_send(qp, WRITE, flags=SIGNALED)
        assert next_event(channel) is near.cq
        succeed(near.cq)
    qp.destroy()
    for remaining in (3, 2, 1):
        with pytest.raises(BusyResourceError, match=f"{remaining} of its events were not acknowledged"):
            near.cq.destroy()
        assert poll(near.cq) == []
        near.cq.ack_events(1)
    with pytest.raises(ValueError, match="has 0 unacknowledged events"):
        near.cq.ack_events()
    near.cq.destroy()


def test_an_event_is_read_while_its_queue_is_destroyed() -> None:
    """Destroying waits for requests in execution, and an event may be read meanwhile.

    The event is then acknowledged at once: the verb would wait for that as well, and no other code could do so any
    more.
    """
    with opened("thread") as context:
        busy, target = make_pair(context, size=32 << 20)
        channel = handles.CompletionChannel(context)
        domain = make_domain(context, "plain")
        for _ in range(4):
            near = make_end(domain, channel=channel)
            near.cq.request_notify()
            far = make_end(domain)
            connect(near.qp, far.qp)
            post_send(near.qp, WRITE, flags=SIGNALED)
            succeed(near.cq)
            assert readable(channel, PATIENCE_S)
            near.qp.destroy()
            far.qp.destroy()
            post_send(
                busy.qp, WRITE, [busy.sge()], flags=SIGNALED, remote_addr=target.region.address, rkey=target.region.rkey
            )
            refused: list[BusyResourceError] = []

            def destroy(cq: handles.CompletionQueue, refused: list[BusyResourceError]) -> None:
                try:
                    cq.destroy()
                except BusyResourceError as error:  # the event was read first
                    refused.append(error)

            destroyer = threading.Thread(target=destroy, args=(near.cq, refused))
            destroyer.start()
            queue = channel.get_event()
            assert (queue is not None) or not refused
            if queue is not None:
                queue.ack_events()
            destroyer.join(PATIENCE_S)
            assert not destroyer.is_alive()
            near.cq.destroy()
            succeed(busy.cq)
