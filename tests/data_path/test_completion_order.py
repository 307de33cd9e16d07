"""Completions are reported in the order in which they arrived, whatever code polls for newer ones meanwhile.

Other Python code can run while completions are reported: signal handlers, finalizers, other threads. A profile function
stands in for all of these, since it runs at a chosen call.
"""

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from aioverbs import Device, QpCapabilities, ThreadModel
from tests.data_path.ends import ends
from tests.data_path.test_messages import MessageReceiver
from tests.pace import patience
from tests.waiting import wait_until

MESSAGES = 40  # more than one poll takes from the queue


@contextlib.contextmanager
def calling_at_each_message(action: Callable[[], object]) -> Iterator[None]:
    """Call `action` whenever a received message is reported."""

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "_message":
            action()

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.every_way
async def test_messages_keep_their_order_when_polled_while_reported(device: Device) -> None:
    sent_done = []
    async with (
        ends(device, capabilities=QpCapabilities(max_send_wr=MESSAGES)) as pair,
        MessageReceiver(pair, MESSAGES) as receiver,
    ):
        pair.source.buffer[:MESSAGES] = bytes(range(MESSAGES))
        *_, sent = [pair.near.send(pair.source[number : number + 1]) for number in range(MESSAGES)]
        time.sleep(patience(0.05))  # noqa: ASYNC251  # all of them complete, and no poll happens
        order = []
        with calling_at_each_message(lambda: sent_done.append(sent.done())):
            async with asyncio.timeout(patience(10)):
                for _ in range(MESSAGES):
                    with await anext(receiver.qp.messages()) as message:
                        order.append(message.data[0])
                await sent
    assert order == list(range(MESSAGES))
    assert len(sent_done) == MESSAGES
    assert not sent_done[0]


@pytest.mark.every_way
async def test_a_waiter_receives_completions_taken_by_another_thread(device: Device) -> None:
    """Report completions that arrive while another thread reports earlier ones.

    The loop polls and goes to sleep meanwhile; it is notified once that thread is finished.
    """
    reporting, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reporting.set()
        go_on.wait(patience(10))

    def poll_for_send() -> None:
        with calling_at_each_message(hold):
            wait_until(sent.done)

    async with ends(device, thread_model=ThreadModel.SAFE) as pair, MessageReceiver(pair) as receiver:
        sent = pair.near.send(pair.source[:1])
        thread = threading.Thread(target=poll_for_send)
        thread.start()
        assert reporting.wait(patience(10))  # the loop does not poll meanwhile
        written = pair.near.write(pair.source[:8], pair.target.remote()[:8])
        asyncio.get_running_loop().call_later(patience(0.05), go_on.set)
        async with asyncio.timeout(patience(5)):
            await written
            with await anext(receiver.qp.messages()) as message:
                assert message.byte_len == 1
        thread.join()
